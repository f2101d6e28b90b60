"""Patches: only `add`, and applied they give exactly what was wanted."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import pytest
from deltashard_operator.kube.json_patch import NotAnAddition, additions
from hypothesis import given
from hypothesis import strategies as st

KEYS = st.sampled_from(["a", "b", "a/b", "~", "~1", ""])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def grown(draw: st.DrawFn, before: Any) -> Any:
    """`before` with things added: keys, elements, other scalars."""
    if isinstance(before, dict):
        new = draw(st.dictionaries(KEYS, VALUES, max_size=2))
        return {**new, **{k: draw(grown(v)) for k, v in before.items()}}
    if isinstance(before, list):
        result = copy.deepcopy(before)
        for value in draw(st.lists(VALUES, max_size=2)):
            result.insert(draw(st.integers(0, len(result))), {"name": "new", "value": value})
        return result
    return before


@given(st.data())
def test_applied_it_gives_the_second_document(data: st.DataObject) -> None:
    """For any document and anything grown out of it; `add` is the only operation."""
    before = data.draw(st.dictionaries(KEYS, VALUES, max_size=4))
    after = data.draw(grown(before))
    operations = additions(before, after)
    assert {o["op"] for o in operations} <= {"add"}
    assert jsonpatch.apply_patch(before, operations) == after
    assert bool(operations) == (before != after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1}, {}),
        ({"a": [1, 2]}, {"a": [2]}),
        ({"a": [{"name": "x"}, {"name": "y"}]}, {"a": [{"name": "y"}, {"name": "x"}]}),
        ({"a": {"b": 1}}, {"a": 5}),
        ({"a": [{"name": "x", "k": 1}]}, {"a": [{"name": "x"}]}),
    ],
)
def test_what_took_something_away_has_no_patch(before: Any, after: Any) -> None:
    """Our bug, said before anyone's object is changed by it."""
    with pytest.raises(NotAnAddition):
        additions(before, after)


def test_named_elements_are_changed_in_place() -> None:
    """A container that got a mount is the same container; the one in front of it moves its index."""
    before = {"c": [{"name": "t"}]}
    after = {"c": [{"name": "s"}, {"name": "t", "env": [1]}]}
    assert additions(before, after) == [
        {"op": "add", "path": "/c/0", "value": {"name": "s"}},
        {"op": "add", "path": "/c/1/env", "value": [1]},
    ]
