"""SIGTERM: save first, then do what would have been done.

The handler only notes the signal. At the next `step()` an urgent cut is taken and waited for; then the previous handler
runs (the default one ends the process). The grace budget bounds all of it: when no step comes, or the save is not
durable in time, the previous handler runs anyway. A second SIGTERM does not wait any longer.

The first process of a container is another matter: the kernel withholds from process 1 every signal that has the
default action, so it could not end itself that way and would train on until the pod's grace period kills it. It exits
with `EXIT_SIGTERM`, the code that a shell gives a process ended by SIGTERM. Not 0: a Job would count as complete.

Python runs handlers on the main thread only, so a Checkpointer built elsewhere leaves signals alone. Several of them
form a chain, which one leaves from wherever it stands. A forked child (a DataLoader worker) has nothing to save: it
gets back what was there before all of them.
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
"""Exit code of a container's first process after SIGTERM: 143."""


class TermHandler:
    """Installed for one Checkpointer; `notice` is called from the handler and must only set flags."""

    def __init__(self, *, grace_s: Callable[[], float], notice: Callable[[], None]) -> None:
        """`grace_s` is asked when the signal comes: a sidecar that was started again may have another."""
        self._grace_s = grace_s
        self._notice = notice
        self._previous: Any = None
        self._installed = False
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None
        self.until_s: float | None = None
        """Monotonic end of the grace budget; None before a SIGTERM."""

    def install(self) -> bool:
        """Take SIGTERM over, if this is the main thread and nobody ignores the signal."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return False
        self._previous = signal.signal(signal.SIGTERM, self._on_term)
        self._installed = True
        _chain.append(self)
        return True

    def remove(self) -> None:
        """Leave the chain: who came after us has our previous handler now.

        Where that cannot be (a handler that is not ours stands before us, or this is not the main thread), the signal
        still reaches us, and passes through.
        """
        if self._timer is not None:
            self._timer.cancel()
        if not self._installed:
            return
        self._installed = False
        _chain.remove(self)
        for later in _chain:
            # `==`: bound methods are made anew at each access.
            if later._previous == self._on_term:  # noqa: SLF001 - one of us
                later._previous = self._previous  # noqa: SLF001 - as above
        if (
            signal.getsignal(signal.SIGTERM) == self._on_term
            and threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGTERM, _or_default(self._previous))

    @property
    def is_active(self) -> bool:
        """Whether SIGTERM is ours to answer, and would end the process after that; from any thread."""
        if not self._installed or not _chain:
            return False
        first, newest = _chain[0], _chain[-1]
        mine = signal.getsignal(signal.SIGTERM) == newest._on_term  # noqa: SLF001 - one of us
        return mine and not callable(first._previous)  # noqa: SLF001 - as above

    def terminate(self) -> None:
        """Do what SIGTERM does by default, from another thread: the main one will execute no handler any more."""
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
        # Wakes the main thread even out of a blocking call; the handler then sees a second signal.
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
"""Those installed in this process, oldest first."""


def _or_default(handler: Any) -> Any:
    """What `signal.signal` takes: None stands for a handler that Python did not install."""
    return signal.SIG_DFL if handler is None else handler


def _after_fork_in_child() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    while (ours := next((one for one in _chain if one._on_term == handler), None)) is not None:  # noqa: SLF001 - same module
        handler = ours._previous  # noqa: SLF001 - as above
        signal.signal(signal.SIGTERM, _or_default(handler))
    _chain.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
