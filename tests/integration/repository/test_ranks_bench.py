"""A small run of `bench/ranks.py` ends, and its counts are within the budgets, also at 64 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"
COUNTED = {"PUTs", "LISTs", "GETs"}


def test_store_requests_stay_within_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request counts do not depend on the machine: pods use a simulated clock, and a plan has fixed reads."""
    monkeypatch.syspath_prepend(str(BENCH))
    import ranks

    try:
        found = ranks.run(quick=True)
    finally:
        sys.modules.pop("ranks")
    rows = {row["what"]: row for row in found["rows"]}
    missed = [what for what, row in rows.items() if row["unit"] in COUNTED and row["met"] is False]
    assert missed == list(KNOWN), {what: rows[what] for what in missed}
    one, other = found["reading"]["one rank"], found["reading"]["another world"]
    links = found["scale"]["snapshots"]
    # One index of each link, and the newest link's indexes with dense tensors. A pod's first rank caches some.
    assert one["gets"]["index"] == links + 7
    # From the log: HINT's folded state, the entry that confirms it, and the newest entry.
    assert one["gets"] == {"log": 3, "layout": 1, "manifest": links, "index": links + 7}
    assert other["gets"]["index"] == links * found["ranks_met_by_another_world"] + 8
    assert len(one["chain"]) == links
    pod = found["reading"]["a pod"]
    assert pod["gets"]["layout"] == 1
    assert pod["gets"]["index"] == 8 * links + 7
    for snapshot_id in found["snapshots"]:
        assert snapshot_id["requests"]["first"]["PUT"] + snapshot_id["requests"]["others"]["PUT"] >= 2 * 64
        assert snapshot_id["indexes"] == 64
    assert found["snapshots"][-1]["committed_by"] == "first"


KNOWN = ("the same, uploads within 30 s", "GETs of rank 0's pod")
"""Budgets that are exceeded. The first one is exceeded only here: the end of the slowest of 7 pods varies by seconds.
docs/scale-ranks.md documents the other one."""
