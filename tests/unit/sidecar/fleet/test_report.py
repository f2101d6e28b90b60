"""Urgent changes of a report, and the count of attempts that a run opened, from the attempts in the log."""

from __future__ import annotations

import pytest
from deltashard_checkpoint.log.run_state import Attempt, RunState
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_sidecar.fleet.report import attempts_opened, needs_report


def state(*attempts: tuple[int, str, int | None, int | None, int]) -> RunState:
    """Build a state from attempts: (number, workload, resumes from, newest commit, ranks)."""
    return RunState(
        run="r",
        attempts={
            number: Attempt(
                world_size=ranks, resumes_from=source, resumes_attempt=None, last_seq=last, workload=workload
            )
            for number, workload, source, last, ranks in attempts
        },
    )


FIRST = (1, "w", None, 5, 1)


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ([], 1),
        ([(6, "w", 5, 9, 1)], 2),
        ([(6, "w", 5, None, 1), (7, "w", 5, 9, 1)], 3),  # it crashed before a commit
        ([(6, "w", 5, None, 1), (7, "w", 4, 9, 1)], 2),  # 5 was incomplete: the same opening
        ([(6, "w", 5, None, 1), (7, "w", 4, None, 1), (8, "w", None, 9, 1)], 2),
        ([(6, "v", 5, None, 1), (7, "w", 4, 9, 1)], 2),  # another workload's attempt does not count
        ([(6, "w", 5, None, 1), (7, "", 3, None, 0), (8, "w", 3, 9, 1)], 3),  # a user rewound in between
    ],
)
def test_openings_of_a_workload_are_counted(
    more: list[tuple[int, str, int | None, int | None, int]], count: int
) -> None:
    attempts = [FIRST, *more]
    assert attempts_opened(state(*attempts), attempts[-1][0]) == count
    assert attempts_opened(state(*attempts), 99) == 0, "the attempt is not in the log yet"


def test_only_urgent_changes_make_a_report_due() -> None:
    acknowledged = fleet.ReportRequest(
        pod=fleet.PodState(phase=fleet.PHASE_TRAINING, store_ok=True, ranks=[fleet.Rank(step=1)]),
        incidents=[fleet.Incident(id=7)],
    )
    for change, report_due in (
        ({"pod": fleet.PodState(ranks=[fleet.Rank(step=9)], consecutive_save_failures=2)}, False),
        ({"pod": fleet.PodState(phase=fleet.PHASE_CLOSED)}, True),
        ({"pod": fleet.PodState(attempt=4)}, True),
        ({"pod": fleet.PodState(credentials_ok=True)}, True),
        ({"pod": fleet.PodState(directive=2)}, True),
        ({"incidents": [fleet.Incident(id=8)]}, True),
        ({"save_results": [fleet.SaveResult(id="u")]}, True),
    ):
        now = fleet.ReportRequest()
        now.CopyFrom(acknowledged)
        now.MergeFrom(fleet.ReportRequest(**change))
        assert needs_report(now, acknowledged) is report_due, change
    assert not needs_report(fleet.ReportRequest(pod=acknowledged.pod), acknowledged)
