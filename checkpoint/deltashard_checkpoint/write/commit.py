"""Committing a cut without a leader.

Every rank's sidecar uploads its packs and its index, then (with more than one rank) a *report* under the cut's `part/`
(`write.report`), and lists these (`write.snapshot_reports`). Whoever sees those of all ranks puts the manifest and creates
the log entry; losing that race to a peer with the same (attempt, cut) is success. Who does not see them all yet waits,
polling the log *and*, after growing delays, listing again: the last rank to finish may have died between its report and
the entry, and then any other must do it. The pod of rank 0 lists at once, the others a moment later: if all goes well,
the pod that finishes last commits, or that of rank 0 when several finish together. A process remembers how long after
their beginnings cuts were committed, and until then looks at the log seldom (`write.commit_wait`).

In the steady state, and if rank 0's pod does it, a commit gets no object at all: bodies of reports are known by their
hashes. With one rank there is no other process, and no report.

Cuts commit in increasing order: a cut that is not newer than one in the log is abandoned, however complete, so its
data is provably dead. A cut whose `covers` is no longer live at its slot is abandoned too, and so is one whose ranks
were at different steps, or keep different layouts. Nothing is lost by that: rows of an abandoned cut are still marked,
and the next cut holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deltashard_proto.cause import Cause

from deltashard_checkpoint.backoff import RetryBudget
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.format.index import all_encodings
from deltashard_checkpoint.format.object_key import index_key
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Entry, Part
from deltashard_checkpoint.log.manifest import Manifest, manifest_key
from deltashard_checkpoint.log.part_list import ListedPart
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.vocabulary import PRECISION_KEY
from deltashard_checkpoint.write.commit_wait import CommitLatency, CommitWait
from deltashard_checkpoint.write.fencing import fencing
from deltashard_checkpoint.write.precision import coarsest
from deltashard_checkpoint.write.report import PartReport, ReportBody, ReportBodyCache, ReportName
from deltashard_checkpoint.write.snapshot_reports import SnapshotAbandoned, SnapshotReports, put_idempotent

COMMIT_DEADLINE_S = 600.0


class PartsMissing(EnvironmentFault):
    """The deadline ended before every rank had uploaded its part."""

    cause = Cause.DEADLINE

    def __init__(self, ranks: Sequence[int], where: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f"no part of ranks {', '.join(map(str, self.ranks))} arrived in time",
            where=where,
            remedy="look at these ranks' sidecars; the next cut holds the rows of this one",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The cut is in the log."""

    seq: int
    entry: Checkpoint
    by_us: bool
    """This process created the entry (or found it had, after a lost acknowledgement)."""


def commit_parts(  # noqa: PLR0913
    log: RunLog,
    *,
    attempt: int,
    cut: int,
    step: int,
    world_size: int,
    reports: Sequence[PartReport],
    layout: str = "",
    bodies: ReportBodyCache | None = None,
    latency: CommitLatency | None = None,
    since_s: float = 0.0,
    deadline_s: float = COMMIT_DEADLINE_S,
) -> Committed:
    """Commit the parts of this process's ranks, whose packs and indexes are durable; returns when the cut is logged.

    `layout` is the digest of the attempt's layout, empty where the parts say their boxes themselves. The cut began
    `since_s` ago, at one step and so nearly at one time on all ranks; `latency` remembers how long cuts take; None: this
    one is looked for often, because somebody waits for it.

    Raises `FencedError`, `SnapshotAbandoned` (`PartAbandoned`), `PartsMissing` past the deadline, `AppendUnknown` or
    `StoreUnavailable` when the store does not answer until then, `LogStopped`, `LogGap` (`LogRemoved`).
    """
    retry_budget = log.retry_budget(deadline_s)
    found = SnapshotReports(
        log,
        attempt=attempt,
        cut=cut,
        step=step,
        world_size=world_size,
        layout=layout,
        bodies=bodies or ReportBodyCache(),
    )
    if world_size == 1 and not layout:
        crash_point("commit.after_list")
        found.add(reports[0])
        return _create(found, retry_budget)
    wait = CommitWait(
        retry_budget,
        latency or CommitLatency(),
        is_leader=any(report.part.rank == 0 for report in reports),
        baseline=all(report.part.covers is None for report in reports),
        since_s=since_s,
    )
    crash_point("report.before_put")
    for report in reports:
        found.put(report, retry_budget)
        crash_point("report.after_put")
    done = _wait_for_commit(found, wait, retry_budget)
    wait.record_commit(log.clocks.wall_s() - done.entry.at_s)
    return done


def _wait_for_commit(found: SnapshotReports, wait: CommitWait, retry_budget: RetryBudget) -> Committed:
    """The commit of a cut whose reports of this process are there, by whoever makes it."""
    log = found.log
    wait.begin()
    while True:
        try:
            if done := _existing_commit(found, log.refresh(deadline_s=retry_budget.left_s)):
                return done
            try:
                missing = found.missing() if (should_list := wait.should_list()) else ()
                if should_list and not missing:
                    crash_point("commit.after_list")
                    return _create(found, retry_budget)
            except SnapshotAbandoned:
                # It may be in the log all the same: of a rank that reported twice, or gave up and then came, a peer
                # may have seen the one and not the other.
                if done := _existing_commit(found, log.refresh(deadline_s=retry_budget.left_s)):
                    return done
                raise
        except StoreUnavailable:
            if not retry_budget.pause():
                raise
            continue
        if should_list and not retry_budget.left_s:
            raise PartsMissing(missing, found.where)
        wait.pause()


