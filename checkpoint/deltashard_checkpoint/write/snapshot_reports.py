"""The reports of one cut's ranks, under its `part/`: put, seen by listing, read where their bodies are not known yet.

A LIST is what waiting costs. Names are sorted by rank, so a listing begins at the first rank that is missing, and ends
with the page that shows that it still is.

A rank that abandons its part puts an empty object, `{rank}-{token}-failed`. That is advice: who reads it stops waiting
for a part that will not come. The log's entry alone decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deltashard_proto.cause import Cause

from deltashard_checkpoint.backoff import RetryBudget
from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.format.canonical_json import content_digest
from deltashard_checkpoint.format.object_key import TOKEN_PATTERN, snapshot_prefix
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectNotFound, StoreUnavailable
from deltashard_checkpoint.write.report import (
    PartReport,
    ReportBody,
    ReportBodyCache,
    ReportName,
    parse_report_name,
)

LIST_PAGE = 1000
"""Names that one request of a listing gives, on S3."""
_FAILED = re.compile(rf"([0-9]{{5}})-({TOKEN_PATTERN})-failed", re.ASCII)


class SnapshotAbandoned(EnvironmentFault):
    """This cut will never be committed; its rows are still marked and the next cut holds them."""

    cause = Cause.ABANDONED


class PartAbandoned(SnapshotAbandoned):
    """Some rank abandoned its part of this cut: it will not come."""


class SnapshotReports:
    """Reports of one cut, as one process sees them."""

    def __init__(
        self,
        log: RunLog,
        *,
        attempt: int,
        cut: int,
        step: int,
        world_size: int,
        layout: str,
        bodies: ReportBodyCache,
    ) -> None:
        """`layout` is the digest of the attempt's layout; empty: none."""
        self.log = log
        self.attempt = attempt
        self.cut = cut
        self.step = step
        self.world_size = world_size
        self.layout = layout
        self.where = f"run {log.run}, attempt {attempt}, cut {cut}"
        self._prefix = f"{snapshot_prefix(attempt, cut)}part/"
        self._bodies = bodies
        self._own: dict[str, ReportBody] = {}
        """Bodies that are this process's; what another rank reports is often the same."""
        self._found: dict[int, ReportName] = {}
        """By rank; each is of a whole part, so it counts from when it was seen."""
        self._first_missing = 0

    def put(self, report: PartReport, retry_budget: RetryBudget) -> None:
        body = ReportBody.of(report, layout=self.layout)
        data = body.encode(self.log.run, self.world_size)
        name = self._report_name(report, body, content_digest(data))
        put_idempotent(self.log, f"{self._prefix}{name.text}", data, retry_budget)

    def add(self, report: PartReport) -> None:
        """Count the only report of a cut, which no other process has to see: it needs no bytes, and so no hash."""
        name = self._report_name(report, ReportBody.of(report, layout=self.layout), "")
        self._found[name.rank] = name

    def _report_name(self, report: PartReport, body: ReportBody, digest: str) -> ReportName:
        self._own[digest] = body
        return ReportName.of(report, step=self.step, layout=self.layout, body=digest)

    def all(self) -> list[tuple[ReportName, ReportBody]]:
        """By rank, once none is missing. Raises `StoreUnavailable` and what `ReportBody.decode` raises."""
        return [(name, self._body(name)) for name in (self._found[rank] for rank in range(self.world_size))]

    def missing(self) -> Sequence[int]:
        """List reports; the ranks of which none was seen.

        From the first missing rank on, whose name sorts before those of later ranks, and no further than the page that
        shows that it is still missing (the first, for all waits for it): a look that is too early is one request.
        A rank that reported twice (its sidecar died and was restarted in between) has two whole parts: the one that was
        seen first is taken, of those the first by name. Raises `SnapshotAbandoned` when ranks cut at different steps or keep
        different layouts, and `PartAbandoned`.
        """
        failed: set[int] = set()
        # IMPORTANT: not after the names that were seen, but before those of the first rank that was not: a report may
        # appear in between at any time.
        prefix = self.log.key(self._prefix)
        first = f"{prefix}{self._first_missing:05d}"
        for count, info in enumerate(self.log.store.list(prefix, start_after=first), 1):
            rank = self._record_name(info.key[len(prefix) :], failed)
            if rank is not None and count % LIST_PAGE == 0 and rank > self._advance():
                failed.discard(rank)  # its report may be the next name
                break
        self._advance()
        if abandoned := sorted(failed - self._found.keys()):
            raise PartAbandoned(f"rank {abandoned[0]} gave this cut up", where=self.where)
        return [rank for rank in range(self._first_missing, self.world_size) if rank not in self._found]

    def _advance(self) -> int:
        """The first rank whose report was not seen."""
        while self._first_missing in self._found:
            self._first_missing += 1
        return self._first_missing

    def _record_name(self, text: str, failed: set[int]) -> int | None:
        """Take note of a name under `part/`; the rank that it is of, None for what is no rank's."""
        if (gone := _FAILED.fullmatch(text)) is not None:
            failed.add(rank := int(gone[1]))
            return rank
        name = parse_report_name(text)
        if name is None or name.rank >= self.world_size:
            return None
        if name.rank in self._found:
            return name.rank
        # IMPORTANT: one cut, one step, one layout. Ranks that cut at different steps never make one checkpoint.
        if name.step != self.step:
            raise SnapshotAbandoned(
                f"rank {name.rank} cut at step {name.step}, this one at step {self.step}", where=self.where
            )
        if name.layout != self.layout:
            raise SnapshotAbandoned(f"rank {name.rank} keeps another layout", where=self.where)
        self._found[name.rank] = name
        return name.rank

    def _body(self, name: ReportName) -> ReportBody:
        """Read once in this process; rank 0's is another at every cut, and not kept."""
        if (known := self._own.get(name.body) or self._bodies.get(name.body)) is not None:
            return known
        key = f"{self._prefix}{name.text}"
        for _ in range(3):
            try:
                data = self.log.store.get(self.log.key(key))
            except ObjectNotFound:
                raise StoreUnavailable("a listed report is not found", where=key) from None
            if content_digest(data) == name.body:
                body = ReportBody.decode(data, self.log.run, self.world_size, where=key)
                if name.rank:
                    self._bodies.put(name.body, body)
                return body
        raise StoreUnavailable("a report does not match the hash in its name", where=key)


def abandon_part(log: RunLog, *, attempt: int, cut: int, rank: int, token: str, deadline_s: float) -> None:
    """Tell peers that this rank's part of a cut will not come, so that none waits for it. Only advice.

    Raises `StoreUnavailable` past the deadline.
    """
    key = f"{snapshot_prefix(attempt, cut)}part/{rank:05d}-{token}-failed"
    put_idempotent(log, key, b"", log.retry_budget(deadline_s))


def put_idempotent(log: RunLog, key: str, data: bytes, retry_budget: RetryBudget) -> None:
    """Put an object that is ours, or equal, if it is there already: its name holds our token or its hash."""
    while True:
        try:
            log.store.put_if_absent(log.key(key), data)
        except ObjectExists:
            pass
        except StoreUnavailable:
            if not retry_budget.pause():
                raise
            continue
        break
