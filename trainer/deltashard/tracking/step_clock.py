"""Counts the steps of a run, shows them on the control line, and decides whether a boundary has work to do.

An ordinary `step()` runs only `begin_step` and `end_step`, which write two words of shared memory and compare two. The
sidecar owns the line and writes there when a save is due or urgent; a detached clock uses a private list.
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
    """Counts steps; used on the training thread, except `wake`."""

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
        """Number of `step()` calls of this run, including those before the restore."""
        self.whole = True
        """Whether an optimizer stepped between the last two `step()` calls; True without hookable optimizers."""
        self.moved = False
        """Whether a training forward pass ran since the last `begin_step` or the start of the attempt."""
        self.end_step: Callable[[], None] = tracking.steps.end_step
        """Ends a step after its boundary: later optimizer steps belong to the next step."""
        self._steps = tracking.steps
        self._blind = not tracking.hooked
        self._line: Any = [0] * 8
        self._ahead = 0
        self._check_at_ns = 0
        self._blocked = 0, 0
        self._attention = True
        self._wake = threading.Event()

    def begin_step(self) -> bool:
        """Begin the end of a step; return whether its boundary has work to do."""
        step = self.step = self.step + 1
        self.moved = False
        line = self._line
        line[0] = step
        line[1] = now_ns = _time_ns()
        self.whole = self._steps.stepped or self._blind or self._steps.captured
        return step + self._ahead >= line[3] or self._attention or now_ns >= self._check_at_ns

    @property
    def stepped(self) -> bool:
        """Whether an optimizer stepped since the last `end_step`; True without hookable optimizers."""
        return self._steps.stepped or self._blind

    @property
    def due(self) -> bool:
        return bool(self.step >= self._line[SAVE_AT_STEP])

    @property
    def wanted_at(self) -> int:
        """Step at whose end the sidecar wants a save; callable on any thread, NEVER while the line changes."""
        try:
            return int(self._line[SAVE_AT_STEP])
        except ValueError:  # the arena has just been unmapped
            return NEVER

    def set_lookahead(self, steps: int) -> None:
        """Also request boundaries this many steps before a save is due."""
        self._ahead = steps

    @property
    def near(self) -> bool:
        return bool(self.step + self._ahead >= self._line[SAVE_AT_STEP])

    @property
    def urgent(self) -> bool:
        return bool(self._line[URGENT])

    def mark_moved(self) -> None:
        """Record a training forward pass. Runs inside compiled models, so it reads nothing that changes."""
        self.moved = True

    def request_boundary(self) -> None:
        """Request a boundary at the next `begin_step`; lock-free, for signal handlers."""
        self._attention = True

    def wake(self) -> None:
        """Request a boundary at the next `begin_step` and end a `pause`; callable on any thread."""
        self._attention = True
        self._wake.set()

    def ack(self) -> None:
        self._attention = False

    def clear_wake(self) -> None:
        """Start a wait: events from here on end the next `pause`."""
        self._wake.clear()

    def pause(self, seconds: float) -> None:
        self._wake.wait(seconds)

    def set(self, step: int) -> None:
        """Continue after `step` at the start of an attempt, and forget earlier forward passes."""
        self.step, self.moved = step, False
        self.show()

    def record_stall(self, seconds: float) -> None:
        self._line[STALL_NS] = int(seconds * 1e9)

    def check_after(self, seconds: float) -> None:
        """Request a boundary at the first `begin_step` after `seconds`."""
        self._check_at_ns = _time_ns() + int(seconds * 1e9)

    def show_blocked(self, seconds: float, why: int) -> None:
        """Show on the line how long a due save is blocked, and why (`encode_block_reason`; 0: not blocked)."""
        self._blocked = _time_ns() - int(seconds * 1e9) if why else 0, why
        self._line[BLOCKED_SINCE_NS], self._line[BLOCKED_WHY] = self._blocked

    def adopt(self, line: memoryview) -> None:
        line[BLOCKED_SINCE_NS], line[BLOCKED_WHY] = self._blocked
        self._line = line

    def show(self) -> None:
        """Show the current step on the line before the next step does."""
        self._line[STEP] = self.step

    def uses_line(self, line: memoryview) -> bool:
        """Whether `line` belongs to the attachment whose events are applied."""
        return self._line is line

    def detach(self) -> None:
        """Stop using the line, which is returned; every later step has a boundary, which rejects it."""
        self._line = [0] * 8

    def reset_after_fork(self) -> None:
        """Detach in a forked child, where the arena is not mapped; steps there have no boundary."""
        line = [0] * 8
        line[SAVE_AT_STEP] = 1 << 64
        self._line = line
