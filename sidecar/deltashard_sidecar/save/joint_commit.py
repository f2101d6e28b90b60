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
from deltashard_checkpoint.write.cut_reports import PartAbandoned
from deltashard_checkpoint.write.report import PartReport

LOOK_AGAIN_S = 0.2
"""Between looks at which ranks are still expected: one may be gone without a word."""

Commit = Callable[[Sequence[PartReport]], Committed]


@dataclass(slots=True, kw_only=True, eq=False)
class _Gathering:
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
        self._gatherings: dict[tuple[int, int], _Gathering] = {}

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
            gathering = self._gathering(attempt, cut)
            gathering.reports[rank] = report
            self._changed.notify_all()
            while gathering.outcome is None:
                missing = expected() - gathering.reports.keys()
                if not missing and not gathering.committing:
                    gathering.committing = True
                    break
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise PartsMissing(sorted(missing), f"attempt {attempt}, cut {cut}")
                self._changed.wait(min(left_s, LOOK_AGAIN_S))
            else:
                return gathering.result()
            reports = [gathering.reports[each] for each in sorted(gathering.reports)]
        outcome: Committed | Exception
        try:
            outcome = commit(reports)
        except Exception as error:  # noqa: BLE001 - each rank's save hears of it, and fails by it
            outcome = error
        with self._changed:
            gathering.outcome = outcome
            self._changed.notify_all()
            return gathering.result()

    def withdraw(self, attempt: int, cut: int, rank: int) -> bool:
        """This rank's part will not come; False when the cut's commit has begun, or is over, without it mattering."""
        with self._changed:
            gathering = self._gathering(attempt, cut)
            if gathering.committing or gathering.outcome is not None:
                return False
            where = f"attempt {attempt}, cut {cut}"
            gathering.outcome = PartAbandoned(f"rank {rank} gave this cut up", where=where)
            self._changed.notify_all()
            return True

    def _gathering(self, attempt: int, cut: int) -> _Gathering:
        self._gatherings = {key: held for key, held in self._gatherings.items() if key >= (attempt, cut - 1)}
        return self._gatherings.setdefault((attempt, cut), _Gathering())
