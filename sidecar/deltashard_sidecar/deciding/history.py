"""What a run's log tells of its failures, for a sidecar that no controller tells more. Pure.

Where a decider was at work, its own count rides in the commits (`record`): the next one goes on from it, and adds what
it sees. Of a run, or a time, without one the log knows less, and this is what is made of it:

- An attempt that committed and was followed by another is one restore. Those that committed nothing count with the one
  before them: a crash loop is one incident.
- Steps were lost with it unless its last commit is known to have been asked for by its end (a close, an eviction). Only
  live checkpoints tell; a retired one counts as lost, for it was rather one of the timer's.
- No time stands there. Exposure is the steps that were committed, times what a step takes now; an attempt begins where
  the one that it resumed from last committed. Nothing of that has faded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from deltashard_checkpoint.deciding.ending import ends
from deltashard_checkpoint.deciding.evidence import Evidence
from deltashard_checkpoint.log.run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Of a run."""

    steps: int = 0
    lossy: int = 0
    restores: int = 0

    def evidence(self, step_s: float) -> Evidence:
        """With the time that a step takes; 0: not known, and then the failures have no exposure to count against."""
        if step_s <= 0:
            return Evidence()
        return Evidence(exposure_s=self.steps * step_s, lossy=self.lossy, restores=self.restores)


def fruitless(state: RunState, *, before: int) -> int:
    """Attempts in a row that committed nothing, the last ones before attempt `before`; a rewind is none."""
    real = (n for n, attempt in state.attempts.items() if n < before and attempt.world_size)
    numbers = sorted(real, reverse=True)
    return sum(1 for _ in takewhile(lambda n: state.attempts[n].last_seq is None, numbers))


def past(state: RunState, *, open_attempt: int | None) -> Past:
    """Of all that was committed; `open_attempt` ended in no incident that is counted here, or did not end."""
    steps = lossy = restores = 0
    for number, attempt in state.attempts.items():
        if attempt.last_seq is None or attempt.last_step is None:
            continue
        source = None if attempt.resumes_attempt is None else state.attempts.get(attempt.resumes_attempt)
        steps += max(0, attempt.last_step - ((source and source.last_step) or 0))
        if number == open_attempt:
            continue
        restores += 1
        last = state.checkpoints.get(attempt.last_seq)
        lossy += int(last is None or not ends(last))
    return Past(steps=steps, lossy=lossy, restores=restores)
