"""Joint commit of a snapshot's parts from the ranks of one pod: a single call, when the last part is durable.

Each rank's save ends on its own thread, which calls `commit` with its report. The last one commits, and all others wait
for its outcome. A rank whose save fails abandons it for the other ranks of its pod, and for other pods
(`abandon_part`). Until then none of the pod's parts was reported, so no peer can have committed them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from deltashard_checkpoint.write.commit import Committed, PartsMissing
from deltashard_checkpoint.write.report import PartReport
from deltashard_checkpoint.write.snapshot_reports import PartAbandoned

RECHECK_S = 0.2
"""Time between checks of the expected ranks: one may die without a notification."""

Commit = Callable[[Sequence[PartReport]], Committed]


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingCommit:
    """Reports and outcome of one snapshot in one pod."""

    reports: dict[int, PartReport] = field(default_factory=dict)
    committing: bool = False
    outcome: Committed | Exception | None = None

    def result(self) -> Committed:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class JointCommits:
    """Collects the reports of a pod's ranks, by attempt and snapshot. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: dict[tuple[int, int], _PendingCommit] = {}

    def commit(
        self,
        attempt: int,
        snapshot_id: int,
        report: PartReport,
        *,
        expected: Callable[[], AbstractSet[int]],
        commit: Commit,
        deadline_s: float,
    ) -> Committed:
        """Add a report; returns the commit of all reports, which the last rank makes.

        `expected` returns the pod's ranks whose parts are currently expected. Raises `PartAbandoned` if another rank of
        this pod failed, `PartsMissing` after the deadline, and the errors of `commit`.
        """
        rank, until_s = report.part.rank, time.monotonic() + deadline_s
        with self._changed:
            pending = self._pending_commit(attempt, snapshot_id)
            pending.reports[rank] = report
            self._changed.notify_all()
            while pending.outcome is None:
                missing = expected() - pending.reports.keys()
                if not missing and not pending.committing:
                    pending.committing = True
                    break
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise PartsMissing(sorted(missing), f"attempt {attempt}, snapshot {snapshot_id}")
                self._changed.wait(min(left_s, RECHECK_S))
            else:
                return pending.result()
            reports = [pending.reports[each] for each in sorted(pending.reports)]
        outcome: Committed | Exception
        try:
            outcome = commit(reports)
        except Exception as error:  # noqa: BLE001 - every rank's save fails with it
            outcome = error
        with self._changed:
            pending.outcome = outcome
            self._changed.notify_all()
            return pending.result()

    def withdraw(self, attempt: int, snapshot_id: int, rank: int) -> bool:
        """Withdraw this rank's part; returns False if the snapshot's commit has already begun or ended."""
        with self._changed:
            pending = self._pending_commit(attempt, snapshot_id)
            if pending.committing or pending.outcome is not None:
                return False
            where = f"attempt {attempt}, snapshot {snapshot_id}"
            pending.outcome = PartAbandoned(f"rank {rank} abandoned this snapshot", where=where)
            self._changed.notify_all()
            return True

    def _pending_commit(self, attempt: int, snapshot_id: int) -> _PendingCommit:
        self._pending = {
            key: held for key, held in self._pending.items() if key >= (attempt, snapshot_id - 1)
        }
        return self._pending.setdefault((attempt, snapshot_id), _PendingCommit())
