"""A local pod: one sidecar and one trainer, restarted when they die, as the kubelet would restart the containers.

The runtime directory (arena and socket) is in memory, the cache directory on disk; only the sidecar gets the store's
URL and credentials. A process that exits with a code other than 0 is restarted after `RESTART_S`, except while the
pod is `held` for a kill with clean-up; when the trainer has exited with 0 the sidecar is stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from harness import frozen

RESTART_S = 0.3
"""The kubelet restarts a container at once the first time, and backs off only when it keeps dying."""
_CREDENTIALS = ("AWS_", "MINIO_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRun:
    """One process of the pod, from start to end."""

    container: str
    pid: int
    started_s: float
    ended_s: float
    exit_code: int


@dataclass(slots=True)
class _Container:
    name: str
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    ended: list[ContainerRun] = field(default_factory=list)


class LocalPod:
    """Runs until the trainer exits with 0; `close` ends whatever still runs."""

    def __init__(
        self, folder: Path, *, memory: Path, url: str, run: str, sidecar: list[str], trainer: list[str]
    ) -> None:
        """`memory` is a directory in memory for arena and socket; `sidecar` and `trainer` are further arguments."""
        self.folder = folder
        self.memory = memory
        self.cache = folder / "cache"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        here = Path(__file__).resolve().parent
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        without_store = {k: v for k, v in environment.items() if not k.startswith(_CREDENTIALS)}
        self._sidecar = _Container(
            "sidecar",
            [
                *(sys.executable, "-m", "deltashard_sidecar.main", "serve"),
                *("--url", url, "--run", run, "--dir", str(memory), "--cache-dir", str(self.cache)),
                *sidecar,
            ],
            environment,
        )
        self._trainer = _Container(
            "trainer",
            [sys.executable, str(here / "train.py"), *trainer],
            without_store | {"DELTASHARD_SOCKET": str(memory / "sidecar.sock")},
        )
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self.finished = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="kubelet", daemon=True)

    # Lifecycle

    def start(self) -> None:
        with self._lock:
            for container in (self._sidecar, self._trainer):
                self._start(container)
        self._supervisor.start()

    def _start(self, container: _Container) -> None:
        self.memory.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{container.name}.log").open("ab") as log:
            container.process = subprocess.Popen(
                container.command,
                env=container.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        container.started_s = time.time()

    def _supervise(self) -> None:
        while not self._closing.wait(0.05):
            with self._lock:
                for container in (self._sidecar, self._trainer):
                    self._restart_if_exited(container)

    def _restart_if_exited(self, container: _Container) -> None:
        process = container.process
        if process is None:
            due = container.ended[-1].ended_s + RESTART_S
            if time.time() >= due and not self.finished.is_set():
                self._start(container)
        elif (code := process.poll()) is not None:
            self._record_end(container, code)
            if container is self._trainer and code == 0:
                self.finished.set()

    def _record_end(self, container: _Container, code: int) -> None:
        assert container.process is not None
        container.ended.append(
            ContainerRun(
                container=container.name,
                pid=container.process.pid,
                started_s=container.started_s,
                ended_s=time.time(),
                exit_code=code,
            )
        )
        container.process = None

    def close(self) -> None:
        """Stop the sidecar as a deleted pod would, and end processes that do not react."""
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for container in (self._trainer, self._sidecar):
            process = container.process
            if process is None:
                continue
            process.terminate()
            try:
                self._record_end(container, process.wait(30))
            except subprocess.TimeoutExpired:
                process.kill()
                self._record_end(container, process.wait())
        shutil.rmtree(self.memory, ignore_errors=True)

    # Inspection and kills

    @property
    def ended(self) -> list[ContainerRun]:
        """Return the processes that have ended, oldest first."""
        with self._lock:
            return sorted((*self._sidecar.ended, *self._trainer.ended), key=lambda run: run.ended_s)

    def pid(self, name: str) -> int:
        """Return the process id of "sidecar" or "trainer", waiting while it is being restarted."""
        container = self._sidecar if name == "sidecar" else self._trainer
        while True:
            with self._lock:
                if container.process is not None and container.process.poll() is None:
                    return container.process.pid
            time.sleep(0.01)

    def kill(self, name: str) -> float:
        process = (self._sidecar if name == "sidecar" else self._trainer).process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return time.time()

    def kill_all_and_wipe(self) -> float:
        """SIGKILL both and remove shared memory and local cache, as in the loss of a node. Seconds since epoch."""
        with self._lock:  # no restart in between
            for container in (self._trainer, self._sidecar):
                if container.process is not None:
                    os.kill(container.process.pid, signal.SIGKILL)
            for container in (self._trainer, self._sidecar):
                if container.process is not None:
                    container.process.wait()
            shutil.rmtree(self.memory)
            shutil.rmtree(self.cache, ignore_errors=True)
            return time.time()

    def frozen(self, name: str) -> AbstractContextManager[int]:
        """Stop the process (SIGSTOP) inside the block; continue it afterwards if it still exists."""
        return frozen(self.pid(name))

    def log_tail(self, name: str, lines: int = 30) -> str:
        return "\n".join((self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])
