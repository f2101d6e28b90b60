"""SIGTERM handling: save first, then run the previous handler.

The handler only records the signal. The next `step()` takes an urgent snapshot and waits for it; then the previous
handler
runs (the default one ends the process). The grace budget bounds all of this: if no step follows, or the save is not
durable
in time, the previous handler runs anyway. A second SIGTERM ends the wait.

The first process of a container needs special handling: the kernel does not deliver signals with the default action to
process 1, which would continue to train until the pod's grace period kills it. It exits with `EXIT_SIGTERM`, the code
that a shell gives a process ended by SIGTERM. With 0, a Job would count as complete.

Python runs handlers on the main thread only, so a Checkpointer built on another thread leaves signals unchanged.
Several handlers form a chain, from which each can be removed at any position. A forked child (a DataLoader worker) has
nothing to save and gets back the handler from before all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("deltashard")

EXIT_SIGTERM = 128 + signal.SIGTERM
"""SIGTERM ended a container's first process, after an urgent save. The next start continues."""


class TermHandler:
    """SIGTERM handler of one Checkpointer; it calls `notice`, which must only set flags."""

    def __init__(self, *, grace_s: Callable[[], float], notice: Callable[[], None]) -> None:
        """`grace_s` is called at the signal, since a restarted sidecar may have another value."""
        self._grace_s = grace_s
        self._notice = notice
        self._previous: Any = None
        self._installed = False
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None
        self.until_s: float | None = None
        """Monotonic end of the grace budget; None before a SIGTERM."""

    def install(self) -> bool:
        """Install the handler on the main thread, unless the signal is ignored; return whether it was installed."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return False
        self._previous = signal.signal(signal.SIGTERM, self._on_term)
        self._installed = True
        _chain.append(self)
        return True

    def remove(self) -> None:
        """Leave the chain: the handler installed after this one gets this one's previous handler.

        If that is impossible (a foreign handler was installed later, or this is not the main thread), this handler
        still receives the signal and passes it on.
        """
        if self._timer is not None:
            self._timer.cancel()
        if not self._installed:
            return
        self._installed = False
        _chain.remove(self)
        for later in _chain:
            # `==`, because each access creates a new bound method.
            if later._previous == self._on_term:  # noqa: SLF001 - one of us
                later._previous = self._previous  # noqa: SLF001 - as above
        if (
            signal.getsignal(signal.SIGTERM) == self._on_term
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGTERM, _or_default(self._previous))

    @property
    def is_active(self) -> bool:
        """Whether this chain handles SIGTERM and would then end the process; callable on any thread."""
        if not self._installed or not _chain:
            return False
        first, newest = _chain[0], _chain[-1]
        mine = signal.getsignal(signal.SIGTERM) == newest._on_term  # noqa: SLF001 - one of us
        return mine and not callable(first._previous)  # noqa: SLF001 - as above

    def terminate(self) -> None:
        """Do what SIGTERM does by default, from another thread, when the main thread no longer runs handlers."""
        if os.getpid() == 1:
            os._exit(EXIT_SIGTERM)
        # Python sets signals on the main thread only.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def remaining_s(self) -> float:
        return 0.0 if self.until_s is None else max(0.0, self.until_s - time.monotonic())

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        if self.until_s is not None or not self._installed or os.getpid() != self._pid:
            self.chain(signum, frame)
            return
        grace_s = self._grace_s()
        self.until_s = time.monotonic() + grace_s
        self._timer = threading.Timer(grace_s, self._on_grace_expired)
        self._timer.daemon = True
        self._timer.start()
        self._notice()

    def _on_grace_expired(self) -> None:
        # Interrupts even a blocking call of the main thread, whose handler then receives a second signal.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def chain(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        previous = self._previous
        self.remove()
        if callable(previous):
            previous(signum, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            if os.getpid() == 1:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(EXIT_SIGTERM)


_chain: list[TermHandler] = []
"""Handlers installed in this process, oldest first."""


def _or_default(handler: Any) -> Any:
    """Return a handler that `signal.signal` accepts; None means a handler not installed by Python."""
    return signal.SIG_DFL if handler is None else handler


def _after_fork_in_child() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    while (ours := next((one for one in _chain if one._on_term == handler), None)) is not None:  # noqa: SLF001 - same module
        handler = ours._previous  # noqa: SLF001 - as above
        signal.signal(signal.SIGTERM, _or_default(handler))
    _chain.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
