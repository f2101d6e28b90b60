"""When the next save is due. `Schedule` is pure: a clock reading and the trainer's step in, a step number out.

The answer is written to the trainer's control line as SAVE_AT_STEP, which `Checkpointer.step()` compares with its own
step: a due time becomes "at your next step" (the step it has reached), a due step is written ahead. Nothing is written
while a save is staging or uploading: a save that comes due meanwhile is skipped and counted, and the next one is a
whole interval later (a skipped save means the interval is shorter than a save takes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltashard_proto.arena_layout import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the timer knows. `anchor_*` is where the current interval began: the last save's begin, or the attempt's."""

    every_s: float
    every_steps: int
    anchor_s: float
    anchor_step: int = 0
    busy: bool = False
    running: bool = False
    """Whether an attempt is open: before restore() there is nothing to save."""
    skipped: int = 0

    def paced(self, *, every_s: float, every_steps: int) -> Schedule:
        """The policy changed: the current interval goes on from where it began."""
        return replace(self, every_s=every_s, every_steps=every_steps)

    def opened(self, *, now_s: float, step: int, phase: float = 0.0) -> Schedule:
        """A trainer opened its attempt at `step`: the first interval begins, by this share of it longer."""
        anchor_s = now_s + phase * self.every_s
        return replace(self, anchor_s=anchor_s, anchor_step=step, running=True, busy=False)

    def began(self, *, now_s: float, step: int) -> Schedule:
        """A save (of whatever reason) began: the interval starts anew."""
        return replace(self, anchor_s=now_s, anchor_step=step, busy=True)

    def ended(self) -> Schedule:
        return replace(self, busy=False)

    def advance(self, *, now_s: float, step: int) -> tuple[Schedule, int]:
        """(next state, SAVE_AT_STEP) at this instant, with the trainer at `step`."""
        if not self.running:
            return self, NEVER
        after = self
        if self.busy:
            # Each interval that passes under a running save is one skipped save.
            if self.every_s > 0 and now_s - after.anchor_s >= self.every_s:
                missed = int((now_s - after.anchor_s) // self.every_s)
                after = replace(
                    after, anchor_s=after.anchor_s + missed * self.every_s, skipped=after.skipped + missed
                )
            if self.every_steps > 0 and step - after.anchor_step >= self.every_steps:
                missed = (step - after.anchor_step) // self.every_steps
                after = replace(
                    after,
                    anchor_step=after.anchor_step + missed * self.every_steps,
                    skipped=after.skipped + missed,
                )
            return after, NEVER
        at = NEVER
        if self.every_steps > 0:
            at = self.anchor_step + self.every_steps
        if self.every_s > 0 and now_s - self.anchor_s >= self.every_s:
            at = min(at, step)
        return after, at
