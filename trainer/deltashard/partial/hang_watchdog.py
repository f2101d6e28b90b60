"""SIGTERM while the training thread is inside of a collective that will never end.

Python runs a signal's handler on the main thread, between two instructions of its own: not before the collective
returns. But the C half of it writes the signal's number into `signal.set_wakeup_fd` at once, and a thread reads it.

That thread does nothing as long as the main thread executes Python: the handler runs then (`term_signal`), with all its
grace. Whether it does is asked with a call that the interpreter makes on the main thread as soon as it can. Only when
that is not made for a while, and a rank of this machine is dead (or the grace that the handler gave is over), is the
main thread taken to be lost: the survivor's state is staged, if that was agreed to, and what SIGTERM does by default is
done. Nothing can be saved any more then: every cut needs all ranks. If the main thread comes back meanwhile, what was
staged is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable

from deltashard.attach.term_signal import TermHandler

log = logging.getLogger("deltashard")

HANG_S = 1.0
"""Without an instruction on the main thread for so long, and with a dead rank, it is in a dead collective."""
POLL_S = 0.05
_Call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class MainThreadHeartbeat:
    """Whether the main thread executes Python."""

    def __init__(self) -> None:
        self.beats = 0
        """How often it has answered."""
        self._pending = False
        self._call = _Call(self._beat)  # kept: the interpreter holds no reference

    def ping(self) -> int:
        """Have the main thread answer, unless it was asked already; returns `beats`."""
        if not self._pending:
            self._pending = True
            if (
                ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0
            ):  # the queue is full: it is not answering
                self._pending = False
        return self.beats

    def _beat(self, _argument: object) -> int:
        self.beats += 1
        self._pending = False
        return 0


class HangWatchdog:
    """The thread of one Checkpointer; made on the main thread."""

    def __init__(
        self,
        term: TermHandler,
        *,
        dead: Callable[[], bool],
        stage: Callable[[Callable[[], bool]], bool],
    ) -> None:
        """`dead`: whether a rank of this machine died; `stage(is_current)`: stage what is to be, while `is_current()` holds."""
        self._term = term
        self._dead = dead
        self._stage = stage
        self._stop = threading.Event()
        self._heartbeat = MainThreadHeartbeat()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._read_fd, True)
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self.has_wakeup_fd = before == -1
        """False: another part of the program is woken by signals, and stays so."""
        if not self.has_wakeup_fd:
            signal.set_wakeup_fd(before)
            self._close_fds()
            log.info(
                "another part of this program has signal.set_wakeup_fd: a dead collective ends as it ends"
            )
            return
        _live.add(self)
        threading.Thread(target=self._run, name="deltashard-watchdog", daemon=True).start()

    def close(self) -> None:
        """Give the descriptor back; on the main thread, or it stays."""
        if not self.has_wakeup_fd or self._stop.is_set():
            return
        if threading.current_thread() is not threading.main_thread():
            return
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, self._write_fd):
            signal.set_wakeup_fd(now)
        self._stop.set()
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\0")

    def disarm(self) -> None:
        if self.has_wakeup_fd and not self._stop.is_set():
            self._stop.set()
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)

    def _run(self) -> None:
        while not self._stop.is_set():
            if signal.SIGTERM in os.read(self._read_fd, 4096):
                try:
                    self._on_sigterm()
                except Exception:
                    log.exception("after SIGTERM: please report this")
        self._close_fds()

    def _close_fds(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _on_sigterm(self) -> None:
        """SIGTERM came: wait until the handler has ended the process, or it is known that it never will."""
        alive_s = time.monotonic()
        beats = self._heartbeat.ping()
        while not self._stop.is_set() and self._term.is_active:
            now_s = time.monotonic()
            if (now := self._heartbeat.ping()) != beats:
                beats, alive_s = now, now_s
            silent_s = now_s - alive_s
            over = self._term.until_s is not None and self._term.remaining_s <= 0
            if silent_s > HANG_S and (over or self._dead()):

                def is_current(beats: int = beats) -> bool:
                    return self._heartbeat.beats == beats

                if self._stage(is_current) and is_current():
                    self._term.terminate()
                    return
                alive_s = time.monotonic()
            self._stop.wait(POLL_S)


_live: weakref.WeakSet[HangWatchdog] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for watchdog in list(_live):
        watchdog.disarm()


os.register_at_fork(after_in_child=_after_fork_in_child)
