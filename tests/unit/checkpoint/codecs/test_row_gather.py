"""Chosen rows into a buffer: numpy's fancy indexing, bit for bit, at every width, size and alignment."""

from __future__ import annotations

import numpy as np
import pytest
from deltashard_checkpoint.codecs.encoding import EncodingError
from deltashard_checkpoint.codecs.row_kernel import gather_rows, replace_rows


def _random(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (rows, width), dtype=np.uint8)


@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 60, 64, 100, 128, 256, 640])
def test_rows_are_gathered_in_any_order(kernel_set, width):
    """Ascending, repeated and shuffled rows, the first and last one, none and one."""
    values = _random(300, width)
    random = np.random.default_rng(0)
    for rows in (
        np.arange(300),
        np.array([299, 0, 0, 7]),
        random.permutation(300),
        np.arange(0),
        np.array([5]),
    ):
        chosen = rows.astype(np.int64)
        out = np.zeros((len(chosen), width), np.uint8)
        gather_rows(values, chosen, out)
        assert (out == values[chosen]).all()


@pytest.mark.parametrize("shift", [0, 4, 32])
def test_large_gathers_are_equal_at_any_alignment(kernel_set, shift):
    """Above a MiB into 64-byte aligned memory the native gather writes around the caches; nothing beyond is touched."""
    values = _random(9000, 256)
    rows = np.flatnonzero(np.random.default_rng(1).random(9000) < 0.6).astype(np.int64)
    space = np.full(len(rows) * 256 + 256, 0xAA, np.uint8)
    start = -space.ctypes.data % 64 + shift
    out = space[start : start + len(rows) * 256]
    gather_rows(values, rows, out.reshape(-1, 256))
    assert (out.reshape(-1, 256) == values[rows]).all()
    assert (space[:start] == 0xAA).all()
    assert (space[start + out.size :] == 0xAA).all()


def test_rows_of_a_wider_array_are_gathered(kernel_set):
    """Any stride between rows."""
    values = _random(50, 96)[:, 16:80]
    rows = np.array([3, 49, 0], np.int64)
    out = np.zeros((3, 64), np.uint8)
    gather_rows(values, rows, out)
    assert (out == values[rows]).all()


@pytest.mark.parametrize("row", [-1, 10, 2**40])
def test_a_row_outside_is_refused_before_anything_is_read(kernel_set, row):
    """The message names it."""
    with pytest.raises(EncodingError, match=f"row {row} of a table of 10"):
        gather_rows(_random(10, 8), np.array([0, row], np.int64), np.zeros((2, 8), np.uint8))


def test_buffers_that_do_not_fit_are_refused():
    """Another width, another count, another type of positions."""
    values = _random(10, 8)
    for rows, shape in (
        (np.arange(2), (2, 7)),
        (np.arange(2), (3, 8)),
        (np.arange(2, dtype=np.int32), (2, 8)),
    ):
        with pytest.raises(EncodingError, match="rows"):
            gather_rows(values, rows, np.zeros(shape, np.uint8))


@pytest.mark.parametrize("width", [1, 4, 8, 60, 64, 100, 256])
@pytest.mark.parametrize("shift", [0, 4])
def test_rows_are_put_over_others(kernel_set, width, shift):
    """At their places, whatever the alignment; nothing else is touched."""
    values = _random(300, width)
    random = np.random.default_rng(3)
    rows = np.sort(random.permutation(300)[:90]).astype(np.int64)
    places = random.permutation(120)[:90].astype(np.int64)
    space = np.full(120 * width + 256, 0xAA, np.uint8)
    start = -space.ctypes.data % 64 + shift
    out = space[start : start + 120 * width].reshape(120, width)
    expected = out.copy()
    expected[places] = values[rows]
    replace_rows(values, rows, out, places)
    assert (out == expected).all()
    assert (space[:start] == 0xAA).all()
    assert (space[start + out.size :] == 0xAA).all()


def test_a_place_outside_is_refused_before_anything_is_written(kernel_set):
    """And so are a row outside, and counts that differ."""
    values, out = _random(10, 8), np.zeros((4, 8), np.uint8)
    for rows, places, what in (
        ([1], [4], "row 4 of a table of 4"),
        ([10], [1], "row 10 of a table of 10"),
        ([1, 2], [1], "into"),
    ):
        with pytest.raises(EncodingError, match=what):
            replace_rows(values, np.array(rows, np.int64), out, np.array(places, np.int64))
    assert not out.any()
