"""Quantities are read as people write them, and nothing else is."""

from __future__ import annotations

import pytest
from deltashard_checkpoint.deciding.goal import duration
from deltashard_cli.planning.quantity import BadQuantity, Model, dirty, growing, model, seconds, size_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("400GiB", 400 * 2**30),
        ("2TB", 2e12),
        ("500MB/s", 5e8),
        ("1.5 GiB", 1.5 * 2**30),
        ("7", 7),
        ("3k", 3000),
    ],
)
def test_sizes(text, count):
    assert size_bytes(text, where="x") == count


@pytest.mark.parametrize("text", ["", "GiB", "0", "-1GiB", "4X", "1e9", "nan", "9" * 30 + "PB", "4GiBs"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(BadQuantity) as refused:
        size_bytes(text, where="--bytes")
    assert refused.value.where == "--bytes"
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1e9x64x4", Model(10**9, 64, 4)),
        ("1000 x 16", Model(1000, 16, 4)),
        ("2.5e6X8X0", Model(2_500_000, 8, 0)),
    ],
)
def test_models(text, found):
    assert model(text, where="x") == found


@pytest.mark.parametrize(
    "text", ["", "1e9", "0x4x4", "1x0x4", "1e99x4x4", "-1x2x3", "1x2x3x4", "axbxc", "infx1x1"]
)
def test_what_is_no_model_is_refused(text):
    with pytest.raises(BadQuantity, match="no model"):
        model(text, where="x")


def test_shares_of_rows():
    assert dirty("26%", 1800.0, where="x") == (1800.0, 0.26)
    assert dirty("46% @ 3.5h", 1800.0, where="x") == (12600.0, 0.46)
    for text in ("26", "0%", "100%", "-3%", "26%@", "26%@0s", "26%@soon", "nan%"):
        with pytest.raises(BadQuantity):
            dirty(text, 1800.0, where="x")


def test_rows_touched_never_become_fewer():
    assert growing([(3600.0, 0.34), (1800.0, 0.26)], where="x") == ((1800.0, 0.26), (3600.0, 0.34))
    assert len(growing([(1800.0, 0.26), (3600.0, 0.26), (3600.0, 0.26)], where="x")) == 3
    with pytest.raises(BadQuantity, match="20% of rows within 60 min, but 26% within 30 min"):
        growing([(3600.0, 0.2), (1800.0, 0.26)], where="--dirty")
    with pytest.raises(BadQuantity, match="within 30 min, but"):
        growing([(1800.0, 0.2), (1800.0, 0.26)], where="--dirty")


def test_seconds_are_bounded():
    assert seconds("1.5h", where="x") == 5400
    for text in ("1e3s", "", "9" * 20 + "d", "-1s"):
        with pytest.raises(BadQuantity):
            seconds(text, where="x")


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (5, "5 s"), (119, "119 s"), (600, "10 min"), (7200, "2 h"), (259200, "3 d"),
     (float("inf"), "never")],
)  # fmt: skip
def test_durations_for_people(value_s, text):
    assert duration(value_s) == text
