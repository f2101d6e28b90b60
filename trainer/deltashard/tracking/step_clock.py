"""The steps of one run: how many there were, the control line that shows them, and whether a boundary has work to do.

`begin_step` and `end_step` are all that an ordinary `step()` runs: two words of shared memory are written, two are compared. The
line is the sidecar's (it says there when a save is due, or urgent); a detached clock ticks on a list of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from deltashard_proto.arena_layout import (
    BLOCKED_SINCE_NS,
    BLOCKED_WHY,
    NEVER,
    SAVE_AT_STEP,
    STALL_NS,
    STEP,
    URGENT,
)

from deltashard.tracking.tracking import Tracking

_time_ns = time.time_ns


class StepClock:  # noqa: PLR0904
    """Counts steps; on the training thread, but for `wake`."""

    __slots__ = (
        "_ahead",
        "_attention",
        "_blind",
        "_blocked",
        "_check_at_ns",
        "_line",
        "_steps",
        "_wake",
        "end_step",
        "moved",
        "step",
        "whole",
    )

    def __init__(self, tracking: Tracking) -> None:
        self.step = 0
        """Number of `step()` calls of this run, those before the restore included."""
        self.whole = True
        """Whether an optimizer stepped between the last two `step()` calls; true where none can be asked."""
        self.moved = False
        """Whether a training forward ran since the last `begin_step`, or since the attempt began."""
        self.end_step: Callable[[], None] = tracking.steps.end_step
        """Ends a step, after its boundary: what optimizers do from now on belongs to the next."""
        self._steps = tracking.steps
        self._blind = not tracking.hooked
        self._line: Any = [0] * 8
        self._ahead = 0
        self._check_at_ns = 0
        self._blocked = 0, 0
        self._attention = True
        self._wake = threading.Event()

    def begin_step(self) -> bool:
        """Begin the end of a step; returns whether its boundary has work to do."""
        step = self.step = self.step + 1
        self.moved = False
        line = self._line
        line[0] = step
        line[1] = now_ns = _time_ns()
        self.whole = self._steps.stepped or self._blind or self._steps.captured
        return step + self._ahead >= line[3] or self._attention or now_ns >= self._check_at_ns

    @property
    def stepped(self) -> bool:
        """Whether an optimizer stepped since the last `end_step`; true where none can be asked."""
        return self._steps.stepped or self._blind

    @property
    def due(self) -> bool:
        return bool(self.step >= self._line[SAVE_AT_STEP])

    @property
    def wanted_at(self) -> int:
        """The step at whose end the sidecar wants a save; from any thread, NEVER while the line changes."""
        try:
            return int(self._line[SAVE_AT_STEP])
        except ValueError:  # the arena was unmapped just now
            return NEVER

    def set_lookahead(self, steps: int) -> None:
        """Have boundaries work to do so many steps before a save is due, too."""
        self._ahead = steps

    @property
    def near(self) -> bool:
        return bool(self.step + self._ahead >= self._line[SAVE_AT_STEP])

    @property
    def urgent(self) -> bool:
        return bool(self._line[URGENT])

    def mark_moved(self) -> None:
        """A training forward begins. Runs inside of compiled models, so it reads nothing that changes."""
        self.moved = True

    def request_boundary(self) -> None:
        """Have the next `begin_step` find work; from a signal handler, too, so that it takes no lock."""
        self._attention = True

    def wake(self) -> None:
        """Have the next `begin_step` find work, and wake who waits; from any thread."""
        self._attention = True
        self._wake.set()

    def ack(self) -> None:
        self._attention = False

    def clear_wake(self) -> None:
        """Begin to wait: news from here on end the next `pause`."""
        self._wake.clear()

    def pause(self, seconds: float) -> None:
        self._wake.wait(seconds)

    def set(self, step: int) -> None:
        """Continue after `step`: an attempt begins, and what ran before moved nothing that counts."""
        self.step, self.moved = step, False
        self.show()

    def record_stall(self, seconds: float) -> None:
        self._line[STALL_NS] = int(seconds * 1e9)

    def check_after(self, seconds: float) -> None:
        """Have the next `begin_step` find work that comes so much later."""
        self._check_at_ns = _time_ns() + int(seconds * 1e9)

    def show_blocked(self, seconds: float, why: int) -> None:
        """Show for how long a save that is due is blocked, and why (`block_reason.encode_block_reason`); 0: none is."""
        self._blocked = _time_ns() - int(seconds * 1e9) if why else 0, why
        self._line[BLOCKED_SINCE_NS], self._line[BLOCKED_WHY] = self._blocked

    def adopt(self, line: memoryview) -> None:
        line[BLOCKED_SINCE_NS], line[BLOCKED_WHY] = self._blocked
        self._line = line

    def show(self) -> None:
        """Say on the line where this run stands, before its next step does."""
        self._line[STEP] = self.step

    def uses_line(self, line: memoryview) -> bool:
        """Whether this is the line of the attachment whose news is applied."""
        return self._line is line

    def detach(self) -> None:
        """Leave the line, which is given back; every step from now on has a boundary, which refuses it."""
        self._line = [0] * 8

    def reset_after_fork(self) -> None:
        """In a forked child, where the arena is not mapped: a stray step must not touch it, and has no boundary."""
        line = [0] * 8
        line[SAVE_AT_STEP] = 1 << 64
        self._line = line
