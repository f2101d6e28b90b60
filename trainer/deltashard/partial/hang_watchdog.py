"""Handles SIGTERM while the training thread is inside a collective that never returns.

Python runs signal handlers on the main thread between two instructions, so not before the collective returns. The C
part of the handler, however, writes the signal number to `signal.set_wakeup_fd` immediately, and a thread reads it.

That thread does nothing while the main thread executes Python, since the handler (`term_signal`) then runs with its
full grace period. The thread checks this with a pending call, which the interpreter runs on the main thread as soon as
possible. The main thread counts as lost if the call does not run for a while and a rank of this machine is dead (or the
handler's grace period is over). The survivor's state is then staged, if partial recovery is enabled, and the default
action of SIGTERM follows. Nothing can be saved at that point, because every snapshot needs all ranks. If the main
thread continues meanwhile, the staged part is dropped.
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
"""With a dead rank, the main thread is in a dead collective after so many seconds without an instruction."""
POLL_S = 0.05
_Call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class MainThreadHeartbeat:
    """Detects whether the main thread executes Python."""

    def __init__(self) -> None:
        self.beats = 0
        self._pending = False
        self._call = _Call(self._beat)  # kept: the interpreter holds no reference

    def ping(self) -> int:
        """Schedule a call on the main thread, unless one is pending; returns `beats`."""
        if not self._pending:
            self._pending = True
            if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
                self._pending = False  # the queue is full, so the main thread does not execute Python
        return self.beats

    def _beat(self, _argument: object) -> int:
        self.beats += 1
        self._pending = False
        return 0


class HangWatchdog:
    """Watchdog thread of one Checkpointer; must be created on the main thread."""

    def __init__(
        self,
        term: TermHandler,
        *,
        dead: Callable[[], bool],
        stage: Callable[[Callable[[], bool]], bool],
    ) -> None:
        """`dead()`: whether a local rank died; `stage(is_current)`: stage while that holds, return whether done."""
        self._term = term
        self._dead = dead
        self._stage = stage
        self._stop = threading.Event()
        self._heartbeat = MainThreadHeartbeat()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._read_fd, True)
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self.has_wakeup_fd = before == -1
        """False: another part of the program uses `signal.set_wakeup_fd` and keeps it."""
        if not self.has_wakeup_fd:
            signal.set_wakeup_fd(before)
            self._close_fds()
            log.info(
                "another part of this program uses signal.set_wakeup_fd: a dead collective is not interrupted"
            )
            return
        _live.add(self)
        threading.Thread(target=self._run, name="deltashard-watchdog", daemon=True).start()

    def close(self) -> None:
        """Reset the wakeup descriptor; has no effect on other threads than the main thread."""
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
                    log.exception("the watchdog failed after SIGTERM: please report this bug")
        self._close_fds()

    def _close_fds(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _on_sigterm(self) -> None:
        """Wait until the SIGTERM handler has ended the process, or until the main thread counts as lost."""
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
