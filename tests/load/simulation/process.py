"""Processes under load: start, resource usage, and end by PID."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resource usage of a process since its start."""

    rss_bytes: int
    peak_rss_bytes: int
    cpu_s: float
    threads: int
    files: int


def usage(pid: int) -> Usage:
    process = psutil.Process(pid)
    status = Path(f"/proc/{pid}/status").read_text()
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    times = process.cpu_times()
    return Usage(
        rss_bytes=process.memory_info().rss,
        peak_rss_bytes=int(peak_kib) << 10,
        cpu_s=times.user + times.system,
        threads=process.num_threads(),
        files=process.num_fds(),
    )


class LoggedProcess:
    """One program with a log file; `start` after `stop` or `kill` starts it again."""

    def __init__(
        self, name: str, command: Sequence[object], *, folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [str(each) for each in command]
        self._env = env
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise an error with the end of its log if the process does not run."""
        assert self._running is not None, f"{self.name} was not started"
        status = self._running.poll()
        assert status is None, f"{self.name} ended with {status}:\n{self.tail()}"

    def tail(self, size_bytes: int = 4000) -> str:
        return self.log.read_bytes()[-size_bytes:].decode(errors="replace") if self.log.exists() else ""

    def usage(self) -> Usage:
        self.check()
        assert self._running is not None
        return usage(self._running.pid)

    def stop(self, number: signal.Signals = signal.SIGTERM, *, timeout_s: float = 30.0) -> None:
        if self._running is None:
            return
        if self._running.poll() is None:
            self._running.send_signal(number)
            try:
                self._running.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait(timeout_s)
        self._running = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)
