"""Server processes of the cluster: start, wait, end by pid, and find again after a test run was killed.

Every process is written to a ledger file before another component depends on it, with its start time from /proc. So a
later run can end the processes of an earlier one and never ends an unrelated process with the same pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.eventually import EventuallyTimeout, eventually
from tests.support.machine import limit_s


class ClusterError(Exception):
    """The cluster cannot be built, or an expected event did not happen in time."""


def wait_until(
    condition: Callable[[], object], *, timeout_s: float, what: str | Callable[[], str], every_s: float = 0.05
) -> None:
    """Poll until `condition()` is true; raise `ClusterError` that names `what` did not happen.

    `timeout_s` is for an idle machine: the actual limit may be longer (`machine.limit_s`).
    """
    try:
        eventually(condition, what, timeout_s=timeout_s, every_s=every_s)
    except EventuallyTimeout as missed:
        raise ClusterError(str(missed)) from None


def start_time(pid: int) -> str | None:
    """Return when the process began, in the kernel's ticks; None when it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def end(pid: int, started: str | None, *, timeout_s: float = 10.0) -> None:
    """Send SIGTERM, then SIGKILL; do nothing when the pid now belongs to another process."""
    timeout_s = limit_s(timeout_s)
    for how in (signal.SIGTERM, signal.SIGKILL):
        if start_time(pid) != started or started is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
            os.kill(pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        ends_s = time.monotonic() + timeout_s
        while start_time(pid) == started and time.monotonic() < ends_s:
            time.sleep(0.01)


class ProcessLedger:
    """The started processes, in a file; one process of the tests uses it to find what another started."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[tuple[str, int, str]]:
        """(name, pid, start time), oldest first."""
        if not self.path.exists():
            return []
        rows = (json.loads(line) for line in self.path.read_text().splitlines())
        return [(row["name"], row["pid"], row["started"]) for row in rows]

    def add(self, name: str, pid: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"name": name, "pid": pid, "started": start_time(pid)}) + "\n")

    def newest(self, name: str) -> tuple[int, str] | None:
        """(pid, start time) of the newest process of a name."""
        found = [(pid, started) for each, pid, started in self.read() if each == name]
        return found[-1] if found else None

    def end_all(self) -> None:
        for _name, pid, started in reversed(self.read()):
            end(pid, started)
        self.path.unlink(missing_ok=True)


class ServerProcess:
    """One long-running process with a log file; `start` after `kill` starts it again.

    Another process of the tests may have started it: the ledger names the pid.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], *, folder: Path, ledger: ProcessLedger
    ) -> None:
        self.name = name
        self.command = [str(each) for each in command]
        self.log = folder / f"{name}.log"
        self._ledger = ledger
        self._child: subprocess.Popen[bytes] | None = None

    def _process(self) -> tuple[int, str] | None:
        """Return (pid, start time) while the process runs."""
        if self._child is not None:
            self._child.poll()  # reaps it
        found = self._ledger.newest(self.name)
        return found if found and start_time(found[0]) == found[1] else None

    @property
    def pid(self) -> int:
        if (found := self._process()) is None:
            raise ClusterError(f"{self.name} does not run")
        return found[0]

    @property
    def alive(self) -> bool:
        return self._process() is not None

    def start(self) -> None:
        """Start the process in its own session; return at once."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            )
        self._ledger.add(self.name, self._child.pid)
        with contextlib.suppress(
            OSError
        ):  # sessions share the processors, so a busy machine does not starve this one
            Path(f"/proc/{self._child.pid}/autogroup").write_text("-10")

    def wait_ready(self, condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
        """Wait for `condition()`; a process that ended meanwhile fails at once, with the end of its log."""

        def ready() -> bool:
            if not self.alive:
                raise ClusterError(f"{self.name} ended:\n{self.tail()}")
            return bool(condition())

        wait_until(ready, timeout_s=timeout_s, what=lambda: f"{self.name} ready:\n{self.tail()}")

    def tail(self, size_bytes: int = 3000) -> str:
        return self.log.read_bytes()[-size_bytes:].decode(errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        if found := self._process():
            os.kill(found[0], number)

    def stop(self) -> None:
        if found := self._process():
            end(*found)
        self._reap()

    def kill(self) -> None:
        if found := self._process():
            os.kill(found[0], signal.SIGKILL)
            wait_until(lambda: self._process() is None, timeout_s=10, what=f"{self.name} ended")
        self._reap()

    def _reap(self) -> None:
        if self._child is not None:
            self._child.wait(limit_s(10))
        self._child = None


def run(*command: str | Path, check: bool = True, timeout_s: float = 120.0) -> str:
    """Run a command, return its output; raise `ClusterError` with its message.

    `timeout_s` is for an idle machine: the actual limit may be longer.
    """
    arguments = [str(each) for each in command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit_s(timeout_s), check=False)
    if check and done.returncode:
        raise ClusterError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stderr or done.stdout}")
    return done.stdout
