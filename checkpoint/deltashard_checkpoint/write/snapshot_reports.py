"""The ranks' reports of one snapshot, under its `part/`: put, listed, and read if their bodies are not cached.

Waiting costs LIST requests. Names sort by rank, so a listing starts at the first missing rank and stops at the page
that shows that the rank is still missing.

A rank that abandons its part puts an empty object, `{rank}-{token}-failed`. This is advice: readers stop waiting for
the part. Only the log's entry decides.
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
"""Names per page of an S3 listing."""
_FAILED = re.compile(rf"([0-9]{{5}})-({TOKEN_PATTERN})-failed", re.ASCII)


class SnapshotAbandoned(EnvironmentFault):
    """This snapshot will never be committed; its rows stay marked and the next snapshot holds them."""

    cause = Cause.ABANDONED


class PartAbandoned(SnapshotAbandoned):
    """A rank abandoned its part of this snapshot."""


class SnapshotReports:
    """Reports of one snapshot, as seen by one process."""

    def __init__(
        self,
        log: RunLog,
        *,
        attempt: int,
        snapshot_id: int,
        step: int,
        world_size: int,
        layout: str,
        bodies: ReportBodyCache,
    ) -> None:
        """`layout` is the digest of the attempt's layout; empty if there is none."""
        self.log = log
        self.attempt = attempt
        self.snapshot_id = snapshot_id
        self.step = step
        self.world_size = world_size
        self.layout = layout
        self.where = f"run {log.run}, attempt {attempt}, snapshot {snapshot_id}"
        self._prefix = f"{snapshot_prefix(attempt, snapshot_id)}part/"
        self._bodies = bodies
        self._own: dict[str, ReportBody] = {}
        """Bodies of this process's reports; other ranks often report equal ones."""
        self._found: dict[int, ReportName] = {}
        """Reports by rank. Each describes a complete part, so the first one seen counts."""
        self._first_missing = 0

    def put(self, report: PartReport, retry_budget: RetryBudget) -> None:
        body = ReportBody.of(report, layout=self.layout)
        data = body.encode(self.log.run, self.world_size)
        name = self._report_name(report, body, content_digest(data))
        put_idempotent(self.log, f"{self._prefix}{name.text}", data, retry_budget)

    def add(self, report: PartReport) -> None:
        """Add the only report of a single-rank snapshot; it needs no hash, because no other process reads it."""
        name = self._report_name(report, ReportBody.of(report, layout=self.layout), "")
        self._found[name.rank] = name

    def _report_name(self, report: PartReport, body: ReportBody, digest: str) -> ReportName:
        self._own[digest] = body
        return ReportName.of(report, step=self.step, layout=self.layout, body=digest)

    def all(self) -> list[tuple[ReportName, ReportBody]]:
        """Return all reports, by rank; raises `StoreUnavailable` and the errors of `ReportBody.decode`."""
        return [(name, self._body(name)) for name in (self._found[rank] for rank in range(self.world_size))]

    def missing(self) -> Sequence[int]:
        """List reports; return the ranks without one.

        The listing starts at the first missing rank, whose name sorts before those of later ranks, and stops at the
        page that shows that it is still missing, so an early poll costs one request. If a rank reported twice because
        its sidecar restarted, both parts are complete, and the one seen first is used, or the first by name. Raises
        `SnapshotAbandoned` if ranks have different steps or layouts, and `PartAbandoned`.
        """
        failed: set[int] = set()
        # IMPORTANT: start before the names of the first missing rank, not after the names already seen: a report may
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
            raise PartAbandoned(f"rank {abandoned[0]} abandoned this snapshot", where=self.where)
        return [rank for rank in range(self._first_missing, self.world_size) if rank not in self._found]

    def _advance(self) -> int:
        """Return the first rank without a report."""
        while self._first_missing in self._found:
            self._first_missing += 1
        return self._first_missing

    def _record_name(self, text: str, failed: set[int]) -> int | None:
        """Record a name under `part/`; return its rank, or None if it is not a rank's."""
        if (gone := _FAILED.fullmatch(text)) is not None:
            failed.add(rank := int(gone[1]))
            return rank
        name = parse_report_name(text)
        if name is None or name.rank >= self.world_size:
            return None
        if name.rank in self._found:
            return name.rank
        # IMPORTANT: one snapshot, one step, one layout. Ranks at different steps never form one checkpoint.
        if name.step != self.step:
            raise SnapshotAbandoned(
                f"rank {name.rank} is at step {name.step}, this one at step {self.step}", where=self.where
            )
        if name.layout != self.layout:
            raise SnapshotAbandoned(f"rank {name.rank} has another layout", where=self.where)
        self._found[name.rank] = name
        return name.rank

    def _body(self, name: ReportName) -> ReportBody:
        """Return the body, read once per process; rank 0's differs in every snapshot and is not cached."""
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


def abandon_part(
    log: RunLog, *, attempt: int, snapshot_id: int, rank: int, token: str, deadline_s: float
) -> None:
    """Mark this rank's part of a snapshot as abandoned, so that peers stop waiting for it. Only advice.

    Raises `StoreUnavailable` past the deadline.
    """
    key = f"{snapshot_prefix(attempt, snapshot_id)}part/{rank:05d}-{token}-failed"
    put_idempotent(log, key, b"", log.retry_budget(deadline_s))


def put_idempotent(log: RunLog, key: str, data: bytes, retry_budget: RetryBudget) -> None:
    """Put an object unless it exists; an existing one is ours or equal, because its name has our token or its hash."""
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
