"""A store damaged one object at a time: a plain restart restores the newest intact checkpoint, and reports the damage."""

import json
from collections import Counter

import pytest

from tests.crash import damage


@pytest.fixture(scope="module")
def stored_runs(tmp_path_factory):
    return list(damage.stored_runs(tmp_path_factory.mktemp("runs")))


def test_newest_intact_checkpoint_is_restored(stored_runs):
    """Every eleventh case: eleven is coprime to the number of damages, so every pair of damage and object kind occurs."""
    found = [case for run in stored_runs for case in damage.outcomes(run, every=11)]
    assert [case for case in found if not case.good] == []
    kinds = Counter(case.kind for case in found)
    assert kinds.keys() >= {
        "log entry",
        "folded state",
        "HINT",
        "index",
        "pack",
        "manifest",
        "layout",
        "report",
    }


def test_damaged_maintenance_entry_keeps_newest_commit(stored_runs):
    for run in stored_runs:
        newest = max(run.expected)
        if run.ranks == 1 and run.name != "ends in a checkpoint":
            tip = max(key for key in run.objects if "/log/0" in key)
            cases = list(damage.outcomes(run, chosen=tip.__eq__))
            assert len(cases) == len(damage.DAMAGES)
            assert {case.resumed for case in cases} == {newest}, run.name


def test_page_matches_measurements():
    rows = json.loads(damage.MEASURED.read_text())
    assert all(row["good"] for row in rows)
    page = damage.PAGE.read_text()
    for kind in sorted({row["kind"] for row in rows}):
        cases = sum(row["cases"] for row in rows if row["kind"] == kind)
        same = sum(row["cases"] for row in rows if row["kind"] == kind and row["newest"])
        assert f"| {kind} | {cases} | {same} | {cases - same} | 0 |" in page
