"""Open an attempt, which fences every older trainer of the run.

An attempt is opened by winning the next slot of the log. Its entry names the checkpoint to load, chosen for that very
slot. If an older trainer (a zombie) commits first, it takes the slot, and the opener resumes from that checkpoint. If
the opener wins, the zombie sees a higher attempt and is fenced. The log is one total order: no leases, no clocks.

A sidecar whose pod is terminating while a save uploads leaves a marker (`write.closing`), and an opener waits for it. A
marker of a killed process costs at most one bounded wait.

A run with a user-chosen name (`run-id`) may be handed from one workload to the next; each workload enters with its
first attempt. A superseded workload (`TakenOver`) or pod cannot reopen the run, so two live trainers end in one and
their restarts do not fence each other in a loop.

A full or read-only store accepts no entry but can be read. A single trainer then restores (`read_unopened`), trains,
and opens its attempt later with the entry that it would have had (`ResumeBasis`). Until then its checkpoints do not
count. The entry is written only if no attempt was opened since the read and the same checkpoint would be chosen.
Otherwise, for example when another trainer opened first or a predecessor committed, the open raises `StaleRestore`.

A caller that fails to load a checkpoint passes it in `exclude`, which drops every checkpoint whose chain reads it. The
caller then opens another attempt, which names the checkpoint that was really loaded.
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
    """The run advanced after this trainer restored it from a store that accepted no entry."""

    def __init__(self, what: str, run: str) -> None:
        super(FencedError, self).__init__(
            f"the run advanced since it was restored here from a store that accepted no entry: {what}",
            where=f"run {run}",
            remedy="end this process; a new one restores the newest checkpoint",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeBasis:
    """State from which a trainer runs while its attempt is not open yet."""

    attempt: int
    """Newest attempt at the time of the read; 0 if there was none."""
    resume: int | None
    """Seq of the checkpoint that was loaded."""
    token: str
    """Writer token of the future entry; finds an entry whose acknowledgement was lost."""

    def check(self, now: RunState, resume: Checkpoint | None) -> None:
        """Raise `StaleRestore` if an attempt was opened since, or another checkpoint would be chosen. Pure."""
        if (now.attempt or 0) != self.attempt:
            raise StaleRestore(f"attempt {now.attempt} was opened", now.run)
        if (None if resume is None else resume.seq) != self.resume:
            newer = "no checkpoint" if resume is None else f"checkpoint {resume.seq}"
            raise StaleRestore(f"a restore would load {newer} now, but {self.resume} was loaded", now.run)


class OwnerMismatch(UserError):
    """The run belongs to another owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedAttempt:
    """An attempt opened by this process."""

    attempt: int
    """Attempt number: the seq of its entry."""
    resume: Checkpoint | None
    """Checkpoint to load; None if the run has none or "none" was requested. The first snapshot is then a baseline."""
    state: RunState
    """Run state right after the entry."""
    waited_s: float
    """Seconds spent waiting for saves of terminating pods."""
    fell_back: bool
    """Newer live checkpoints than `resume` were excluded, or may be in unreadable slots."""
    voided: tuple[int, int] | None = None
    """Unreadable slots [first, stop) of the log, ignored from now on; commits in them may be lost."""
    damage: str = ""
    """Human-readable description of the log damage, set with `voided`."""


