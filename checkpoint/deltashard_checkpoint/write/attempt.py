"""Opening an attempt: from here on this trainer's checkpoints count, and every older trainer's do not.

An attempt is opened by winning the next slot of the log. The entry names the checkpoint that will be loaded, chosen
at that very slot: if an older trainer (a zombie) commits first, its entry has the slot, the opener sees that
checkpoint and resumes from it; if the opener wins, the zombie finds a higher attempt and is fenced. One total order,
no leases, no clocks.

A sidecar whose pod is being terminated with a save still uploading leaves a marker (`write.closing`); an opener waits
for it. A marker that was not removed (its process was killed) costs one bound at most.

A run with a name of the user's (`run-id`) may be handed from one workload to the next: each enters with its first
attempt. A workload that another one displaced does not come back by itself (`TakenOver`), nor does a pod that another
pod displaced: two that live at once end in one, and never in a loop in which each restart of the one fences the other.

A full or read-only store takes no entry, but it can be read: a trainer that is alone restores all the same
(`read_unopened`), trains on, and opens its attempt late, with the entry that it would have had (`ResumeBasis`). Until
then nothing of it counts. The entry is written only if the run stands where it was read: no attempt was opened since,
and the same checkpoint would be chosen. So of two that restored from one full store the first to find room goes on,
and the other one is `StaleRestore`, as is one whose predecessor lived on and committed.

What could not be loaded is excluded, loudly, by the caller who tried: `exclude` takes away every checkpoint whose
chain reads an excluded one, and another attempt is opened that names what was really loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import CorruptObject, UserError
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import new_token, validate_new_run
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Entry,
    Genesis,
    Sealed,
    entry_key,
    voiding_writer,
)
from deltashard_checkpoint.log.log_error import LogGap, LogRemoved, LogStopped, stopped
from deltashard_checkpoint.log.repair import LogChanged, NothingToRepair, Salvage, repair, salvage
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.log.selection import NothingRestorable, select
from deltashard_checkpoint.stores.abc import ObjectNotFound, StoreUnavailable
from deltashard_checkpoint.write.closing import CLOSING_WAIT_S, has_recent_marker, wait_for_closing
from deltashard_checkpoint.write.fencing import FencedError, displacement


class StaleRestore(FencedError):
    """The run went on since this trainer restored it from a store that took no entry."""

    def __init__(self, what: str, run: str) -> None:
        super(FencedError, self).__init__(
            f"the run went on since it was restored here from a store that took no entry: {what}",
            where=f"run {run}",
            remedy="end this process; a new one restores what is the newest now",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeBasis:
    """What a trainer trains on whose attempt could not be opened."""

    attempt: int
    """The newest attempt when it was read; 0: none."""
    resume: int | None
    """Seq of what the entry names."""
    token: str
    """Writer of the entry to come: one whose answer was lost is found by it."""

    def check(self, now: RunState, resume: Checkpoint | None) -> None:
        """Raise `StaleRestore` unless the run stands where it was read. Pure."""
        if (now.attempt or 0) != self.attempt:
            raise StaleRestore(f"attempt {now.attempt} was opened", now.run)
        if (None if resume is None else resume.seq) != self.resume:
            newer = "nothing" if resume is None else f"checkpoint {resume.seq}"
            raise StaleRestore(
                f"{newer} is what a restore would load now, and {self.resume} was loaded", now.run
            )


class OwnerMismatch(UserError):
    """The run belongs to another owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAttempt:
    """An attempt that is ours."""

    attempt: int
    """Its number: the seq of its own entry."""
    resume: Checkpoint | None
    """What it must load; None: nothing was ever committed, or "none" was asked for, and the first cut is a baseline."""
    state: RunState
    """The run right after the entry."""
    waited_s: float
    """Seconds spent waiting for saves of terminating pods."""
    fell_back: bool
    """Newer checkpoints than `resume` are live but were excluded, or may have stood in slots that cannot be read."""
    voided: tuple[int, int] | None = None
    """Slots [first, stop) of the log that could not be read and count for nothing from now on: commits may be lost."""
    damage: str = ""
    """With `voided`: what is wrong with the log, for people."""


