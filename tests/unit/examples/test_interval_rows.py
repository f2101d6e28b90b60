"""The bench's intervals touch rows as Check-N-Run reports it for production models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("since", [0, 5], ids=["from the start", "whenever one starts to count"])
def test_an_interval_touches_26_percent_and_eleven_touch_half(monkeypatch, since):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name in ("checkpointing", "ours", "peers", "states"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from checkpointing import interval_rows

    rows = 20_000
    touched: set[int] = set()
    growth = []
    for i, some in enumerate(interval_rows(rows, since + 11)):
        if i >= since:
            assert len(some) == len(set(some.tolist())) == round(0.26 * rows)
            touched |= set(some.tolist())
            growth.append(len(touched) / rows)
    assert growth[0] == pytest.approx(0.26)
    assert growth[3] == pytest.approx(0.375, abs=0.02)
    assert growth[-1] == pytest.approx(0.52, abs=0.02)
