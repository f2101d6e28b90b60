"""A real sidecar process for tests, forked from one that has imported everything already."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.eventually import eventually
from tests.support.machine import limit_s


class Zygote:
    """The process that forks sidecars; one per test session."""

    _one: Zygote | None = None

    def __init__(self) -> None:
        path = Path(__file__).with_name("sidecar_zygote.py")
        env = {k: v for k, v in os.environ.items() if not k.startswith("DELTASHARD_")} | {
            "OMP_NUM_THREADS": "1"
        }
        self.process = subprocess.Popen(
            [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.lock = threading.Lock()
        assert self.process.stdout.readline() == "ready\n"
        atexit.register(self.close)

    @classmethod
    def get(cls) -> Zygote:
        if cls._one is None:
            cls._one = cls()
        return cls._one

    def request(self, **request: object) -> int | None:
        with self.lock:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class SidecarProcess:
    """A real sidecar over a runtime directory."""

    def __init__(
        self,
        root: Path,
        url: str,
        *,
        run: str = "run",
        crash_at: str = "",
        environment: dict[str, str | None] | None = None,
        constants: dict[str, float] | None = None,
        **flags: object,
    ):
        """`environment` extends this process's own, None removes a variable. `constants`: see `sidecar_zygote`."""
        self.dir = root / "run"
        self.dir.mkdir(exist_ok=True)
        self.log_path = root / "sidecar.log"
        self.url = url
        self.status: int | None = None
        options = {
            "url": url, "run": run, "dir": self.dir, "cache-dir": root / "cache", "arena-bytes": "64MiB",
            "maintenance-interval-s": -1, "term-deadline-s": 5, "cache-bytes": "512MiB", **flags,
        }  # fmt: skip
        self.argv = ["serve"]
        for name, value in options.items():
            self.argv += [f"--{name.replace('_', '-')}", str(value)]
        env = {k: v for k, v in os.environ.items() if not k.startswith("DELTASHARD_")}
        env |= {"OMP_NUM_THREADS": "1", "DELTASHARD_CRASH_AT": crash_at}
        for name, value in (environment or {}).items():
            env.pop(name, None)
            if value is not None:
                env[name] = value
        pid = Zygote.get().request(
            argv=self.argv, env=env, cwd=str(root), log=str(self.log_path), constants=constants or {}
        )
        assert pid
        self.pid: int = pid
        self.ready()

    @property
    def socket(self) -> Path:
        return self.dir / "sidecar.sock"

    def log(self) -> str:
        return self.log_path.read_text()

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def ready(self) -> dict[str, int]:
        facts: dict[str, int] = {}

        def is_ready() -> bool:
            assert self.poll() is None, self.log()
            try:  # the next sidecar removes a killed predecessor's file, possibly at this moment
                facts.update(json.loads((self.dir / "ready.json").read_text()))
            except FileNotFoundError:
                return False
            return facts["pid"] == self.pid

        eventually(is_ready, what="the sidecar serves")
        return facts

    def metrics_page(self) -> str:
        where = f"http://127.0.0.1:{self.ready()['metrics_port']}/metrics"
        with urllib.request.urlopen(where, timeout=limit_s(20)) as page:
            return page.read().decode()

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} ([0-9.e+-]+)$", self.metrics_page(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def blocks(self, use: str) -> int:
        return int(self.metric(f'deltashard_arena_blocks{{use="{use}"}}'))

    def poll(self) -> int | None:
        if self.status is None:
            self.status = Zygote.get().request(poll=self.pid)
        return self.status

    def wait_exit(self) -> int:
        """Wait for its end; return the exit status, negative for a signal."""
        eventually(lambda: self.poll() is not None, what="the sidecar ends")
        assert self.status is not None
        return self.status

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait_exit()

    def terminate(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait_exit()


@contextmanager
def sidecar(root: Path, url: str, **flags: object) -> Iterator[SidecarProcess]:
    process = SidecarProcess(root, url, **flags)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        process.kill()
