"""Traces: every form is read, incidents are counted once, and a bad line is named."""

from __future__ import annotations

import pytest
from deltashard_cli.planning.failure_trace import BadTrace, failure_trace
from hypothesis import given
from hypothesis import strategies as st


def read(text: str, span_s: float | None = None):
    return failure_trace(text.splitlines(keepends=True), where="f.csv", span_s=span_s)


def test_a_time_a_line():
    found = read("# seconds\n\n1000\n4000\n 11000 \n")
    assert (found.exposure_s, found.lossy, found.restores) == (10_000, 2, 2)
    assert found.gaps == (3000, 7000)
    assert found.down_s is None


def test_a_span_counts_the_first_failure_too():
    found = read("1000\n4000\n11000\n", span_s=20_000)
    assert (found.exposure_s, found.lossy) == (20_000, 3)
    assert read("5\n", span_s=100).lossy == 1


COLUMNS = """node,Start,END,cause,more
a,2024-05-01T00:00:00Z,2024-05-01T00:10:00Z,oom,x
b,2024-05-01T02:00:00+00:00,2024-05-01T02:20:00,"node lost, they say"
c,2024-05-01T02:00:30,,node lost
d,2024-05-01T03:00:00,2024-05-01T03:30:00,Drained
e,2024-05-01T06:00:00,2024-05-01T06:00:00,crash
"""


def test_columns_by_name_dates_pods_lost_together_and_departures():
    found = read(COLUMNS)
    assert [each.lossy for each in found.incidents] == [True, True, False, True]
    assert (found.lossy, found.restores) == (2, 3)
    assert found.exposure_s == 110 * 60 + 40 * 60 + 150 * 60
    assert found.gaps == (110 * 60, 190 * 60)  # a departure ends no gap
    assert found.down_s == (10 + 20 + 30) * 60 / 3


def test_order_does_not_matter():
    lines = COLUMNS.splitlines()
    assert read("\n".join([lines[0], *reversed(lines[1:])])) == read(COLUMNS)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("1\n2\nsoon\n", "line 3", "no time"),
        ("start,end\n5,6\n8,7\n", "line 3", "before"),
        ("start,cause\n,oom\n", "line 2", "empty"),
        ("start\n5\n2024-05-01\n", "line 3", "dates and seconds"),
        ("start,end\n5,2024-05-01\n", "line 2", "dates and seconds"),
        ("1,2\n", "line 1", "without names"),
        ('start\n"5\n', "line 2", "CSV"),
        ("1\nnan\n", "line 2", "no time"),
        ("1\ninf\n", "line 2", "no time"),
        ("", "f.csv", "no failure"),
        ("start,end,cause\n", "f.csv", "no failure"),
        ("5\n", "f.csv", "single"),
        ("5\n6\n", "f.csv", "single"),
        ("start,end\n0,100\n100,200\n", "f.csv", "no time of training"),
    ],
)
def test_a_bad_trace_says_where(text, where, what):
    with pytest.raises(BadTrace, match=what) as refused:
        read(text)
    assert where in refused.value.where
    assert refused.value.remedy


def test_a_span_shorter_than_the_trace_is_refused():
    with pytest.raises(BadTrace, match="further apart"):
        read("0\n5000\n", span_s=1000)


@given(st.text())
def test_any_text_is_a_trace_or_refused(text):
    try:
        found = read(text)
    except BadTrace:
        return
    assert found.exposure_s > 0
    assert all(gap > 0 for gap in found.gaps)


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=40, unique=True))
def test_gaps_are_what_was_trained(times):
    times = [61 * time for time in times]
    found = read("\n".join(map(str, times)))
    assert sum(found.gaps) == found.exposure_s == max(times) - min(times)
    assert len(found.gaps) == found.lossy == len(times) - 1
