"""When a status is written, and what is told as Events when too much happens."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.controller import status
from deltashard_operator.controller.status import Pace


@pytest.mark.parametrize(
    ("changed", "wait_s"),
    [
        ({"phase": "Saving", "step": 4}, status.SOON_S),
        ({"conditions": []}, status.SOON_S),
        ({"restores": 1}, status.SOON_S),
        ({"lastCommitSeq": 4, "step": 4}, 30.0),
        ({"step": 5, "trainedSeconds": 5}, status.QUIET_S),
    ],
)
def test_what_changed_says_how_long_its_write_may_wait(changed: dict[str, Any], wait_s: float) -> None:
    pace = Pace()
    assert pace.wait_s(changed, 100.0) == 0
    pace.written(100.0)
    assert pace.wait_s(changed, 100.0) == wait_s
    assert pace.wait_s(changed, 100.0 + wait_s) == 0


def test_while_others_wait_trouble_goes_first_and_the_rest_is_put_together() -> None:
    pace = Pace()
    pace.written(100.0)
    for trouble in ("losses", "failures", "conditions"):
        assert pace.wait_s({trouble: [], "phase": "Recovering"}, 101.0, crowded=True) == 0
    assert pace.wait_s({"phase": "Training"}, 101.0, crowded=True) == status.CROWDED_S - 1
    assert pace.wait_s({"phase": "Training"}, 200.0, crowded=True) == status.SOON_S, "looked at again"
    assert pace.wait_s({"phase": "Training"}, 200.0) == 0


def test_a_write_that_fails_waits_longer_each_time_but_never_over_a_minute() -> None:
    pace, waits = Pace(), []
    for _ in range(10):
        pace.failed(100.0)
        waits.append(pace.wait_s({"phase": "Saving"}, 100.0))
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (2.0, status.MAX_BACKOFF_S)
    pace.written(200.0)
    assert pace.wait_s({"phase": "Saving"}, 201.0) == 0