def _existing_commit(cut: SnapshotReports, state: RunState) -> Committed | None:
    """What the log has of this cut already; raises `FencedError`, `SnapshotAbandoned`, or, of no log, `LogRemoved`."""
    if state.tip < 0:  # this attempt was opened in it
        raise cut.log.removed()
    if entry := state.commit_of(cut.attempt, cut.cut):
        return Committed(seq=entry.seq, entry=entry, by_us=False)
    # IMPORTANT: fencing is this comparison, made against the very state whose next slot is being won.
    if fenced := fencing(state, cut.attempt):
        raise fenced
    opened = state.attempts.get(cut.attempt)
    if opened is not None and opened.last_snapshot is not None and cut.cut <= opened.last_snapshot:
        raise SnapshotAbandoned(
            f"cut {opened.last_snapshot} was committed before cut {cut.cut}", where=cut.where
        )
    return None


def _create(cut: SnapshotReports, retry_budget: RetryBudget) -> Committed:
    """Create the entry of a cut of which no report is missing, or find that a peer did."""
    # IMPORTANT: nothing is visible before this entry, and everything it names is durable before it is put: packs, then
    # index, then (with more than one rank) report and manifest, then the entry. A death in between leaves garbage only.
    reports = cut.all()
    entry = _checkpoint_of(cut, reports)
    if cut.layout:
        manifest = _manifest(cut, reports)
        entry = replace(entry, listed=manifest.listed)
        crash_point("manifest.before_put")
        put_idempotent(
            cut.log, manifest_key(cut.attempt, cut.cut, manifest.listed.manifest), manifest.data, retry_budget
        )
        crash_point("manifest.after_put")
    found: list[Committed] = []

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        if done := _existing_commit(cut, state):
            found[:] = [done]
            return None
        return replace(entry, seq=seq, writer=writer)

    try:
        sealed = cut.log.append(
            build,
            before="commit.before_log_put",
            after="commit.after_log_put",
            deadline_s=retry_budget.left_s,
        )
    except EntryRefused as error:
        raise SnapshotAbandoned(f"the log refuses it: {error.what}", where=cut.where) from error
    if sealed is None:
        return found[0]
    assert isinstance(sealed.entry, Checkpoint)
    return Committed(seq=sealed.entry.seq, entry=sealed.entry, by_us=True)


def _checkpoint_of(cut: SnapshotReports, reports: Sequence[tuple[ReportName, ReportBody]]) -> Checkpoint:
    """The entry of a cut, for no slot yet; its parts are its own unless a manifest is to list them."""
    # Most ranks have the same body: each counts once, at the lowest rank that has it.
    bodies = list({name.body: body for name, body in reports}.values())
    tables: dict[str, TableSchema] = {}
    for table in (table for body in bodies for table in body.tables):
        if tables.setdefault(table.fqn, table) != table:
            raise SnapshotAbandoned(f"ranks disagree about table {table.fqn}", where=cut.where)
    names = [name for name, _ in reports]
    first = reports[0][1]
    return Checkpoint(
        seq=0,
        previous="",
        writer="",
        at_s=0.0,
        attempt=cut.attempt,
        cut=cut.cut,
        step=cut.step,
        parts=() if cut.layout else tuple(_part(cut, name, body) for name, body in reports),
        tables=tuple(tables[fqn] for fqn in sorted(tables)),
        encodings=all_encodings(body.encodings for body in bodies),
        rows=sum(name.rows for name in names),
        raw_bytes=sum(name.raw_bytes for name in names),
        stored_bytes=sum(name.stored_bytes for name in names),
        stall_s=max(name.stall_us for name in names) / 1e6,
        cut_at_s=first.cut_at_s,
        directive=first.directive,
        fingerprint=dict(first.fingerprint),
        metadata=_merged([body.metadata for body in bodies]),
        pins=tuple(sorted({pin for body in bodies for pin in body.pins})),
    )


def _part(cut: SnapshotReports, name: ReportName, body: ReportBody) -> Part:
    return Part(
        rank=name.rank,
        index_key=index_key(
            attempt=cut.attempt, cut=cut.cut, rank=name.rank, token=name.token, xxh3=name.xxh3
        ),
        boxes=body.boxes,
        stored_bytes=name.stored_bytes,
        covers=name.covers,
    )


def _manifest(cut: SnapshotReports, reports: Sequence[tuple[ReportName, ReportBody]]) -> Manifest:
    return Manifest(
        run=cut.log.run,
        attempt=cut.attempt,
        cut=cut.cut,
        step=cut.step,
        layout=cut.layout,
        parts=tuple(
            ListedPart(
                token=name.token,
                xxh3=name.xxh3,
                covers=name.covers,
                rows=name.rows,
                stored_bytes=name.stored_bytes,
                common_blobs=body.blobs,
            )
            for name, body in reports
        ),
    )


def _merged(metadata: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Metadata of all ranks, rank 0 first: its counts where they differ, but for the bits that rows have at least."""
    merged = {name: text for each in reversed(metadata) for name, text in each.items()}
    if (least := coarsest(each[PRECISION_KEY] for each in metadata if PRECISION_KEY in each)) is not None:
        merged[PRECISION_KEY] = least.text()
    return merged
