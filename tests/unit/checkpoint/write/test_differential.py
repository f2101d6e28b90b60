"""Differential policies: the predictor is the paper's, to the letter."""

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.write.differential import History, baseline_pays, decide, history

from tests.support.checkpoint.run_builder import Run

PAPER = (0.26, 0.31, 0.35, 0.385, 0.415, 0.44, 0.46, 0.48)


def known(*increments: float) -> History:
    return History(baseline=2, newest=9, increments=increments)


def test_the_papers_run_takes_its_second_baseline_after_the_seventh_increment():
    decisions = [decide("intermittent", known(*PAPER[:i])) for i in range(len(PAPER))]
    assert decisions == ["since_baseline"] * 7 + ["full"]


def test_the_predictor_keeps_the_one_for_the_baseline():
    """IncrCP's re-implementation compares sum(history) with len * S: a baseline after the first increment already."""
    assert sum(PAPER[:1]) <= len(PAPER[:1]) * PAPER[0]
    assert not baseline_pays(PAPER[:1])


def test_history_begins_anew_at_a_baseline():
    run = Run()
    attempt = run.open().attempt
    base = run.commit(attempt, 1, stored_bytes=1000)
    for cut, size in enumerate(PAPER[:7], start=2):
        run.commit(attempt, cut, base, stored_bytes=int(1000 * size))
    seen = history(run.log.state, attempt)
    assert seen.baseline == base
    assert seen.increments == pytest.approx(PAPER[:7])
    assert decide("intermittent", seen) == "full"
    second = run.commit(attempt, 9, stored_bytes=1100)
    assert history(run.log.state, attempt) == History(baseline=second, newest=second)
    third = run.commit(attempt, 10, second, stored_bytes=110)
    assert history(run.log.state, attempt) == History(baseline=second, newest=third, increments=(0.1,))
    assert decide("intermittent", history(run.log.state, attempt)) == "since_baseline"


def test_history_follows_the_lineage_of_a_restore_not_log_order():
    run = Run()
    first = run.open().attempt
    base = run.commit(first, 1)
    delta = run.commit(first, 2, base, stored_bytes=30)
    run.commit(first, 3, stored_bytes=500)
    second = run.open(which=f"seq:{delta}").attempt
    assert history(run.log.state, second) == History(baseline=base, newest=delta, increments=(0.3,))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("full", "full"), ("one-shot", "since_baseline"), ("consecutive", "since_commit")],
)
def test_the_plain_policies(policy, expected):
    assert decide(policy, known(0.9, 0.9, 0.9)) == expected
    assert decide(policy, History()) == "full"
    assert decide(policy, known(), force_full=True) == "full"


def test_an_unknown_policy_is_the_users_error():
    with pytest.raises(UserError, match="unknown differential policy"):
        decide("sometimes", known())