def open_attempt(  # noqa: PLR0913
    log: RunLog,
    *,
    owner: str,
    workload: str = "",
    pod: str = "",
    took_part: int = 0,
    world_size: int = 1,
    layout: bytes | None = None,
    which: str = "latest",
    exclude: Iterable[int] = (),
    takeover: bool = False,
    closing_wait_s: float = CLOSING_WAIT_S,
    deadline_s: float = DEFAULT_DEADLINE_S,
    basis: ResumeBasis | None = None,
) -> OpenedAttempt:
    """Open the next attempt of the run, creating the run if it does not exist.

    `layout` are the bytes of the layout (`format.layout`) that `world_size` ranks keep; None: one rank holds every
    table whole. `workload` and `pod` are UIDs of what this trainer runs in, if that is a cluster; `took_part` is the
    newest attempt in which the pod is known to have been, whoever opened it. `basis`: what the trainer has
    loaded already.
    Raises `OwnerMismatch`, `FencedError` (`StaleRestore`), what `select` raises, `LogStopped` when the log holds an entry
    of a newer version, `LogGap`, `AppendUnknown`, `StoreUnavailable` past the deadline, and `UserError` for a new run
    of a name that is taken (`key_rule.RESERVED`), and for a layout of another world size or one that does not tile its
    tables.
    """
    kept = None if layout is None else _layout_of(layout, world_size)
    opener = _Opener(
        owner=owner, workload=workload, pod=pod, took_part=took_part, world_size=world_size, which=which,
        excluded=tuple(exclude), takeover=takeover, layout="" if kept is None else kept.digest,
    )  # fmt: skip
    state, marked, repaired = _load_state(log, opener, closing_wait_s, deadline_s)
    if basis is not None and (ours := _opened_before(log, state, basis)) is not None:
        return ours
    if state.tip < 0:
        validate_new_run(log.run)
        log.append(
            lambda now, seq, writer: None if now.tip >= 0 else _genesis(now, seq, writer, owner),
            before="attempt.before_genesis",
            after="attempt.after_genesis",
            deadline_s=deadline_s,
        )
    if kept is not None:
        # IMPORTANT: an entry names only what is durable. A layout that no entry names is a small, harmless leftover.
        _put_layout(log, kept, deadline_s)
    waited_s = wait_for_closing(log, bound_s=closing_wait_s) if marked else 0.0
    chosen: list[tuple[RunState, Checkpoint | None]] = []

    def build(now: RunState, seq: int, writer: str) -> Entry:
        # IMPORTANT: the resume point is chosen against the state at the slot that is being won. Chosen any earlier, a
        # commit that got in between would be lost though it was acknowledged.
        opener.check(now)
        resume = opener.resume_point(now)
        if basis is not None:
            basis.check(now, resume)
            writer = basis.token
        chosen[:] = [(now, resume)]
        return opener.entry(now, seq, writer, resume)

    sealed = log.append(
        build, before="attempt.before_open", after="attempt.after_open", deadline_s=deadline_s, voiding=True
    )
    assert isinstance(sealed, Sealed)
    before, resume = chosen[0]
    newest = before.newest()
    voided = None if before.stopped is None else (before.stopped.seq, sealed.entry.seq)
    if repaired is not None:
        voided = (min(repaired.lost, default=repaired.state.tip + 1), repaired.state.tip + 1)
    return OpenedAttempt(
        attempt=sealed.entry.seq,
        resume=resume,
        state=log.state,
        waited_s=waited_s,
        fell_back=(bool(opener.excluded) and newest is not None and newest != resume)
        or (voided is not None and which == "latest"),
        voided=voided,
        damage=(before.damage() or "") if repaired is None else _repair_summary(repaired),
    )


def _repair_summary(repaired: Salvage) -> str:
    """What to say of a log that this attempt has repaired."""
    lost = ", ".join(map(str, repaired.lost)) or "the newest"
    newest = repaired.state.newest()
    return (
        f"{repaired.damage}; it was repaired: log entry {repaired.state.tip + 1} continues without {lost}, "
        + (
            "without any checkpoint"
            if newest is None
            else f"with checkpoint {newest.seq} (step {newest.step})"
        )
    )


