"""Commit a snapshot without a leader.

Every rank's sidecar uploads its packs and its index. With more than one rank it then puts a *report* under `part/` of
the snapshot (`write.report`) and lists all reports (`write.snapshot_reports`). The process that sees a report of every
rank puts the manifest and creates the log entry. Losing that race to a peer with the same snapshot is success. A
process with missing reports polls the log and, after growing delays, lists again: the last rank may have died between
its report and the entry, and any other process must then commit. The pod of rank 0 lists at once, the others a moment
later. So normally the pod that finishes last commits, or rank 0's if several finish together. A process remembers how
long commits take and polls slowly until then (`write.commit_wait`).

In the steady state a commit by rank 0's pod reads no object, because report bodies are known by their hashes. With one
rank there is no other process, and no report.

Snapshots commit in increasing order. A snapshot is abandoned, even if complete, when it is not newer than one in the
log, when its `covers` is no longer live at its slot, or when ranks have different steps or layouts. No rows are lost:
the rows of an abandoned snapshot stay marked, and the next snapshot holds them.
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
    """The deadline passed before every rank had uploaded its part."""

    cause = Cause.DEADLINE

    def __init__(self, ranks: Sequence[int], where: str) -> None:
        self.ranks = tuple(ranks)
        super().__init__(
            f"the parts of ranks {', '.join(map(str, self.ranks))} did not arrive in time",
            where=where,
            remedy="check the sidecars of these ranks; the next snapshot holds the rows of this one",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A snapshot that is in the log."""

    seq: int
    entry: Checkpoint
    by_us: bool
    """Whether this process created the entry, possibly with a lost acknowledgement."""


