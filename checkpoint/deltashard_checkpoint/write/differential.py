"""What the next cut holds: everything, what changed since the baseline, or what changed since the last commit. Pure.

- `full`: every cut is a baseline.
- `one-shot`: one baseline, then every cut holds what changed since it. Restore reads two checkpoints; cuts grow.
- `consecutive`: every cut holds what changed since the last commit. Smallest cuts; restore reads all of them.
- `intermittent` (default): one-shot, with a predictor that says when a new baseline pays (Check-N-Run, NSDI'22):
  with S_i the bytes of the i-th increment over the baseline's,

      Fc = 1 + S_1 + ... + S_i     the next i + 1 cuts, if a baseline is taken now and history repeats
      Ic = (i + 1) * S_i           at least the next i + 1 cuts, if not
      baseline when Fc <= Ic, and i = 0 after it

  The "1 +" is the baseline itself, and history is cleared by a baseline: without either, every increment
  would be followed by a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltashard_checkpoint.log.chain import lineage
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import differential_named

Decision = Literal["full", "since_baseline", "since_commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the lineage of the running attempt has committed since its last baseline."""

    baseline: int | None = None
    """Seq of the newest baseline of the lineage; None: none, or not live any more."""
    newest: int | None = None
    """Seq of the newest checkpoint of the lineage."""
    increments: tuple[float, ...] = ()
    """S_1 .. S_i: stored bytes of each checkpoint since then over the baseline's."""


def decide(name: str, history: History, *, force_full: bool = False) -> Decision:
    """What the next cut must hold at least under the differential of that name; raises `UnknownWord`.

    `force_full`: tracking cannot vouch for its marks, or the caller knows the covered checkpoint to be gone.
    """
    differential = differential_named(name)
    if force_full or differential == "full" or history.baseline is None:
        return "full"
    if differential == "consecutive":
        return "since_commit"
    if differential == "intermittent" and baseline_pays(history.increments):
        return "full"
    return "since_baseline"


def baseline_pays(increments: tuple[float, ...]) -> bool:
    """The predictor: whether a baseline now is predicted to cost no more than going on."""
    if not increments:
        return False
    full_cost = 1.0 + sum(increments)
    incremental_cost = (len(increments) + 1) * increments[-1]
    return full_cost <= incremental_cost


def history(state: RunState, attempt: int) -> History:
    """The history of the lineage of `attempt`, newest commits included, as the log tells it."""
    newest: int | None = None
    sizes: list[int] = []
    for seq in lineage(state, attempt):
        entry = state.checkpoints[seq]
        newest = seq if newest is None else newest
        if entry.baseline:
            base = max(1, entry.stored_bytes)
            return History(
                baseline=seq, newest=newest, increments=tuple(size / base for size in reversed(sizes))
            )
        sizes.append(entry.stored_bytes)
    return History(newest=newest)
