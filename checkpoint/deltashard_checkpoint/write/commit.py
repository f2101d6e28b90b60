"""Committing a cut without a leader.

Every rank's sidecar uploads its packs and its index, then (with more than one rank) a *report*: a small object beside
the index that says what the entry will need of this part (boxes, covers, bytes, schemas, the user's metadata). Then
it lists the cut's reports. Whoever sees those of all ranks creates the log entry; losing that race to a peer with the
same (attempt, cut) is success. Who does not see them all yet waits, polling the log *and* listing again, with jitter:
the last rank to finish may have died between its report and the entry, and then any other must do it.

Reports are why a peer never reads another rank's frame directory (a megabyte per 100 GB and rank): a name holds the
hash of the report's bytes, `{rank}-{token}-{hash}.part`, and a report holds the name of the index, which holds the
hash of the index's bytes. With one rank there is nobody to tell, and no report is written.

Cuts commit in increasing order: a cut that is not newer than one in the log is abandoned, however complete, so its
data is provably dead. A cut whose `covers` is no longer live at its slot is abandoned too. Nothing is lost by that:
rows of an abandoned cut are still marked, and the next cut holds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deltashard_proto.cause import Cause

from deltashard_checkpoint.backoff import Patience
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import CorruptObject, EnvironmentFault, ForeignObject, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import Reader, canonical, load
from deltashard_checkpoint.format.object_key import cut_prefix
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Entry, Part
from deltashard_checkpoint.log.entry_codec import part_document, read_part, read_table, table_document
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound, StoreUnavailable

FORMAT = 1
COMMIT_DEADLINE_S = 600.0
_REPORT_KEY = re.compile(r"data/\d{20}/\d{8}/(\d{5})-[0-9a-z]{8,32}-([0-9a-f]{32})\.part", re.ASCII)


class FencedError(EnvironmentFault):
    """A newer attempt is open: this trainer's run is over, it must neither save nor open an attempt again."""

    cause = Cause.FENCED

    def __init__(self, attempt: int, by: int, run: str, *, workload: str = "", pod: str = "") -> None:
        """`workload` or `pod`: UID of what opened the newer attempt, where it is another one."""
        self.attempt = attempt
        self.by = by
        self.workload = workload
        super().__init__(
            f"attempt {attempt} is fenced by attempt {by}"
            + (
                f" of another workload ({workload})"
                if workload
                else f" of another pod ({pod})"
                if pod
                else ""
            ),
            where=f"run {run}",
            remedy="end this workload, the other one trains on; restore(takeover=True) takes the run back on purpose"
            if workload
            else "another process has taken the run over; end this one",
        )


class TakenOver(FencedError):
    """Another workload (Job, JobSet, ...) holds the run now: for this workload it is over, restarts included."""

    cause = Cause.TAKEN_OVER


def fencing(state: RunState, attempt: int) -> FencedError | None:
    """Why `attempt` can commit no more, if a newer one is open. Pure."""
    if state.attempt is None or state.attempt <= attempt:
        return None
    mine = state.attempts[attempt].workload if attempt in state.attempts else ""
    theirs = state.attempts[state.attempt].workload
    if mine and theirs and mine != theirs:
        return TakenOver(attempt, state.attempt, state.run, workload=theirs)
    return FencedError(attempt, state.attempt, state.run)


class Abandoned(EnvironmentFault):
    """This cut will never be committed; its rows are still marked and the next cut holds them."""

    cause = Cause.ABANDONED


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
class PartReport:
    """What one rank's part brings into the entry."""

    part: Part
    tables: tuple[TableSchema, ...]
    encodings: tuple[str, ...]
    rows: int
    raw_bytes: int
    stall_s: float
    directive: str = ""
    """Rank 0's counts, as do its fingerprint and metadata where ranks differ."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The cut is in the log."""

    seq: int
    entry: Checkpoint
    by_us: bool
    """This rank created the entry (or found it had, after a lost acknowledgement)."""


