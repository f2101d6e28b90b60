"""deltashard behind the bench's interface: one sidecar process that the bench starts, measures and kills.

The trainer half runs in the bench's process, as it runs in a training script. The sidecar is a separate process, as
in a pod. Its processor time and memory are read from /proc, not from its own reports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import deltashard
from measuring import memory_bytes, process_cpu_s
from peers import Instant, SaveTiming, StoreLocation
from states import TrainingState

READY_S = 60.0


class SidecarServer:
    """One sidecar process on a store; a context manager."""

    def __init__(self, place: StoreLocation, run: str, folder: Path, **flags: object) -> None:
        self.url = f"s3://{place.root}" if place.remote else f"file://{place.root}"
        self.run = run
        self.folder = folder
        self.flags = {"keep_last": 3, "maintenance_interval_s": -1} | flags
        self.environment = dict(os.environ)
        if place.remote:
            self.environment |= {
                "AWS_ENDPOINT_URL": place.endpoint,
                "AWS_ACCESS_KEY_ID": place.access_key,
                "AWS_SECRET_ACCESS_KEY": place.secret_key,
                "AWS_REGION": "us-east-1",
            }
        self.peak_anonymous_bytes = 0

    def __enter__(self) -> Self:
        self.memory = Path(tempfile.mkdtemp(prefix="deltashard-bench-", dir="/dev/shm"))
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "deltashard_sidecar.main",
            "serve",
            "--url",
            self.url,
            "--run",
            self.run,
        ]
        command += ["--dir", str(self.memory), "--cache-dir", str(self.folder / "cache")]
        for name, value in self.flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.log = self.folder / "sidecar.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + READY_S
        while not (self.memory / "ready.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the sidecar did not start: {self.log.read_text()[-3000:]}")
            time.sleep(0.02)
        os.environ["DELTASHARD_SOCKET"] = str(self.memory / "sidecar.sock")
        self.arena_bytes = (self.memory / "arena").stat().st_size
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop("DELTASHARD_SOCKET", None)
        if hasattr(self, "_stopping"):
            self._stopping.set()
            self._watcher.join()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.memory, ignore_errors=True)

    def wait_idle(self) -> None:
        """Wait until the sidecar is idle: in a pod it has read the log long before a trainer has imported torch."""
        deadline = time.monotonic() + READY_S
        before = -1.0
        while before != self.cpu_s and time.monotonic() < deadline:
            before = self.cpu_s
            time.sleep(0.2)

    def wipe_cache(self) -> None:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)

    @property
    def cpu_s(self) -> float:
        return process_cpu_s(self.process.pid)

    def anonymous_bytes(self) -> int:
        return memory_bytes(self.process.pid, "RssAnon")

    def _watch(self) -> None:
        while not self._stopping.wait(0.02):
            with contextlib.suppress(OSError):
                self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, self.anonymous_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class OurSave:
    """A save with figures that only our checkpointer has."""

    saved: SaveTiming
    raw_bytes: int
    rows: int
    baseline: bool
    cpu_s: float


class Deltashard:
    """A Checkpointer on a running sidecar."""

    name = "deltashard"

    def __init__(self, sidecar: SidecarServer, state: TrainingState) -> None:
        self.sidecar = sidecar
        self.state = state
        self.ckpt = deltashard.Checkpointer(state.model, state.optimizers)

    def restore(self) -> tuple[object, float]:
        begun = time.perf_counter()
        restored = self.ckpt.restore()
        return restored, time.perf_counter() - begun

    def save(self) -> OurSave:
        cpu = self.sidecar.cpu_s
        begun = Instant.now()
        handle = self.ckpt.save("bench")
        released = Instant.now()
        commit = handle.wait(300)
        saved = SaveTiming(
            stall_s=released.wall_s - begun.wall_s,
            stall_cpu_s=released.cpu_s - begun.cpu_s,
            durable_s=time.perf_counter() - begun.wall_s,
            stored_bytes=commit.stored_bytes,
        )
        return OurSave(
            saved=saved,
            raw_bytes=commit.raw_bytes,
            rows=commit.rows,
            baseline=commit.baseline,
            cpu_s=self.sidecar.cpu_s - cpu,
        )

    def touch_and_step(self, share: float, seed: int) -> None:
        self.state.touch(share, seed)
        self.ckpt.step()

    def close(self) -> None:
        self.ckpt.close()
