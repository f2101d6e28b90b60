"""Committing a cut without a leader.

Every rank's sidecar uploads its packs and its index, then (with more than one rank) a *report* under the cut's
`part/`. Its name says all that has to agree and to add up: rank, step, layout, covers, rows, bytes, stall, and the
index's hash. Then it lists these names. Whoever sees those of all ranks puts the manifest and creates the log
entry; losing that race to a peer with the same (attempt, cut) is success. Who does not see them all yet waits, polling
the log *and*, after growing delays, listing again: the last rank to finish may have died between its report and the
entry, and then any other must do it. The pod of rank 0 lists at once, the others a moment later: if all goes well, the
pod that finishes last commits, or that of rank 0 when several finish together.

A LIST is what waiting costs. Names are sorted by rank, so a listing begins at the first rank that is missing, and ends
with the page that shows that it still is. And a process remembers how long after their beginnings cuts were committed
(`CommitPace`): until then it looks at the log seldom.

What a report says beside its name (schemas, encodings; rank 0's: time of the cut, directive, metadata, pins) is its
bytes, whose hash is in the report's name. They are the same at every cut but for rank 0's, so `Sayings` remembers them:
in the steady state, and if rank 0's pod does it, a commit gets no object at all. With one rank there is nobody to tell,
and no report.

A rank that gives a cut up says so by an empty object, `{rank}-{token}-failed`. That is advice: who reads it stops
waiting for a part that will not come. The entry alone decides.

Cuts commit in increasing order: a cut that is not newer than one in the log is abandoned, however complete, so its
data is provably dead. A cut whose `covers` is no longer live at its slot is abandoned too, and so is one whose ranks
were at different steps, or keep different layouts. Nothing is lost by that: rows of an abandoned cut are still marked,
and the next cut holds them.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltashard_proto.cause import Cause

from deltashard_checkpoint.backoff import Patience
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import EnvironmentFault, ForeignObject, UnsupportedVersion
from deltashard_checkpoint.format.canonical_json import Reader, canonical, content_digest, load
from deltashard_checkpoint.format.index import all_encodings
from deltashard_checkpoint.format.object_key import TOKEN_PATTERN, cut_prefix, index_key, parse_index_key
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, Entry, Listed, Part
from deltashard_checkpoint.log.entry_codec import (
    box_document,
    encodings_document,
    read_box,
    read_encodings,
    read_table,
    table_document,
)
from deltashard_checkpoint.log.manifest import Manifest, manifest_key
from deltashard_checkpoint.log.part_list import ListedPart
from deltashard_checkpoint.log.replay import EntryRefused
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound, StoreUnavailable
from deltashard_checkpoint.vocabulary import PRECISION_KEY
from deltashard_checkpoint.write.precision import coarsest

FORMAT = 1
"""Of a report."""
COMMIT_DEADLINE_S = 600.0
FOLLOWERS_WAIT_S = 0.25
"""Before a pod without rank 0 looks: of pods that finish together, that of rank 0 commits."""
FOLLOWERS_LIST_AGAIN_FROM = 8
"""Looks of such a pod before it lists reports a second time; any pod lists at looks whose number is a power of two."""
SELDOM_S = 9.0
"""Between looks at the log, at most, while a cut of this kind is not usually committed yet."""
_SOON_S = 2.0
"""When it usually is so soon, looks follow one another as if nothing were known."""
LIST_PAGE = 1000
"""Names that one request of a listing gives, on S3."""
_NUMBER = "(0|[1-9][0-9]{0,18})"
_REPORT = re.compile(
    rf"data/[0-9]{{20}}/[0-9]{{8}}/part/([0-9]{{5}})-({TOKEN_PATTERN})-{_NUMBER}-([0-9a-f]{{32}}|x)-({_NUMBER}|x)-"
    rf"{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}-([0-9a-f]{{32}})-([0-9a-f]{{32}})\.part",
    re.ASCII,
)
_FAILED = re.compile(rf"data/[0-9]{{20}}/[0-9]{{8}}/part/([0-9]{{5}})-({TOKEN_PATTERN})-failed", re.ASCII)


class FencedError(EnvironmentFault):
    """A newer attempt is open: this trainer's run is over, it must neither save nor open an attempt again."""

    cause = Cause.FENCED

    def __init__(
        self, attempt: int, by: int, run: str, *, workload: str = "", pod: str = "", rewound: bool = False
    ) -> None:
        """`workload` or `pod`: UID of what opened the newer attempt, where it is another one; `rewound`: nobody's."""
        self.attempt = attempt
        self.by = by
        self.workload = workload
        super().__init__(
            f"attempt {attempt} is fenced by attempt {by}"
            + (
                ", with which a person rewound the run"
                if rewound
                else f" of another workload ({workload})"
                if workload
                else f" of another pod ({pod})"
                if pod
                else ""
            ),
            where=f"run {run}",
            remedy="end this workload, the other one trains on; restore(takeover=True) takes the run back on purpose"
            if workload
            else "end this process; a new one goes on from where the run was rewound to"
            if rewound
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
    return FencedError(
        attempt, state.attempt, state.run, rewound=state.attempts[state.attempt].world_size == 0
    )


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


class GivenUp(Abandoned):
    """Some rank said that it gave this cut up: its part will not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What one rank's part brings into the entry."""

    part: Part
    tables: tuple[TableSchema, ...]
    encodings: Mapping[str, tuple[str, ...]]
    rows: int
    raw_bytes: int
    stall_s: float
    cut_at_s: float = 0.0
    """Rank 0's counts, as do its directive, its fingerprint, and its metadata where ranks differ."""
    directive: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    common_blobs: bool = True
    """Whether the part may hold blobs for all ranks: where it does not, no other rank reads its index for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The cut is in the log."""

    seq: int
    entry: Checkpoint
    by_us: bool
    """This process created the entry (or found it had, after a lost acknowledgement)."""


class CommitPace:
    """How long after its beginning a cut was committed the last time, per kind (baseline or not); of one run.

    What ranks upload differs little from cut to cut, so the slowest needs about as long as it did. A wrong guess is no
    harm: whoever finishes last looks at once and commits, the others hear of it `SELDOM_S` later at most.
    """

    def __init__(self) -> None:
        self._usual_s: dict[bool, float] = {}  # each value is replaced as a whole: no lock

    def usual_s(self, baseline: bool) -> float:
        """Seconds from the beginning of a cut to its entry; 0 when none was seen yet."""
        return self._usual_s.get(baseline, 0.0)

    def learn(self, baseline: bool, seconds: float) -> None:
        self._usual_s[baseline] = seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a report says beside its name."""

    tables: tuple[TableSchema, ...]
    encodings: Mapping[str, tuple[str, ...]]
    boxes: tuple[Box, ...]
    """Without a layout only: with one they stand there."""
    cut_at_s: float
    directive: str
    fingerprint: Mapping[str, str]
    metadata: Mapping[str, str]
    pins: tuple[str, ...]
    common_blobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A report, as its name has it."""

    key: str
    rank: int
    token: str
    step: int
    layout: str
    covers: int | None
    rows: int
    raw_bytes: int
    stored_bytes: int
    stall_ms: int
    xxh3: str
    says: str


class Sayings:
    """Bytes of reports by their hash, as far as this process has read or written them; for all cuts of one run."""

    def __init__(self, *, at_most: int = 1 << 14) -> None:
        self._lock = threading.Lock()
        self._at_most = at_most
        self._held: dict[str, _Said] = {}

    def get(self, digest: str) -> _Said | None:
        """What has this hash; None: not known here."""
        with self._lock:
            return self._held.get(digest)

    def put(self, digest: str, said: _Said) -> None:
        """Remember it; the oldest goes when there are too many."""
        with self._lock:
            self._held[digest] = said
            while len(self._held) > self._at_most:
                del self._held[next(iter(self._held))]


def commit_part(  # noqa: PLR0913
    log: RunLog,
    *,
    attempt: int,
    cut: int,
    step: int,
    world_size: int,
    report: PartReport,
    layout: str = "",
    sayings: Sayings | None = None,
    deadline_s: float = COMMIT_DEADLINE_S,
) -> Committed:
    """Commit this rank's part, see `commit_parts`."""
    return commit_parts(
        log,
        attempt=attempt,
        cut=cut,
        step=step,
        world_size=world_size,
        reports=(report,),
        layout=layout,
        sayings=sayings,
        deadline_s=deadline_s,
    )


def commit_parts(  # noqa: PLR0913
    log: RunLog,
    *,
    attempt: int,
    cut: int,
    step: int,
    world_size: int,
    reports: Sequence[PartReport],
    layout: str = "",
    sayings: Sayings | None = None,
    pace: CommitPace | None = None,
    since_s: float = 0.0,
    deadline_s: float = COMMIT_DEADLINE_S,
) -> Committed:
    """Commit the parts of this process's ranks, whose packs and indexes are durable; returns when the cut is logged.

    `layout` is the digest of the attempt's layout, empty where the parts say their boxes themselves. The cut began
    `since_s` ago, at one step and so nearly at one time on all ranks; `pace` remembers how long cuts take; None: this
    one is looked for often, because somebody waits for it.

    Raises `FencedError`, `Abandoned` (`GivenUp`), `PartsMissing` past the deadline, `AppendUnknown` or
    `StoreUnavailable` when the store does not answer until then, `LogStopped`, `LogGap` (`LogRemoved`).
    """
    patience = log.patience(deadline_s)
    commit = _Commit(log, attempt, cut, step, world_size, layout, sayings or Sayings())
    if world_size == 1 and not layout:
        crash_point("commit.after_list")
        return commit.create_alone(reports[0], patience)
    waiting = _Waiting(
        patience,
        pace or CommitPace(),
        leads=any(report.part.rank == 0 for report in reports),
        baseline=all(report.part.covers is None for report in reports),
        since_s=since_s,
    )
    crash_point("report.before_put")
    for report in reports:
        _put(log, *commit.document(report), patience)
        crash_point("report.after_put")
    done = _agreed(log, commit, waiting, patience)
    waiting.over(log.clocks.wall_s() - done.entry.at_s)
    return done


def _agreed(log: RunLog, commit: _Commit, waiting: _Waiting, patience: Patience) -> Committed:
    """The commit of a cut whose reports of this process are there, by whoever makes it."""
    waiting.begin()
    while True:
        try:
            if done := commit.settled(log.refresh(deadline_s=patience.left_s)):
                return done
            try:
                missing = commit.missing() if (lists := waiting.lists()) else ()
                if lists and not missing:
                    crash_point("commit.after_list")
                    return commit.create(patience)
            except Abandoned:
                # It may be in the log all the same: of a rank that reported twice, or gave up and then came, a peer
                # may have seen the one and not the other.
                if done := commit.settled(log.refresh(deadline_s=patience.left_s)):
                    return done
                raise
        except StoreUnavailable:
            if not patience.pause():
                raise
            continue
        if lists and not patience.left_s:
            raise PartsMissing(missing, commit.where)
        waiting.pause()


class _Waiting:
    """When one process looks again for the commit of one cut, and lists reports."""

    def __init__(
        self, patience: Patience, pace: CommitPace, *, leads: bool, baseline: bool, since_s: float
    ) -> None:
        self._patience = patience
        self._pace = pace
        # A little late: it is not a second later than usual, as a rule, and pods must not ask in step.
        usual_s = pace.usual_s(baseline)
        self._expected_s = usual_s * (1 + (1 + patience.clocks.uniform()) / 32)
        first_s = max(patience.backoff.first_s, usual_s / 32)  # how much later still is not known
        patience.backoff = replace(patience.backoff, first_s=first_s)
        self._leads = leads
        self._baseline = baseline
        self._since_s = since_s - patience.spent_s
        self._looks = 0
        self._missed_s = 0.0
        """Of the cut, when it was looked for last and not there yet."""
        self._seldom = False

    @property
    def _now_s(self) -> float:
        return self._since_s + self._patience.spent_s

    def begin(self) -> None:
        """Before the first look."""
        if not self._leads:
            self._patience.rest(FOLLOWERS_WAIT_S * (0.5 + 0.5 * self._patience.clocks.uniform()))

    def lists(self) -> bool:
        """Whether this look, which did not find the entry, lists reports."""
        self._missed_s = self._now_s
        if not self._patience.left_s:
            return True
        if self._seldom:
            return False
        self._looks += 1
        again = self._leads or self._looks >= FOLLOWERS_LIST_AGAIN_FROM
        return self._looks == 1 or (again and self._looks & (self._looks - 1) == 0)

    def pause(self) -> None:
        """Until the next look: when the cut is usually committed, in case that lies far ahead."""
        ahead_s = self._expected_s - self._now_s
        rests = math.ceil(ahead_s / SELDOM_S) if ahead_s > _SOON_S else 0
        self._seldom = rests > 1
        if rests:
            self._patience.rest(ahead_s / rests)
        else:
            self._patience.pause()

    def over(self, ago_s: float) -> None:
        """The entry was made `ago_s` ago, by two clocks that may disagree: it was after the last look without it."""
        self._pace.learn(self._baseline, min(self._now_s, max(self._missed_s, self._now_s - ago_s)))


def give_up(log: RunLog, *, attempt: int, cut: int, rank: int, token: str, deadline_s: float) -> None:
    """Say that this rank's part of a cut will not come, so that no peer waits for it. Best effort, and only advice.

    Raises `StoreUnavailable` past the deadline.
    """
    key = f"{cut_prefix(attempt, cut)}part/{rank:05d}-{token}-failed"
    _put(log, key, b"", log.patience(deadline_s))


class _Commit:
    """One process's work on one cut."""

    def __init__(
        self,
        log: RunLog,
        attempt: int,
        cut: int,
        step: int,
        world_size: int,
        layout: str,
        sayings: Sayings,
    ) -> None:
        self.log = log
        self.attempt = attempt
        self.cut = cut
        self.step = step
        self.world_size = world_size
        self.layout = layout
        self.sayings = sayings
        self.prefix = cut_prefix(attempt, cut)
        self._found: dict[int, _Named] = {}
        """Reports that were seen, by rank: each tells of a whole part, so it counts from then on."""
        self._first_missing = 0
        self.where = f"run {log.run}, attempt {attempt}, cut {cut}"

    def settled(self, state: RunState) -> Committed | None:
        """What the log says of this cut already; raises `FencedError`, `Abandoned`, or, of no log, `LogRemoved`."""
        if state.tip < 0:  # this attempt was opened in it
            raise self.log.removed()
        if entry := state.commit_of(self.attempt, self.cut):
            return Committed(seq=entry.seq, entry=entry, by_us=False)
        # IMPORTANT: fencing is this comparison, made against the very state whose next slot is being won.
        if fenced := fencing(state, self.attempt):
            raise fenced
        opened = state.attempts.get(self.attempt)
        if opened is not None and opened.last_cut is not None and self.cut <= opened.last_cut:
            raise Abandoned(f"cut {opened.last_cut} was committed before cut {self.cut}", where=self.where)
        return None

    def create_alone(self, report: PartReport, patience: Patience) -> Committed:
        """Create the entry of a cut that has one part, and no layout."""
        # IMPORTANT: nothing is visible before this entry, and everything it names is durable before it is put: packs,
        # then index, then (with more than one rank) report and manifest, then the entry. A death in between leaves
        # garbage only.
        return self._append(lambda seq, writer: self.entry_alone(report, seq, writer), patience)

    def entry_alone(self, report: PartReport, seq: int, writer: str) -> Checkpoint:
        """The entry of a cut that has one part, and no layout."""
        return Checkpoint(
            seq=seq,
            previous="",
            writer=writer,
            at_s=0.0,
            attempt=self.attempt,
            cut=self.cut,
            step=self.step,
            parts=(report.part,),
            tables=tuple(sorted(report.tables, key=lambda table: table.fqn)),
            encodings=report.encodings,
            rows=report.rows,
            raw_bytes=report.raw_bytes,
            stored_bytes=report.part.stored_bytes,
            stall_s=report.stall_s,
            cut_at_s=report.cut_at_s,
            directive=report.directive,
            fingerprint=dict(report.fingerprint),
            metadata=dict(report.metadata),
            pins=tuple(sorted(report.pins)),
        )

    def create(self, patience: Patience) -> Committed:
        """Create the entry of the parts that the reports tell of, all of which were seen, or find that a peer did."""
        reports = [self._found[rank] for rank in range(self.world_size)]
        said = [self._said(report) for report in reports]
        # Most ranks say the same: each saying counts once, at the lowest rank that says it.
        sayings = list({report.says: each for report, each in zip(reports, said, strict=True)}.values())
        tables: dict[str, TableSchema] = {}
        for each in sayings:
            for table in each.tables:
                if tables.setdefault(table.fqn, table) != table:
                    raise Abandoned(f"ranks disagree about table {table.fqn}", where=self.where)
        parts: tuple[Part, ...] = ()
        listed: Listed | None = None
        if self.layout:
            manifest = Manifest(
                run=self.log.run,
                attempt=self.attempt,
                cut=self.cut,
                step=self.step,
                layout=self.layout,
                parts=tuple(
                    ListedPart(
                        token=r.token,
                        xxh3=r.xxh3,
                        covers=r.covers,
                        rows=r.rows,
                        stored_bytes=r.stored_bytes,
                        common_blobs=each.common_blobs,
                    )
                    for r, each in zip(reports, said, strict=True)
                ),
            )
            listed = manifest.listed
            crash_point("manifest.before_put")
            _put(self.log, manifest_key(self.attempt, self.cut, listed.manifest), manifest.data, patience)
            crash_point("manifest.after_put")
        else:
            parts = tuple(
                Part(
                    rank=r.rank,
                    index_key=index_key(
                        attempt=self.attempt, cut=self.cut, rank=r.rank, token=r.token, xxh3=r.xxh3
                    ),
                    boxes=each.boxes,
                    stored_bytes=r.stored_bytes,
                    covers=r.covers,
                )
                for r, each in zip(reports, said, strict=True)
            )
        first = said[0]
        return self._append(
            lambda seq, writer: Checkpoint(
                seq=seq,
                previous="",
                writer=writer,
                at_s=0.0,
                attempt=self.attempt,
                cut=self.cut,
                step=self.step,
                parts=parts,
                listed=listed,
                tables=tuple(tables[fqn] for fqn in sorted(tables)),
                encodings=all_encodings(each.encodings for each in sayings),
                rows=sum(r.rows for r in reports),
                raw_bytes=sum(r.raw_bytes for r in reports),
                stored_bytes=sum(r.stored_bytes for r in reports),
                stall_s=max(r.stall_ms for r in reports) / 1000,
                cut_at_s=first.cut_at_s,
                directive=first.directive,
                fingerprint=dict(first.fingerprint),
                metadata=_merged([said.metadata for said in sayings]),
                pins=tuple(sorted({pin for each in sayings for pin in each.pins})),
            ),
            patience,
        )

    def _append(self, entry: Callable[[int, str], Checkpoint], patience: Patience) -> Committed:
        found: list[Committed] = []

        def build(state: RunState, seq: int, writer: str) -> Entry | None:
            if done := self.settled(state):
                found[:] = [done]
                return None
            return entry(seq, writer)

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

    # Reports

    def document(self, report: PartReport) -> tuple[str, bytes]:
        """Key (relative to the run's root) and bytes of a report."""
        part, index = report.part, parse_index_key(report.part.index_key)
        said = _Said(
            tables=report.tables,
            encodings=report.encodings,
            boxes=() if self.layout else part.boxes,
            cut_at_s=report.cut_at_s if part.rank == 0 else 0,
            directive=report.directive if part.rank == 0 else "",
            fingerprint=report.fingerprint if part.rank == 0 else {},
            metadata=report.metadata,
            pins=report.pins,
            common_blobs=report.common_blobs,
        )
        data = canonical(
            {
                "format": FORMAT,
                "run": self.log.run,
                "world_size": self.world_size,
                "tables": [table_document(table) for table in said.tables],
                "encodings": encodings_document(said.encodings),
                "boxes": [box_document(box) for box in said.boxes],
                "cut_at_s": said.cut_at_s,
                "directive": said.directive,
                "fingerprint": dict(said.fingerprint),
                "metadata": dict(said.metadata),
                "pins": list(said.pins),
                "blobs": said.common_blobs,
            }
        )
        digest = content_digest(data)
        self.sayings.put(digest, said)
        numbers = (report.rows, report.raw_bytes, part.stored_bytes, round(report.stall_s * 1000))
        name = "-".join(
            (
                f"{part.rank:05d}",
                index.token,
                str(self.step),
                self.layout or "x",
                "x" if part.covers is None else str(part.covers),
                *map(str, numbers),
                index.xxh3,
                digest,
            )
        )
        return f"{self.prefix}part/{name}.part", data

    def missing(self) -> Sequence[int]:
        """Look for reports in the cut's prefix; the ranks of which none was seen.

        From the first missing rank on, whose name sorts before those of later ranks, and no further than the page that
        shows that it is still missing (the first, for all waits for it): a look that is too early is one request.
        A rank that reported twice (its sidecar died and was restarted in between) has two whole parts: the one that was
        seen first is taken, of those the first by name. Raises `Abandoned` when ranks cut at different steps or keep
        different layouts, and `GivenUp`.
        """
        failed: set[int] = set()
        # IMPORTANT: not after the names that were seen, but before those of the first rank that was not: a report may
        # appear in between at any time.
        first = self.log.key(f"{self.prefix}part/{self._first_missing:05d}")
        for count, info in enumerate(
            self.log.store.list(self.log.key(f"{self.prefix}part/"), start_after=first), 1
        ):
            key = info.key[len(self.log.run) + 1 :]
            rank = self._see(key, failed)
            if rank is not None and count % LIST_PAGE == 0 and rank > self._advance():
                failed.discard(rank)  # its report may be the next name
                break
        self._advance()
        if given_up := sorted(failed - self._found.keys()):
            raise GivenUp(f"rank {given_up[0]} gave this cut up", where=self.where)
        return [rank for rank in range(self._first_missing, self.world_size) if rank not in self._found]

    def _advance(self) -> int:
        """The first rank whose report was not seen."""
        while self._first_missing in self._found:
            self._first_missing += 1
        return self._first_missing

    def _see(self, key: str, failed: set[int]) -> int | None:
        """Take note of a name under `part/`; the rank that it is of, None for what is no rank's."""
        if (gone := _FAILED.fullmatch(key)) is not None:
            failed.add(rank := int(gone[1]))
            return rank
        named = _named(key)
        if named is None or named.rank >= self.world_size:
            return None
        if named.rank in self._found:
            return named.rank
        # IMPORTANT: one cut, one step, one layout. Ranks that cut at different steps never make one checkpoint.
        if named.step != self.step:
            raise Abandoned(
                f"rank {named.rank} cut at step {named.step}, this one at step {self.step}",
                where=self.where,
            )
        if named.layout != self.layout:
            raise Abandoned(f"rank {named.rank} keeps another layout", where=self.where)
        self._found[named.rank] = named
        return named.rank

    def _said(self, report: _Named) -> _Said:
        """What a report says beside its name, read once in this process."""
        known = self.sayings.get(report.says)
        if known is not None:
            return known
        for _ in range(3):
            try:
                data = self.log.store.get(self.log.key(report.key))
            except ObjectNotFound:
                raise StoreUnavailable("a listed report is not found", where=report.key) from None
            if content_digest(data) == report.says:
                said = self._parse(data, report.key)
                self.sayings.put(report.says, said)
                return said
        raise StoreUnavailable("a report does not match the hash in its name", where=report.key)

    def _parse(self, data: bytes, key: str) -> _Said:
        r = Reader(load(data, key), key)
        if r.integer("format") != FORMAT:
            raise UnsupportedVersion("report of another format", where=key, remedy="upgrade deltashard")
        said = (r.text("run"), r.integer("world_size"))
        if said != (self.log.run, self.world_size):
            raise ForeignObject(f"the report is of {said}", where=key)
        found = _Said(
            tables=tuple(read_table(item, key) for item in r.items("tables")),
            encodings=read_encodings(r),
            boxes=tuple(read_box(r, item) for item in r.items("boxes")),
            cut_at_s=r.number("cut_at_s"),
            directive=r.text("directive"),
            fingerprint=r.mapping("fingerprint"),
            metadata=r.mapping("metadata"),
            pins=r.texts("pins"),
            common_blobs=r.boolean("blobs"),
        )
        r.end()
        return found


def _named(key: str) -> _Named | None:
    """The report that `key` names; None for any other object."""
    match = _REPORT.fullmatch(key)
    if match is None:
        return None
    rank, token, step, layout, covers, _, rows, raw_bytes, stored_bytes, stall_ms, xxh3, says = match.groups()
    return _Named(
        key=key,
        rank=int(rank),
        token=token,
        step=int(step),
        layout="" if layout == "x" else layout,
        covers=None if covers == "x" else int(covers),
        rows=int(rows),
        raw_bytes=int(raw_bytes),
        stored_bytes=int(stored_bytes),
        stall_ms=int(stall_ms),
        xxh3=xxh3,
        says=says,
    )


def _put(log: RunLog, key: str, data: bytes, patience: Patience) -> None:
    """Put an object that is ours, or equal, if it is there already: its name holds our token or its hash."""
    while True:
        try:
            log.store.put_if_absent(log.key(key), data)
        except ObjectExists:
            pass
        except StoreUnavailable:
            if not patience.pause():
                raise
            continue
        break


def _merged(said: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Metadata of all ranks, rank 0 first: its counts where they differ, but for the bits that rows have at least."""
    merged = {name: text for each in reversed(said) for name, text in each.items()}
    if (least := coarsest(each[PRECISION_KEY] for each in said if PRECISION_KEY in each)) is not None:
        merged[PRECISION_KEY] = least.text()
    return merged
