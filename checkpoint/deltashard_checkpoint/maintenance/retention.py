"""Which checkpoints are kept: a pure function of the state, whose answer becomes a `retire` entry.

Kept are the last `keep_last` (of those that no rewind has set aside), the first of every `every_steps` steps and of
every `every_s` seconds, the newest that bears each pinned name, and always: the newest; what its parts were written
against (or the next cut could not cover it); what the newest attempt resumed from until that attempt has committed; and
a second chain that shares nothing with the newest one's, once there is one (a single rotten baseline must not take
every checkpoint with it). All of that closed over the chains. Everything else is named in one entry, with the prefixes
its objects lie under; gc deletes them later.

A person may also say which are to go (`retire_selected`): then everything else is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.chain import closure, prefixes_of
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import Entry, Retired, snapshot_of
from deltashard_checkpoint.log.replay import is_protected, is_uncommittable
from deltashard_checkpoint.log.run_state import RunState

KEEP_ALL = 1 << 62
"""As `keep_last`: nothing is retired for its age."""


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
    return closure(state, _keep_reasons(state, retention))


def keep_reasons(state: RunState, retention: Retention) -> dict[int, tuple[str, ...]]:
    asked = _keep_reasons(state, retention)
    why = {seq: list(said) for seq, said in asked.items()}
    based: set[int] = set()
    for seq in sorted(asked, reverse=True):
        for base in sorted(closure(state, (seq,)) - {seq} - based):
            based.add(base)
            why.setdefault(base, []).append(f"chain base of {seq}")
    return {seq: tuple(said) for seq, said in sorted(why.items())}


def _keep_reasons(state: RunState, retention: Retention) -> dict[int, list[str]]:  # noqa: C901
    """The rule: what is to be kept for its own sake, and why."""
    every = sorted(state.checkpoints)
    newest = state.newest()
    if newest is None:
        return {seq: ["set aside by a rewind, and nothing else is live"] for seq in every}
    why: dict[int, list[str]] = {}

    def keep(seq: int, reason: str) -> None:
        why.setdefault(seq, []).append(reason)

    keep(newest.seq, "the newest")
    # What a rewind has set aside counts for nothing here: where checkpoints are retired for their age, these go first.
    seqs = [seq for seq in every if seq not in state.detached]
    if retention.keep_last >= KEEP_ALL:
        for seq in every:
            keep(seq, "live, set aside by a rewind" if seq in state.detached else "live")
    else:
        for seq in seqs[-retention.keep_last :]:
            keep(seq, f"one of the newest {retention.keep_last}")
    for seq in newest.covered:
        if seq in state.checkpoints:
            keep(seq, f"the newest, {newest.seq}, was written against it")
    steps: set[int] = set()
    times: set[int] = set()
    for seq in seqs:
        entry = state.checkpoints[seq]
        if retention.every_steps is not None and entry.step // retention.every_steps not in steps:
            steps.add(entry.step // retention.every_steps)
            keep(seq, f"the first of {retention.every_steps} steps")
        if retention.every_s is not None and int(entry.at_s // retention.every_s) not in times:
            times.add(int(entry.at_s // retention.every_s))
            keep(seq, f"the first of {retention.every_s:g} s")
    if retention.keep_pins:
        for name, seq in state.pinned.items():
            keep(seq, f"pinned {name}")
    # IMPORTANT: a trainer may still be loading what its attempt resumed from; until it has committed for itself, that
    # checkpoint is the only one it can come back to, read by whatever plan it made when it opened.
    if (resuming_from := state.resuming_from()) is not None:
        for seq in closure(state, (resuming_from,), written=True):
            said = "" if seq == resuming_from else f", read with {resuming_from}"
            keep(seq, f"resume point of attempt {state.attempt}, which has not committed yet{said}")
    chain = closure(state, (newest.seq,))
    second = (seq for seq in reversed(seqs) if not closure(state, (seq,)) & chain)
    if (other := next(second, None)) is not None:
        keep(other, "second chain, which shares nothing with the newest one's")
    return why


def retire(state: RunState, retention: Retention, orphaned_prefixes: Iterable[str] = ()) -> Retirement | None:
    """What may go now; None when nothing may. Pure.

    `orphaned_prefixes` are prefixes that lie in the store; those of cuts which can never be committed any more, and of compactions
    that no checkpoint reads, go too. The caller passes a compaction's only when it is old enough to be given up.
    """
    return _retirement(state, kept(state, retention), orphaned_prefixes)


def _retirement(
    state: RunState, keep: AbstractSet[int], orphaned_prefixes: Iterable[str]
) -> Retirement | None:
    gone = tuple(sorted(state.checkpoints.keys() - keep))
    live = {prefix for seq in keep for prefix in prefixes_of(state, seq)}
    resuming_from = state.resuming_from()
    reading = frozenset[int]() if resuming_from is None else closure(state, (resuming_from,), written=True)
    prefixes = set(state.superseded)
    for seq in gone:
        prefixes |= state.checkpoints[seq].prefixes
        if seq in state.compactions:
            prefixes |= {part.prefix for part in state.compactions[seq].parts}
    for prefix in orphaned_prefixes:
        place = snapshot_of(prefix)
        if (place is None or is_uncommittable(state, *place)) and not is_protected(state, prefix):
            prefixes.add(prefix)
    prefixes -= live
    prefixes -= {prefix for prefix, seq in state.superseded.items() if seq in reading}
    prefixes -= state.retired.keys()
    if not gone and not prefixes:
        return None
    return Retirement(checkpoints=gone, prefixes=tuple(sorted(prefixes)))


def append_retirement(
    log: RunLog,
    retention: Retention,
    *,
    orphaned_prefixes: Iterable[str] = (),
    attempt: int | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> Retired | None:
    """Append the retire entry that the state at its slot asks for; None when there is nothing to retire.

    `attempt`: retire as its trainer, so nothing once another one is the newest. Raises what `RunLog.append` raises.
    """
    listed = tuple(orphaned_prefixes)

    def plan(state: RunState) -> Retirement | None:
        return retire(state, retention, listed) if attempt in (None, state.attempt) else None

    return _append(log, plan, deadline_s)


def retire_selected(log: RunLog, choose: Callable[[RunState], Iterable[int]]) -> Retired | None:
    """Retire exactly the checkpoints that `choose` names of the state at the entry's slot.

    Raises `RetireBlocked` for one that something else needs, and what `choose` and `RunLog.append` raise.
    """

    def plan(state: RunState) -> Retirement | None:
        gone = frozenset(choose(state))
        if blockers := retire_blockers(state, gone):
            raise RetireBlocked(blockers, where=f"run {state.run}")
        return _retirement(state, state.checkpoints.keys() - gone, ())

    return _append(log, plan, DEFAULT_DEADLINE_S)


class RetireBlocked(UserError):
    """A checkpoint that is to be retired is needed."""

    def __init__(self, blockers: Mapping[int, str], *, where: str) -> None:
        self.blockers = blockers
        super().__init__(
            "; ".join(f"checkpoint {seq} stays: {why}" for seq, why in sorted(blockers.items())),
            where=where,
            remedy="retire what builds on it, too; unpin it first; or wait until the run has a newer one",
        )


def retire_blockers(state: RunState, gone: AbstractSet[int]) -> dict[int, str]:
    """Why some of these may not be retired together; empty: all may. Pure."""
    found: dict[int, str] = {}
    for name, seq in state.pinned.items():
        if seq in gone:
            found.setdefault(seq, f"it is pinned {name}")
    if (resuming_from := state.resuming_from()) is not None:
        for seq in closure(state, (resuming_from,), written=True) & gone:
            found.setdefault(
                seq, f"attempt {state.attempt} resumes from {resuming_from}, and has not committed yet"
            )
    newest = state.newest()
    if newest is not None:
        for seq in gone & frozenset(newest.covered):
            found.setdefault(seq, f"the newest, {newest.seq}, was written against it")
        if newest.seq in gone:
            found[newest.seq] = "it is the newest"
    for stays in sorted(state.checkpoints.keys() - gone):
        for seq in closure(state, (stays,)) & gone:
            found.setdefault(seq, f"checkpoint {stays} builds on it")
    return found


def _append(log: RunLog, plan: Callable[[RunState], Retirement | None], deadline_s: float) -> Retired | None:
    # IMPORTANT: the plan is made from the state at the very slot it takes. Made any earlier, a commit that got in
    # between could cover what the plan retires.
    log.refresh(deadline_s=deadline_s)

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        planned = plan(state)
        if planned is None:
            return None
        return Retired(
            seq=seq,
            previous="",
            writer=writer,
            at_s=0.0,
            checkpoints=planned.checkpoints,
            prefixes=planned.prefixes,
        )

    sealed = log.append(
        build, before="retire.before_put", after="retire.after_put", deadline_s=deadline_s, frees=True
    )
    if sealed is None:
        return None
    assert isinstance(sealed.entry, Retired)
    return sealed.entry