def commit_part(
    log: RunLog,
    *,
    attempt: int,
    cut: int,
    step: int,
    world_size: int,
    token: str,
    report: PartReport,
    deadline_s: float = COMMIT_DEADLINE_S,
) -> Committed:
    """Commit this rank's part, whose packs and index are durable; returns when the cut is in the log.

    `token` is the process's own. Raises `FencedError`, `Abandoned`, `PartsMissing` past the deadline,
    `AppendUnknown` or `StoreUnavailable` when the store does not answer until then, `LogStopped`, `LogGap`.
    """
    patience = log.patience(deadline_s)
    commit = _Commit(log, attempt, cut, step, world_size)
    if world_size == 1:
        crash_point("commit.after_list")
        return commit.create([report], patience)
    _put_report(log, commit.document(report), token, report.part, patience)
    while True:
        try:
            if done := commit.settled(log.refresh(deadline_s=patience.left_s)):
                return done
            reports = commit.reports()
        except StoreUnavailable:
            if not patience.pause():
                raise
            continue
        crash_point("commit.after_list")
        if len(reports) == world_size:
            return commit.create([reports[rank] for rank in range(world_size)], patience)
        if not patience.pause():
            raise PartsMissing(sorted(set(range(world_size)) - reports.keys()), commit.where)


