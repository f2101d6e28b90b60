"""The demo's "exact" can say no: every way in which a restored state could be wrong is told apart from a right one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checks(monkeypatch):
    """The demo's module, which is a script's neighbour and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    monkeypatch.delitem(sys.modules, "checks", raising=False)
    import checks

    return checks


@pytest.fixture
def cut(tmp_path):
    """A copy as the training process leaves it."""
    random = np.random.default_rng(7)
    arrays = {
        "pairs.weight": random.normal(size=(200, 32)).astype(np.float32),
        "pairs.weight:sum": random.random(200).astype(np.float32),
        "top.0.weight": random.normal(size=(4, 8)).astype(np.float32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path, arrays


def decoded(checks, arrays):
    rows = checks._round_trip(arrays["pairs.weight"], "q8", None)
    return {name: array.copy() for name, array in arrays.items()} | {"pairs.weight": rows.copy()}


def test_what_the_encoding_makes_of_every_row_is_exact(checks, cut):
    folder, arrays = cut
    restored = decoded(checks, arrays)
    assert not np.array_equal(restored["pairs.weight"], arrays["pairs.weight"])
    found = checks.compare(folder, restored, encoding="q8")
    assert found.exact
    assert found.rows == 200


def test_rows_that_came_back_as_they_were_cut_are_exact(checks, cut):
    folder, arrays = cut
    restored = decoded(checks, arrays)
    restored["pairs.weight"][50:60] = arrays["pairs.weight"][50:60]
    assert checks.compare(folder, restored, encoding="q8").exact


@pytest.mark.parametrize(
    ("harm", "wrong_rows"),
    [
        pytest.param(lambda a: a["pairs.weight"].view(np.uint32).__setitem__((3, 4), 1), 1, id="a bit"),
        pytest.param(
            lambda a: a["pairs.weight"].__setitem__([1, 2], a["pairs.weight"][[2, 1]]), 2, id="exchanged"
        ),
        pytest.param(lambda a: a["pairs.weight"].__setitem__(9, 0), 1, id="a row never written"),
    ],
)
def test_a_wrong_row_is_found(checks, cut, harm, wrong_rows):
    folder, arrays = cut
    restored = decoded(checks, arrays)
    harm(restored)
    found = checks.compare(folder, restored, encoding="q8")
    assert not found.exact
    assert found.wrong_rows == wrong_rows


def test_other_state_must_have_the_same_bits(checks, cut):
    folder, arrays = cut
    for name in ("pairs.weight:sum", "top.0.weight"):
        restored = decoded(checks, arrays)
        restored[name].reshape(-1)[0] = np.nextafter(restored[name].reshape(-1)[0], np.float32(9))
        assert checks.compare(folder, restored, encoding="q8").wrong_names == (name,)


def test_missing_and_surplus_state_is_found(checks, cut):
    folder, arrays = cut
    restored = decoded(checks, arrays)
    del restored["top.0.weight"]
    restored["ghost"] = np.zeros(1, np.float32)
    assert set(checks.compare(folder, restored, encoding="q8").wrong_names) == {"top.0.weight", "ghost"}
