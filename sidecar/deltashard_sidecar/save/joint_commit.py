"""The parts that one pod's ranks bring to a cut are committed together: by one call, when the last is durable.

Each rank's save ends in a thread of its own, which comes here with its report. All but the last wait for what becomes
of the call that the last one makes. A rank whose save fails takes the cut away from the others of its pod, and tells
the other pods (`abandon_part`); none of this pod's parts was reported until then, so no peer can have committed them.
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
"""Between looks at which ranks are still expected: one may be gone without a word."""

Commit = Callable[[Sequence[PartReport]], Committed]


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingCommit:
    """One cut of one attempt, in one pod."""

    reports: dict[int, PartReport] = field(default_factory=dict)
    committing: bool = False
    outcome: Committed | Exception | None = None

    def result(self) -> Committed:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class JointCommits:
    """Gathers the reports of a pod's ranks, by attempt and cut. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: dict[tuple[int, int], _PendingCommit] = {}

    def commit(
        self,
        attempt: int,
        cut: int,
        report: PartReport,
        *,
        expected: Callable[[], AbstractSet[int]],
        commit: Commit,
        deadline_s: float,
    ) -> Committed:
        """Bring a report; returns what became of the commit that whoever comes last makes of all of them.

        `expected` gives the ranks of this pod whose parts are to come, as things stand. Raises `PartAbandoned` when another
        rank of this pod failed, `PartsMissing` past the deadline, and what `commit` raises.
        """
        rank, until_s = report.part.rank, time.monotonic() + deadline_s
        with self._changed:
            pending = self._pending_commit(attempt, cut)
            pending.reports[rank] = report
            self._changed.notify_all()
            while pending.outcome is None:
                missing = expected() - pending.reports.keys()
                if not missing and not pending.committing:
                    pending.committing = True
                    break
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise PartsMissing(sorted(missing), f"attempt {attempt}, cut {cut}")
                self._changed.wait(min(left_s, RECHECK_S))
            else:
                return pending.result()
            reports = [pending.reports[each] for each in sorted(pending.reports)]
        outcome: Committed | Exception
        try:
            outcome = commit(reports)
        except Exception as error:  # noqa: BLE001 - each rank's save hears of it, and fails by it
            outcome = error
        with self._changed:
            pending.outcome = outcome
            self._changed.notify_all()
            return pending.result()

    def withdraw(self, attempt: int, cut: int, rank: int) -> bool:
        """This rank's part will not come; False when the cut's commit has begun, or is over, without it mattering."""
        with self._changed:
            pending = self._pending_commit(attempt, cut)
            if pending.committing or pending.outcome is not None:
                return False
            where = f"attempt {attempt}, cut {cut}"
            pending.outcome = PartAbandoned(f"rank {rank} gave this cut up", where=where)
            self._changed.notify_all()
            return True

    def _pending_commit(self, attempt: int, cut: int) -> _PendingCommit:
        self._pending = {key: held for key, held in self._pending.items() if key >= (attempt, cut - 1)}
        return self._pending.setdefault((attempt, cut), _PendingCommit())