class _Commit:
    """One rank's work on one cut."""

    def __init__(self, log: RunLog, attempt: int, cut: int, step: int, world_size: int) -> None:
        self.log = log
        self.attempt = attempt
        self.cut = cut
        self.step = step
        self.world_size = world_size
        self.prefix = cut_prefix(attempt, cut)
        self.where = f"run {log.run}, attempt {attempt}, cut {cut}"
        self._read: dict[str, PartReport] = {}

    def settled(self, state: RunState) -> Committed | None:
        """What the log says of this cut already; raises `FencedError` or `Abandoned`."""
        if entry := state.commit_of(self.attempt, self.cut):
            return Committed(seq=entry.seq, entry=entry, by_us=False)
        # IMPORTANT: fencing is this comparison, made against the very state whose next slot is being won.
        if fenced := fencing(state, self.attempt):
            raise fenced
        opened = state.attempts.get(self.attempt)
        if opened is not None and opened.last_cut is not None and self.cut <= opened.last_cut:
            raise Abandoned(f"cut {opened.last_cut} was committed before cut {self.cut}", where=self.where)
        return None

    def create(self, reports: Sequence[PartReport], patience: Patience) -> Committed:
        """Create the entry, or find that a peer did."""
        found: list[Committed] = []

        # IMPORTANT: nothing is visible before this entry, and everything it names is durable before it is put: packs,
        # then index, then report, then (whoever sees all of them) the entry. A death in between leaves garbage only.
        def build(state: RunState, seq: int, writer: str) -> Entry | None:
            if done := self.settled(state):
                found[:] = [done]
                return None
            return self.entry(reports, seq, writer)

        try:
            sealed = self.log.append(
                build,
                before="commit.before_log_put",
                after="commit.after_log_put",
                deadline_s=patience.left_s,
            )
        except EntryRefused as error:
            raise Abandoned(f"the log refuses it: {error.what}", where=self.where) from error
        if sealed is None:
            return found[0]
        assert isinstance(sealed.entry, Checkpoint)
        return Committed(seq=sealed.entry.seq, entry=sealed.entry, by_us=True)

    def entry(self, reports: Sequence[PartReport], seq: int, writer: str) -> Checkpoint:
        """The entry all these reports make; raises `Abandoned` when they contradict one another."""
        tables: dict[str, TableSchema] = {}
        for report in reports:
            for table in report.tables:
                if tables.setdefault(table.fqn, table) != table:
                    raise Abandoned(f"ranks disagree about table {table.fqn}", where=self.where)
        first = reports[0]
        return Checkpoint(
            seq=seq,
            previous="",
            writer=writer,
            at_s=0.0,
            attempt=self.attempt,
            cut=self.cut,
            step=self.step,
            parts=tuple(report.part for report in reports),
            tables=tuple(tables[fqn] for fqn in sorted(tables)),
            encodings=tuple(sorted({encoding for report in reports for encoding in report.encodings})),
            rows=sum(report.rows for report in reports),
            raw_bytes=sum(report.raw_bytes for report in reports),
            stored_bytes=sum(report.part.stored_bytes for report in reports),
            stall_s=max(report.stall_s for report in reports),
            directive=first.directive,
            fingerprint=dict(first.fingerprint),
            metadata={name: text for report in reversed(reports) for name, text in report.metadata.items()},
            pins=tuple(sorted({pin for report in reports for pin in report.pins})),
        )

    # Reports

    def document(self, report: PartReport) -> bytes:
        """A report as it is stored."""
        return canonical(
            {
                "format": FORMAT,
                "run": self.log.run,
                "attempt": self.attempt,
                "cut": self.cut,
                "step": self.step,
                "world_size": self.world_size,
                "part": part_document(report.part),
                "tables": [table_document(table) for table in report.tables],
                "encodings": list(report.encodings),
                "rows": report.rows,
                "raw_bytes": report.raw_bytes,
                "stall_s": report.stall_s,
                "directive": report.directive,
                "fingerprint": dict(report.fingerprint),
                "metadata": dict(report.metadata),
                "pins": list(report.pins),
            }
        )

    def reports(self) -> dict[int, PartReport]:
        """The reports that lie in the cut's prefix now, by rank.

        A rank that reported twice (its sidecar died and was restarted in between) has two whole parts: the first by
        name is taken.
        """
        found: dict[int, PartReport] = {}
        for info in self.log.store.list(self.log.key(self.prefix)):
            key = info.key[len(self.log.run) + 1 :]
            match = _REPORT_KEY.fullmatch(key)
            if match is None or int(match[1]) in found or int(match[1]) >= self.world_size:
                continue
            if key not in self._read:
                self._read[key] = self._fetch(key, int(match[1]), match[2])
            found[int(match[1])] = self._read[key]
        return found

    def _fetch(self, key: str, rank: int, digest: str) -> PartReport:
        for _ in range(3):
            try:
                data = self.log.store.get(self.log.key(key))
            except ObjectNotFound:
                raise StoreUnavailable("a listed report is not found", where=key) from None
            if hashlib.sha256(data).hexdigest()[:32] == digest:
                return self._parse(data, key, rank)
        raise StoreUnavailable("a report does not match the hash in its name", where=key)

    def _parse(self, data: bytes, key: str, rank: int) -> PartReport:
        r = Reader(load(data, key), key)
        if r.integer("format") != FORMAT:
            raise UnsupportedVersion("report of another format", where=key, remedy="upgrade deltashard")
        said = (r.text("run"), r.integer("attempt"), r.integer("cut"), r.integer("world_size"))
        if said != (self.log.run, self.attempt, self.cut, self.world_size):
            raise ForeignObject(f"the report is of {said}", where=key)
        if r.integer("step") != self.step:
            # IMPORTANT: one barrier, one step. Ranks that cut at different steps must never make one checkpoint.
            raise Abandoned("ranks cut at different steps", where=self.where)
        report = PartReport(
            part=read_part(r.take("part"), key),
            tables=tuple(read_table(item, key) for item in r.items("tables")),
            encodings=r.texts("encodings"),
            rows=r.integer("rows"),
            raw_bytes=r.integer("raw_bytes"),
            stall_s=r.number("stall_s"),
            directive=r.text("directive"),
            fingerprint=r.mapping("fingerprint"),
            metadata=r.mapping("metadata"),
            pins=r.texts("pins"),
        )
        r.end()
        if report.part.rank != rank or report.part.prefix != self.prefix:
            raise CorruptObject("the report is of another rank or cut than its name", where=key)
        return report


def report_key(part: Part, token: str, data: bytes) -> str:
    """Key of a part's report, relative to the run's root."""
    return f"{part.prefix}{part.rank:05d}-{token}-{hashlib.sha256(data).hexdigest()[:32]}.part"


def _put_report(log: RunLog, data: bytes, token: str, part: Part, patience: Patience) -> None:
    key = log.key(report_key(part, token, data))
    while True:
        try:
            log.store.put_if_absent(key, data)
        except ObjectExists:
            pass  # ours: the name holds our token and the hash of the bytes
        except StoreUnavailable:
            if not patience.pause():
                raise
            continue
        break
