"""The promise of tests/unit: no process is started and no port is served, so that they run anywhere, and fast.

The interpreter's audit events tell of both, wherever in the code they come from; what passes them by (multiprocessing's
spawn, gRPC's servers) is told by its own door. The act is refused where it is tried, and the test fails by name even
when the code under it swallows the refusal.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

REFUSED = frozenset(
    {
        "subprocess.Popen",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "socket.bind",
    }
)
"""Audit events: https://docs.python.org/3/library/audit_events.html."""


class Impure(BaseException):
    """A unit test starts a process or serves a port; no `except Exception` shall hide it."""


class Watch:
    """What the running test was refused; one in a process, since an audit hook cannot be taken away."""

    def __init__(self) -> None:
        self.test: str | None = None
        """The test that runs now; None while none is watched."""
        self.refused: list[str] = []
        platform.processor()  # asks a process once, for torch's and numpy's sake
        sys.addaudithook(self._hear)
        multiprocessing.util.spawnv_passfds = self._door(
            "multiprocessing spawn", multiprocessing.util.spawnv_passfds
        )
        grpc.server = self._door("grpc.server", grpc.server)
        grpc.aio.server = self._door("grpc.aio.server", grpc.aio.server)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.test is not None and event in REFUSED and not _importing():
            self._refuse(f"{event} {arguments[:1]}")

    def _door(self, name: str, way: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(way)
        def watched(*arguments: Any, **named: Any) -> Any:
            if self.test is not None:
                self._refuse(name)
            return way(*arguments, **named)

        return watched

    def _refuse(self, what: str) -> None:
        self.refused.append(what)
        raise Impure(
            f"{self.test}: {what}: tests/unit starts no process and serves no port; move the test to tests/integration"
        )

    @contextmanager
    def over(self, test: str) -> Iterator[None]:
        """Watch a test, its fixtures included; `Impure` at its end when something was refused and hidden."""
        self.test, self.refused = test, []
        try:
            yield
            if self.refused:
                raise Impure(f"{test}: {', '.join(self.refused)}: refused, and the code went on")
        finally:
            self.test = None


def _importing() -> bool:
    """Whether a module is being imported: what it starts then (torch asks ldconfig) is no test's, and comes once."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@functools.cache
def watch() -> Watch:
    return Watch()
