"""Due times of saves. `Schedule` is pure: it maps a clock reading and the trainer's step to a step number.

The result is written to the trainer's control line as SAVE_AT_STEP. A due time becomes the current step ("at your next
step"); a due step is written in advance. A save that is due while one is staging or uploading is skipped and counted,
and the next one is due a whole interval later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltashard_proto.arena_layout import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """State of a timer. `anchor_*` is the start of the interval: the begin of the last save or of the attempt."""

    every_s: float
    every_steps: int
    anchor_s: float
    anchor_step: int = 0
    busy: bool = False
    running: bool = False
    """Whether an attempt is open: there is nothing to save before restore()."""
    skipped: int = 0

    def opened(self, *, now_s: float, step: int) -> Schedule:
        return replace(self, anchor_s=now_s, anchor_step=step, running=True, busy=False)

    def began(self, *, now_s: float, step: int) -> Schedule:
        return replace(self, anchor_s=now_s, anchor_step=step, busy=True)

    def advance(self, *, now_s: float, step: int) -> tuple[Schedule, int]:
        if not self.running:
            return self, NEVER
        if self.busy:
            # Each interval that passes during a save is one skipped save.
            times = int((now_s - self.anchor_s) // self.every_s) if self.every_s > 0 else 0
            steps = (step - self.anchor_step) // self.every_steps if self.every_steps > 0 else 0
            times, steps = max(0, times), max(0, steps)
            after = replace(
                self,
                anchor_s=self.anchor_s + times * self.every_s,
                anchor_step=self.anchor_step + steps * self.every_steps,
                skipped=self.skipped + times + steps,
            )
            return after, NEVER
        at = self.anchor_step + self.every_steps if self.every_steps > 0 else NEVER
        if self.every_s > 0 and now_s - self.anchor_s >= self.every_s:
            at = min(at, step)
        return self, at
