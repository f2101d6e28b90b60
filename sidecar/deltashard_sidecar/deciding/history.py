"""What a run's log tells of its failures: the only evidence that there is. Pure.

Where a decider was at work, its own count rides in the commits (`record`): the next one goes on from it, and adds what
it sees. Of a run, or a time, without one the log knows less, and this is what is made of it:

- An attempt that committed and was followed by another is one restore. Those that committed nothing count with the one
  before them: a crash loop is one incident.
- Steps were lost with it unless its last commit is known to have been asked for by its end (a close, an eviction). Only
  live checkpoints tell; a retired one counts as lost, for it was rather one of the timer's.
- Who is followed by a person's rewind (an attempt of no ranks) is a restore, and lost nothing: it is no failure.
- No time stands there. Exposure is the steps that were committed, times what a step takes now; an attempt begins at the
  step of the checkpoint that it resumed, or, where nothing tells that any more, where that one's attempt last
  committed. Nothing of that has faded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile

from deltashard_checkpoint.deciding.ending import ends
from deltashard_checkpoint.deciding.evidence import Evidence
from deltashard_checkpoint.log.run_state import Attempt, RunState


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


def follows_rewind(state: RunState, attempt: int) -> bool:
    """Whether it is a person's rewind that attempt `attempt` comes right after: what was before it did not fail."""
    before = max((n for n in state.attempts if n < attempt), default=None)
    return before is not None and state.attempts[before].world_size == 0


def without_checkpoint(state: RunState, *, before: int) -> int:
    """Attempts in a row, up to attempt `before`, that ended without a checkpoint; a rewind is no attempt."""
    real = sorted((n for n, each in state.attempts.items() if n < before and each.world_size), reverse=True)
    return sum(1 for _ in takewhile(lambda n: state.attempts[n].last_seq is None, real))


def past(state: RunState, *, open_attempt: int | None) -> Past:
    """Of all that was committed; `open_attempt` ended in no incident that is counted here, or did not end."""
    steps = lossy = restores = 0
    rewound = {
        n for n, following in pairwise(sorted(state.attempts)) if not state.attempts[following].world_size
    }
    for number, attempt in state.attempts.items():
        if attempt.last_seq is None or attempt.last_step is None:
            continue
        steps += max(0, attempt.last_step - _began_at(state, attempt))
        if number == open_attempt:
            continue
        restores += 1
        last = state.checkpoints.get(attempt.last_seq)
        lossy += int(number not in rewound and (last is None or not ends(last)))
    return Past(steps=steps, lossy=lossy, restores=restores)


def _began_at(state: RunState, attempt: Attempt) -> int:
    """The step after which an attempt began, as far as it is known."""
    if (
        live := state.checkpoints.get(-1 if attempt.resumes_from is None else attempt.resumes_from)
    ) is not None:
        return live.step
    # One that committed nothing, as a rewind, still says at which step the checkpoint was that it resumed.
    same = (each for each in state.attempts.values() if each.resumes_from == attempt.resumes_from is not None)
    known = [each.last_step for each in same if each.last_seq is None and each.last_step is not None]
    source = None if attempt.resumes_attempt is None else state.attempts.get(attempt.resumes_attempt)
    return known[0] if known else (source and source.last_step) or 0