def commit_parts(  # noqa: PLR0913
    log: RunLog,
    *,
    attempt: int,
    snapshot_id: int,
    step: int,
    world_size: int,
    reports: Sequence[PartReport],
    layout: str = "",
    bodies: ReportBodyCache | None = None,
    latency: CommitLatency | None = None,
    since_s: float = 0.0,
    deadline_s: float = COMMIT_DEADLINE_S,
) -> Committed:
    """Commit the parts of this process's ranks, whose packs and indexes are durable; return the logged entry.

    `layout` is the digest of the attempt's layout; empty if the parts carry their boxes. The snapshot began `since_s`
    seconds ago, at one step and so at nearly the same time on all ranks. `latency` remembers how long commits take;
    with None the log is polled often, for callers that block on the commit.

    Raises `FencedError`, `SnapshotAbandoned` (`PartAbandoned`), `PartsMissing` past the deadline, `AppendUnknown` or
    `StoreUnavailable` if the store does not answer until then, `LogStopped`, `LogGap` (`LogRemoved`).
    """
    retry_budget = log.retry_budget(deadline_s)
    found = SnapshotReports(
        log,
        attempt=attempt,
        snapshot_id=snapshot_id,
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
    """Return the commit by any process of a snapshot to which this process has put its reports."""
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
                # A peer may have committed it all the same: if a rank reported twice, or reported after it had
                # abandoned its part, peers may have seen different reports.
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


def _existing_commit(snapshot: SnapshotReports, state: RunState) -> Committed | None:
    """Return this snapshot's entry, if any; raises `FencedError`, `SnapshotAbandoned`, `LogRemoved` without a log."""
    if state.tip < 0:  # the attempt was opened in this log
        raise snapshot.log.removed()
    if entry := state.commit_of(snapshot.attempt, snapshot.snapshot_id):
        return Committed(seq=entry.seq, entry=entry, by_us=False)
    # IMPORTANT: this comparison is the fencing. It uses the very state whose next slot is being won.
    if fenced := fencing(state, snapshot.attempt):
        raise fenced
    opened = state.attempts.get(snapshot.attempt)
    if (
        opened is not None
        and opened.last_snapshot is not None
        and snapshot.snapshot_id <= opened.last_snapshot
    ):
        raise SnapshotAbandoned(
            f"snapshot {opened.last_snapshot} was committed before snapshot {snapshot.snapshot_id}",
            where=snapshot.where,
        )
    return None


def _create(snapshot: SnapshotReports, retry_budget: RetryBudget) -> Committed:
    """Create the entry of a snapshot with all reports, or return the one that a peer created."""
    # IMPORTANT: nothing is visible before this entry, and every object it names is durable before it: packs, then
    # index, then (with more than one rank) report and manifest, then the entry. A crash in between leaves only garbage.
    reports = snapshot.all()
    entry = _checkpoint_of(snapshot, reports)
    if snapshot.layout:
        manifest = _manifest(snapshot, reports)
        entry = replace(entry, listed=manifest.listed)
        crash_point("manifest.before_put")
        put_idempotent(
            snapshot.log,
            manifest_key(snapshot.attempt, snapshot.snapshot_id, manifest.listed.manifest),
            manifest.data,
            retry_budget,
        )
        crash_point("manifest.after_put")
    found: list[Committed] = []

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        if done := _existing_commit(snapshot, state):
            found[:] = [done]
            return None
        return replace(entry, seq=seq, writer=writer)

    try:
        sealed = snapshot.log.append(
            build,
            before="commit.before_log_put",
            after="commit.after_log_put",
            deadline_s=retry_budget.left_s,
        )
    except EntryRefused as error:
        raise SnapshotAbandoned(f"the log rejects it: {error.what}", where=snapshot.where) from error
    if sealed is None:
        return found[0]
    assert isinstance(sealed.entry, Checkpoint)
    return Committed(seq=sealed.entry.seq, entry=sealed.entry, by_us=True)


def _checkpoint_of(snapshot: SnapshotReports, reports: Sequence[tuple[ReportName, ReportBody]]) -> Checkpoint:
    """Return the entry of a snapshot without a slot; it lists its parts unless a manifest does."""
    # Most ranks have equal bodies: each body counts once, at its lowest rank.
    bodies = list({name.body: body for name, body in reports}.values())
    tables: dict[str, TableSchema] = {}
    for table in (table for body in bodies for table in body.tables):
        if tables.setdefault(table.fqn, table) != table:
            raise SnapshotAbandoned(f"ranks disagree about table {table.fqn}", where=snapshot.where)
    names = [name for name, _ in reports]
    first = reports[0][1]
    return Checkpoint(
        seq=0,
        previous="",
        writer="",
        at_s=0.0,
        attempt=snapshot.attempt,
        snapshot_id=snapshot.snapshot_id,
        step=snapshot.step,
        parts=() if snapshot.layout else tuple(_part(snapshot, name, body) for name, body in reports),
        tables=tuple(tables[fqn] for fqn in sorted(tables)),
        encodings=all_encodings(body.encodings for body in bodies),
        rows=sum(name.rows for name in names),
        raw_bytes=sum(name.raw_bytes for name in names),
        stored_bytes=sum(name.stored_bytes for name in names),
        stall_s=max(name.stall_us for name in names) / 1e6,
        snapshot_at_s=first.snapshot_at_s,
        directive=first.directive,
        fingerprint=dict(first.fingerprint),
        metadata=_merged([body.metadata for body in bodies]),
        pins=tuple(sorted({pin for body in bodies for pin in body.pins})),
    )


def _part(snapshot: SnapshotReports, name: ReportName, body: ReportBody) -> Part:
    return Part(
        rank=name.rank,
        index_key=index_key(
            attempt=snapshot.attempt,
            snapshot_id=snapshot.snapshot_id,
            rank=name.rank,
            token=name.token,
            xxh3=name.xxh3,
        ),
        boxes=body.boxes,
        stored_bytes=name.stored_bytes,
        covers=name.covers,
    )


def _manifest(snapshot: SnapshotReports, reports: Sequence[tuple[ReportName, ReportBody]]) -> Manifest:
    return Manifest(
        run=snapshot.log.run,
        attempt=snapshot.attempt,
        snapshot_id=snapshot.snapshot_id,
        step=snapshot.step,
        layout=snapshot.layout,
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
    """Merge the metadata of all ranks: rank 0 wins, except that the coarsest precision of any rank is kept."""
    merged = {name: text for each in reversed(metadata) for name, text in each.items()}
    if (least := coarsest(each[PRECISION_KEY] for each in metadata if PRECISION_KEY in each)) is not None:
        merged[PRECISION_KEY] = least.text()
    return merged
