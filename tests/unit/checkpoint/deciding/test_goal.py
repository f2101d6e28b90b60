"""Goals are parsed as they were written; other texts are refused."""

from typing import get_args

import pytest
from deltashard_checkpoint.deciding.goal import AUTO, Aim, BadGoal, Goal, goal
from hypothesis import given
from hypothesis import strategies as st

amounts = {"overhead": st.floats(1e-9, 0.5), "lost-work": st.floats(1e-6, 604800), "pls": st.floats(1e-9, 1)}


@given(
    st.sampled_from(get_args(Aim)).flatmap(
        lambda aim: st.tuples(st.just(aim), amounts.get(aim, st.just(0.0)))
    )
)
def test_goal_round_trips_through_text(pair):
    aim, amount = pair
    expected = Goal(aim=aim, amount=amount)
    assert goal(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "found", "again"),
    [
        ("auto", AUTO, "auto"),
        (" overhead=1% ", Goal(aim="overhead", amount=0.01), "overhead=1%"),
        ("overhead=7%", Goal(aim="overhead", amount=0.07), "overhead=7%"),
        ("lost-work=5m", Goal(aim="lost-work", amount=300), "lost-work=300s"),
        ("lost-work=7d", Goal(aim="lost-work", amount=604800), "lost-work=604800s"),
        ("pls=0.02", Goal(aim="pls", amount=0.02), "pls=0.02"),
    ],
)
def test_goal_texts_are_parsed(text, found, again):
    assert goal(text) == found
    assert str(found) == again


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "auto=1", "overhead", "overhead=", "overhead=1", "overhead=0%", "overhead=51%", "overhead=-1%",
        "overhead=nan%", "overhead=1e-3%", "lost-work=5", "lost-work=0s", "lost-work=8d", "lost-work=" + "9" * 400 + "d",
        "pls=0", "pls=1.1", "pls=inf", "pls=٣", "fixed=3", "check-n-run",
    ],
)  # fmt: skip
def test_invalid_goal_error_lists_valid_goals(text):
    with pytest.raises(BadGoal) as refused:
        goal(text, where="policy")
    assert refused.value.where == "policy"
    assert "overhead=1%" in refused.value.remedy or "90s" in refused.value.remedy