def read_unopened(  # noqa: PLR0913
    log: RunLog,
    *,
    owner: str,
    workload: str = "",
    pod: str = "",
    took_part: int = 0,
    which: str = "latest",
    exclude: Iterable[int] = (),
    takeover: bool = False,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> tuple[RunState, Checkpoint | None, ResumeBasis]:
    """What `open_attempt` would resume from, without a write: (the run, the checkpoint, what to open late with).

    Raises what `open_attempt` raises but for writing.
    """
    opener = _Opener(
        owner=owner, workload=workload, pod=pod, took_part=took_part, world_size=1, which=which,
        excluded=tuple(exclude), takeover=takeover, layout="",
    )  # fmt: skip
    state = log.refresh(deadline_s=deadline_s, use_hint=True)
    if state.tip >= 0:
        opener.check(state)
    resume = opener.resume_point(state)
    seq = None if resume is None else resume.seq
    return state, resume, ResumeBasis(attempt=state.attempt or 0, resume=seq, token=new_token())


def _opened_before(log: RunLog, state: RunState, basis: ResumeBasis) -> OpenedAttempt | None:
    """The attempt that an earlier try with this basis opened, and whose answer was lost; None: none did."""
    if (state.attempt or 0) <= basis.attempt:
        return None
    slot = log.read_slot(state.attempt or 0)
    if not isinstance(slot, Sealed) or not slot.entry.writer.startswith(basis.token):
        return None
    return OpenedAttempt(
        attempt=slot.entry.seq,
        resume=None if basis.resume is None else state.checkpoints.get(basis.resume),
        state=state,
        waited_s=0.0,
        fell_back=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opener:
    """Who opens an attempt, and what it asks to resume from. Pure: every answer is about the state it is given."""

    owner: str
    workload: str
    pod: str
    took_part: int
    world_size: int
    which: str
    excluded: tuple[int, ...]
    takeover: bool
    layout: str
    """Digest; empty: none."""

    def check(self, now: RunState) -> None:
        """Refuse what may not open: a log that cannot be read on, another's run, a workload or pod that was followed.

        Raises `LogStopped`, `OwnerMismatch`, `FencedError` or `TakenOver`.
        """
        if now.stopped is not None and not now.stopped.voidable:
            raise stopped(now)
        if now.stopped is not None and now.stopped.seq == 0:
            raise LogStopped(
                f"the first entry of the log cannot be read: {now.stopped.error.what}",
                where=f"run {now.run}",
                remedy=f"restore {entry_key(0)} from a copy or a version, or use another run name",
            )
        if self.takeover:
            return
        if now.owner != self.owner:
            raise OwnerMismatch(
                f"the run belongs to {now.owner!r}, not to {self.owner!r}",
                where=f"run {now.run}",
                remedy="choose another run name, or say takeover",
            )
        if (displaced := displacement(now, self.workload, self.pod, self.took_part)) is not None:
            raise displaced

    def resume_point(self, now: RunState) -> Checkpoint | None:
        """The checkpoint to load, None for none; raises what `select` raises."""
        resume = select(now, self.which, self.excluded)
        if now.damage() is not None and resume is None and self.which == "latest":
            # IMPORTANT: only silence would follow: the attempt that leaves the bad slot behind makes the log look as if
            # nothing had ever been committed, and training would begin anew.
            raise NothingRestorable(
                now.damage() or "",
                where=f"run {now.run}",
                remedy=f"restore {entry_key(now.stopped.seq if now.stopped else 0)} from a copy or a version; "
                "fresh=True begins anew",
            )
        return resume

    def entry(self, now: RunState, seq: int, writer: str, resume: Checkpoint | None) -> AttemptOpened:
        """The entry for slot `seq`; a slot before it that cannot be read counts for nothing from then on."""
        return AttemptOpened(
            seq=seq,
            previous="",
            writer=writer if now.stopped is None else voiding_writer(writer, now.stopped.hash),
            at_s=0.0,
            world_size=self.world_size,
            resumes_from=None if resume is None else resume.seq,
            owner=self.owner,
            takeover=now.owner != self.owner,
            voids=None if now.stopped is None else now.stopped.seq,
            workload=self.workload,
            pod=self.pod,
            layout=self.layout,
        )


def _layout_of(data: bytes, world_size: int) -> Layout:
    try:
        found = Layout.decode(data)
    except CorruptObject as error:
        raise UserError(
            error.what, where="layout", remedy="look at the boxes that the ranks attached with"
        ) from error
    if found.world_size != world_size:
        raise UserError(f"a layout of {found.world_size} ranks, {world_size} train", where="layout")
    return found


def _put_layout(log: RunLog, layout: Layout, deadline_s: float) -> None:
    """Put the layout unless it is there, and whole: every checkpoint of its ranks needs it."""
    retry_budget = log.retry_budget(deadline_s)
    crash_point("layout.before_put")
    while True:
        try:
            with suppress(ObjectNotFound):
                if log.store.get(log.key(layout.key)) == layout.data:
                    break
            log.store.put(log.key(layout.key), layout.data)
        except StoreUnavailable:
            if not retry_budget.pause():
                raise
            continue
        break
    crash_point("layout.after_put")


def _genesis(state: RunState, seq: int, writer: str, owner: str) -> Genesis:
    return Genesis(seq=seq, previous="", writer=writer, at_s=0.0, run=state.run, owner=owner)


def _load_state(
    log: RunLog, opener: _Opener, closing_wait_s: float, deadline_s: float
) -> tuple[RunState, bool, Salvage | None]:
    """(the log's state, whether a save of a terminating pod may still upload, what the log was repaired to).

    Asked for at once where that may be. It does not matter which answer is older: a save that ends in between has the
    slot that the opener tries for.
    """
    if not log.concurrent:
        state, repaired = _load_or_repair(log, opener, deadline_s)
        return state, has_recent_marker(log, closing_wait_s), repaired
    with ThreadPoolExecutor(1, thread_name_prefix="closing") as pool:
        marked = pool.submit(copy_context().run, has_recent_marker, log, closing_wait_s)
        state, repaired = _load_or_repair(log, opener, deadline_s)
        return state, marked.result(), repaired


def _load_or_repair(log: RunLog, opener: _Opener, deadline_s: float) -> tuple[RunState, Salvage | None]:
    """The log's state, and what the log was repaired to if it had to be: it is as damaged as any other one's.

    IMPORTANT: before slots are made void. A repair reads on behind what is bad; where it keeps a newer checkpoint than
    the entries before the bad one do, or where entries are missing, it is what the attempt goes on from.

    Raises `LogGap` where nothing is left, and where a copy or a removal is under way; and what `_Opener.check` and
    `_Opener.resume_point` raise.
    """
    retry_budget = log.retry_budget(deadline_s)
    while True:
        gap: LogGap | None = None
        newest: Checkpoint | None = None
        try:
            state = log.refresh(deadline_s=retry_budget.left_s, use_hint=True)
        except LogGap as error:
            if isinstance(error, LogRemoved) or not log.hint().whole:
                raise
            gap = error
        else:
            if state.stopped is None or not state.stopped.voidable:
                return state, None
            newest = state.newest()
        try:
            found = salvage(log, deadline_s=retry_budget.left_s)
        except NothingToRepair:
            if gap is not None:
                raise gap from None
            return log.state, None
        better = found.state.newest()
        if gap is not None and better is None and opener.which == "latest":
            raise gap  # what is lost may have been the only checkpoint: the run is not begun anew unasked
        if gap is None and (better is None or (newest is not None and better.seq <= newest.seq)):
            return log.state, None
        opener.check(found.state)
        opener.resume_point(found.state)
        try:
            repair(log, found, deadline_s=retry_budget.left_s)
        except LogChanged:
            if retry_budget.pause():
                continue
            raise
        log.forget()
        return log.refresh(deadline_s=retry_budget.left_s), found
