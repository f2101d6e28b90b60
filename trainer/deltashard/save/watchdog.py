"""Warns when a due save does not happen, whatever the reason.

    due      an interval of the sidecar's policy (seconds or steps) has passed since the newest commit was taken, or a
             requested save is not taken yet
    blocked  a save is due, and none became durable for three intervals and at least a minute

A blocked save is logged with the reason, the age of the newest checkpoint and the remedy, and again after each doubling
of the time until a commit. `doctor()` reports the same, the event is `save_blocked`, and the control line forwards it
to
the sidecar for its metric and the CheckpointRun. The check runs within `step()`: nothing is due while a program
evaluates
or hangs. In a group rank 0 watches the timer, and each rank its own requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from deltashard_proto.block_reason import BlockReason, encode_block_reason

from deltashard.attach.attachment import Listener
from deltashard.save.snapshot_gate import REMEDY
from deltashard.tracking.step_clock import StepClock

log = logging.getLogger("deltashard")

INTERVALS = 3
MIN_BLOCKED_S = 60.0
CHECK_INTERVAL_S = 5.0
"""Longest interval in seconds between two checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedBy:
    """Reason why a save cannot be taken now."""

    reason: BlockReason
    message: str
    remedy: str = ""
    """Overrides the remedy of the reason if not empty."""
    rank: int | None = None
    """The rank that blocks, in a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedSave:
    """A due save that has not been taken yet."""

    for_s: float
    age_s: float | None
    """Age of the newest checkpoint; None without one in this attempt or restored by it."""
    block: BlockedBy

    def __str__(self) -> str:
        age = "there is no checkpoint yet" if self.age_s is None else f"the newest is {self.age_s:.0f} s old"
        remedy = self.block.remedy or REMEDY[self.block.reason]
        return f"no save for {self.for_s:.0f} s since it was due ({age}): {self.block.message} -- {remedy}"


class Watchdog:
    """Watches the saves of a Checkpointer; used on the training thread only. `now_s` is a monotonic clock."""

    def __init__(
        self,
        clock: StepClock,
        listener: Listener,
        *,
        timer: Callable[[], tuple[float, int]],
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """`timer` returns the policy's interval as (seconds, steps), 0 if unset."""
        self._clock = clock
        self._listener = listener
        self._timer = timer
        self._now_s = now_s or time.monotonic
        self._anchor = self._now_s(), 0
        """Time and step of the newest commit's snapshot, or of the start of the attempt."""
        self._commit_s: float | None = None
        self._taken: dict[int, float] = {}
        """Times of snapshots that are not known to be durable, by step."""
        self._due_s: float | None = None
        """Time since which a save is due; None if none is due."""
        self._limit_s = 0.0
        self._block: BlockedBy | None = None
        """Blocking reason at the last check."""

    def begin(self, *, restored: bool) -> None:
        """Start watching an attempt; `restored`: it began from a checkpoint."""
        now_s = self._now_s()
        self._anchor, self._taken = (now_s, self._clock.step), {}
        self._commit_s = now_s if restored else None
        self._end()

    def taken(self) -> None:
        self._taken[self._clock.step] = self._now_s()

    def committed(self, step: int) -> None:
        taken_s = self._taken.get(step, self._now_s())
        self._taken = {each: at_s for each, at_s in self._taken.items() if each > step}
        self._anchor, self._commit_s = (taken_s, step), taken_s
        self._end()

    def _end(self) -> None:
        self._due_s = self._block = None
        self._limit_s = 0.0
        self._clock.show_blocked(0.0, 0)

    def check(self, block: Callable[[], BlockedBy], *, asked: bool, timed: bool = True) -> None:
        """Check at the end of a boundary. `block` returns what blocks a save; `asked`: a request is pending."""
        self._clock.check_after(CHECK_INTERVAL_S)
        now_s = self._now_s()
        every_s, every_steps = self._timer() if timed else (0.0, 0)
        anchor_s, anchor_step = self._anchor
        due = asked or (every_s > 0 and now_s - anchor_s >= every_s)
        by_steps = every_steps > 0 and self._clock.step - anchor_step >= every_steps
        if not (due or by_steps):
            self._end()
            return
        self._block = block()
        if self._due_s is None:
            self._due_s = now_s
            interval_s = every_s or (now_s - anchor_s if by_steps else 0.0)
            self._limit_s = max(MIN_BLOCKED_S, INTERVALS * interval_s)
            return
        newest_s = max(self._taken.values(), default=0.0)
        recent = self._block.reason is BlockReason.IN_FLIGHT and now_s - newest_s < MIN_BLOCKED_S
        if now_s - self._due_s < self._limit_s or recent:
            return
        self._limit_s = max(2 * self._limit_s, 2 * (now_s - self._due_s))
        self._warn()

    @property
    def blocked(self) -> BlockedSave | None:
        if self._due_s is None or self._block is None:
            return None
        now_s = self._now_s()
        return BlockedSave(
            for_s=now_s - self._due_s,
            age_s=None if self._commit_s is None else now_s - self._commit_s,
            block=self._block,
        )

    def _warn(self) -> None:
        blocked = self.blocked
        assert blocked is not None
        block = blocked.block
        log.warning("%s", blocked)
        self._clock.show_blocked(blocked.for_s, encode_block_reason(block.reason, block.rank))
        self._listener.emit(
            "save_blocked",
            step=self._clock.step,
            reason=str(block.reason),
            for_s=blocked.for_s,
            age_s=blocked.age_s,
            rank=block.rank,
            message=str(blocked),
        )
