"""The demo's "exact" detects every way in which a restored state can be wrong."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.support.tool import ROOT

ROWS, SUM, TOP = "pairs.weight", "pairs.weight:sum", "top.0.weight"


@pytest.fixture
def checks(monkeypatch):
    """Import the demo's module, which is next to a script and in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    monkeypatch.delitem(sys.modules, "checks", raising=False)
    import checks

    return checks


def bump(array):
    array.reshape(-1)[0] = np.nextafter(array.reshape(-1)[0], np.float32(9))


@pytest.mark.parametrize(
    ("damage", "wrong_rows", "wrong_names"),
    [
        (lambda a: None, 0, ()),
        (lambda a: a[ROWS].view(np.uint32).__setitem__((3, 4), 1), 1, ()),
        (lambda a: a[ROWS].__setitem__([1, 2], a[ROWS][[2, 1]]), 2, ()),
        (lambda a: a[ROWS].__setitem__(9, 0), 1, ()),
        (lambda a: bump(a[SUM]), 0, (SUM,)),
        (lambda a: bump(a[TOP]), 0, (TOP,)),
        (lambda a: a.pop(TOP), 0, (TOP,)),
        (lambda a: a.update(extra=np.zeros(1, np.float32)), 0, ("extra",)),
    ],
    ids=["none", "a bit", "exchanged", "a row never written", "row state", "dense", "missing", "surplus"],
)
def test_only_the_encoded_form_of_every_row_is_exact(checks, tmp_path, damage, wrong_rows, wrong_names):
    """The copy is that of the training process. Ten restored rows equal the rows of the snapshot exactly."""
    random = np.random.default_rng(7)
    snapshot = {
        ROWS: random.normal(size=(200, 32)).astype(np.float32),
        SUM: random.random(200).astype(np.float32),
        TOP: random.normal(size=(4, 8)).astype(np.float32),
    }
    for name, array in snapshot.items():
        np.save(tmp_path / f"{name}.npy", array)
    restored = {name: array.copy() for name, array in snapshot.items()}
    restored[ROWS] = checks._round_trip(snapshot[ROWS], "q8", None).copy()
    assert not np.array_equal(restored[ROWS], snapshot[ROWS])
    restored[ROWS][50:60] = snapshot[ROWS][50:60]
    damage(restored)
    found = checks.compare(tmp_path, restored, encoding="q8")
    assert (found.rows, found.wrong_rows, found.wrong_names) == (200, wrong_rows, wrong_names)
    assert found.exact == (not wrong_rows and not wrong_names)
