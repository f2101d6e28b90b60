"""Which checkpoints are kept: a pure function of the state, whose answer becomes a `retire` entry.

Kept are the last `keep_last`, the first of every `every_steps` steps and of every `every_s` seconds, the newest that
bears each pinned name, and always: the newest; what its parts were written against (or the next cut could not cover
it); what the newest attempt resumed from until that attempt has committed; and a second chain that shares nothing
with the newest one's, once there is one (a single rotten baseline must not take every checkpoint with it). All of
that closed over the chains. Everything else is named in one entry, with the prefixes its objects lie under; gc
deletes them later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.chain import closure, prefixes_of, written_closure
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import Entry, Retired, cut_of
from deltashard_checkpoint.log.replay import over
from deltashard_checkpoint.log.run_state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep beyond what must be kept."""

    keep_last: int = 3
    """The newest so many checkpoints, at least 1."""
    every_steps: int | None = None
    """The first checkpoint of each so many steps."""
    every_s: float | None = None
    """The first checkpoint of each so many seconds of the writers' clocks (3600: hourly)."""
    keep_pins: bool = True
    """The newest checkpoint of each pinned name."""

    def __post_init__(self) -> None:
        steps, seconds = self.every_steps, self.every_s
        if self.keep_last < 1 or (steps is not None and steps < 1) or (seconds is not None and seconds <= 0):
            raise UserError(
                "retention numbers must be positive", remedy="keep_last >= 1, every_steps >= 1, every_s > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """What a retire entry would say."""

    checkpoints: tuple[int, ...]
    prefixes: tuple[str, ...]


def kept(state: RunState, retention: Retention) -> frozenset[int]:
    """Seqs of the checkpoints to keep, closed over their chains. Pure."""
    seqs = sorted(state.checkpoints)
    if not seqs:
        return frozenset()
    newest = state.checkpoints[seqs[-1]]
    keep = set(seqs[-retention.keep_last :])
    keep |= state.checkpoints.keys() & set(newest.covered)
    steps: set[int] = set()
    times: set[int] = set()
    pins: dict[str, int] = {}
    for seq in seqs:
        entry = state.checkpoints[seq]
        if retention.every_steps is not None and entry.step // retention.every_steps not in steps:
            steps.add(entry.step // retention.every_steps)
            keep.add(seq)
        if retention.every_s is not None and int(entry.at_s // retention.every_s) not in times:
            times.add(int(entry.at_s // retention.every_s))
            keep.add(seq)
        pins |= dict.fromkeys(entry.pins, seq)
    if retention.keep_pins:
        keep |= set(pins.values())
    # IMPORTANT: a trainer may still be loading what its attempt resumed from; until it has committed for itself, that
    # checkpoint is the only one it can come back to, read by whatever plan it made when it opened.
    if (loading := state.loading()) is not None:
        keep |= written_closure(state, (loading,))
    chain = closure(state, (newest.seq,))
    second = (seq for seq in reversed(seqs) if not closure(state, (seq,)) & chain)
    keep |= {seq for seq in (next(second, None),) if seq is not None}
    return closure(state, keep)


def retire(state: RunState, retention: Retention, debris: Iterable[str] = ()) -> Retirement | None:
    """What may go now; None when nothing may. Pure.

    `debris` are prefixes that lie in the store; those of cuts which can never be committed any more, and of compactions
    that no checkpoint reads, go too. The caller passes a compaction's only when it is old enough to be given up.
    """
    keep = kept(state, retention)
    gone = tuple(sorted(state.checkpoints.keys() - keep))
    live = {prefix for seq in keep for prefix in prefixes_of(state, seq)}
    loading = state.loading()
    reading = frozenset[int]() if loading is None else written_closure(state, (loading,))
    prefixes = set(state.superseded)
    for seq in gone:
        prefixes |= state.checkpoints[seq].prefixes
        if seq in state.compactions:
            prefixes |= {part.prefix for part in state.compactions[seq].parts}
    for prefix in debris:
        place = cut_of(prefix)
        if place is None or over(state, *place):
            prefixes.add(prefix)
    prefixes -= live
    prefixes -= {prefix for prefix, seq in state.superseded.items() if seq in reading}
    prefixes -= state.retired.keys()
    if not gone and not prefixes:
        return None
    return Retirement(checkpoints=gone, prefixes=tuple(sorted(prefixes)))


def append_retirement(
    log: RunLog, retention: Retention, *, debris: Iterable[str] = (), deadline_s: float = DEFAULT_DEADLINE_S
) -> Retired | None:
    """Append the retire entry that the state at its slot asks for; None when there is nothing to retire.

    Raises what `RunLog.append` raises.
    """
    listed = tuple(debris)

    # IMPORTANT: the plan is made from the state at the very slot it takes. Made any earlier, a commit that got in
    # between could cover what the plan retires.
    log.refresh(deadline_s=deadline_s)

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        plan = retire(state, retention, listed)
        if plan is None:
            return None
        return Retired(
            seq=seq,
            previous="",
            writer=writer,
            at_s=0.0,
            checkpoints=plan.checkpoints,
            prefixes=plan.prefixes,
        )

    sealed = log.append(build, before="retire.before_put", after="retire.after_put", deadline_s=deadline_s)
    if sealed is None:
        return None
    assert isinstance(sealed.entry, Retired)
    return sealed.entry