def open_attempt(  # noqa: PLR0913
    log: RunLog,
    *,
    owner: str,
    workload: str = "",
    pod: str = "",
    participated_attempt: int = 0,
    world_size: int = 1,
    layout: bytes | None = None,
    which: str = "latest",
    exclude: Iterable[int] = (),
    takeover: bool = False,
    closing_wait_s: float = CLOSING_WAIT_S,
    deadline_s: float = DEFAULT_DEADLINE_S,
    basis: ResumeBasis | None = None,
) -> OpenedAttempt:
    """Open the next attempt of the run; create the run if it does not exist.

    `layout` is the encoded layout (`format.layout`) of the `world_size` ranks; None if one rank holds every table
    whole. `workload` and `pod` are cluster UIDs of this trainer, if any. `participated_attempt` is the newest attempt
    that the pod is known to have taken part in. `basis` describes what the trainer has loaded already.

    Raises `OwnerMismatch`, `FencedError` (`StaleRestore`), the errors of `select`, `LogStopped` for an entry of a newer
    version, `LogGap`, `AppendUnknown`, `StoreUnavailable` past the deadline, and `UserError` for a new run with a
    reserved name (`key_rule.RESERVED`) or a layout that has another world size or does not tile its tables.
    """
    kept = None if layout is None else _layout_of(layout, world_size)
    opener = _Opener(
        owner=owner, workload=workload, pod=pod, participated_attempt=participated_attempt, world_size=world_size,
        which=which, excluded=tuple(exclude), takeover=takeover, layout="" if kept is None else kept.digest,
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
        # IMPORTANT: an entry names only durable objects. A layout that no entry names is a small, harmless leftover.
        _put_layout(log, kept, deadline_s)
    waited_s = wait_for_closing(log, bound_s=closing_wait_s) if marked else 0.0
    chosen: list[tuple[RunState, Checkpoint | None]] = []

    def build(now: RunState, seq: int, writer: str) -> Entry:
        # IMPORTANT: the resume point is chosen against the state at the slot being won. An earlier choice would lose an
        # acknowledged commit that was made in between.
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
    participated_attempt: int = 0,
    which: str = "latest",
    exclude: Iterable[int] = (),
    takeover: bool = False,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> tuple[RunState, Checkpoint | None, ResumeBasis]:
    """Return the run, the checkpoint that `open_attempt` would resume from, and the basis for opening later.

    Writes nothing.     Raises the errors of `open_attempt` except those of writing.
    """
    opener = _Opener(
        owner=owner, workload=workload, pod=pod, participated_attempt=participated_attempt, world_size=1, which=which,
        excluded=tuple(exclude), takeover=takeover, layout="",
    )  # fmt: skip
    state = log.refresh(deadline_s=deadline_s, use_hint=True)
    if state.tip >= 0:
        opener.check(state)
    resume = opener.resume_point(state)
    seq = None if resume is None else resume.seq
    return state, resume, ResumeBasis(attempt=state.attempt or 0, resume=seq, token=new_token())


def _opened_before(log: RunLog, state: RunState, basis: ResumeBasis) -> OpenedAttempt | None:
    """Return the attempt that an earlier try with this basis opened without an acknowledgement, or None."""
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
    """Identity of the opener and the resume point it requests. Pure: every result depends only on the given state."""

    owner: str
    workload: str
    pod: str
    participated_attempt: int
    world_size: int
    which: str
    excluded: tuple[int, ...]
    takeover: bool
    layout: str
    """Digest of the layout; empty if there is none."""

    def check(self, now: RunState) -> None:
        """Reject an unreadable log, a run of another owner, and a superseded workload or pod.

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
                remedy="choose another run name, or pass takeover=True",
            )
        if (displaced := displacement(now, self.workload, self.pod, self.participated_attempt)) is not None:
            raise displaced

    def resume_point(self, now: RunState) -> Checkpoint | None:
        """Return the checkpoint to load, or None; raises the errors of `select`."""
        resume = select(now, self.which, self.excluded)
        if now.damage() is not None and resume is None and self.which == "latest":
            # IMPORTANT: an attempt that skips the bad slot would make the log look as if nothing had been committed,
            # and training would silently start from scratch.
            raise NothingRestorable(
                now.damage() or "",
                where=f"run {now.run}",
                remedy=f"restore {entry_key(now.stopped.seq if now.stopped else 0)} from a copy or a version; "
                "fresh=True starts from scratch",
            )
        return resume

    def entry(self, now: RunState, seq: int, writer: str, resume: Checkpoint | None) -> AttemptOpened:
        """Return the entry for slot `seq`; it voids unreadable slots before it."""
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
            error.what, where="layout", remedy="check the boxes with which the ranks attached"
        ) from error
    if found.world_size != world_size:
        raise UserError(f"a layout of {found.world_size} ranks, but {world_size} ranks train", where="layout")
    return found


def _put_layout(log: RunLog, layout: Layout, deadline_s: float) -> None:
    """Put the layout unless an intact one exists: every checkpoint of its ranks needs it."""
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
    """Return (log state, whether a save of a terminating pod may still upload, result of a log repair).

    The marker is read concurrently with the log. The order of the two reads does not matter: a save that finishes in
    between takes the slot that the opener tries to win.
    """
    if not log.concurrent:
        state, repaired = _load_or_repair(log, opener, deadline_s)
        return state, has_recent_marker(log, closing_wait_s), repaired
    with ThreadPoolExecutor(1, thread_name_prefix="closing") as pool:
        marked = pool.submit(copy_context().run, has_recent_marker, log, closing_wait_s)
        state, repaired = _load_or_repair(log, opener, deadline_s)
        return state, marked.result(), repaired


def _load_or_repair(log: RunLog, opener: _Opener, deadline_s: float) -> tuple[RunState, Salvage | None]:
    """Return the log state, and the result of a repair if the log needed one.

    IMPORTANT: repair comes before slots are voided. A repair reads past the bad entry. The attempt continues from the
    repaired log if that keeps a newer checkpoint than the entries before the bad one, or if entries are missing.

    Raises `LogGap` if nothing is left or a copy or removal is in progress, and the errors of `_Opener`.
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
            raise gap  # the only checkpoint may be lost: no implicit start from scratch
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
