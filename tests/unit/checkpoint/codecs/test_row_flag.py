"""Flags of rows: counted, listed and moved as numpy would."""

from __future__ import annotations

import numpy as np
import pytest
from deltashard_checkpoint.codecs import row_kernel

SIZES = (0, 1, 7, 63, 64, 65, 128, 1000, 4097)


def _flags(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 16, rows, dtype=np.uint8)


@pytest.mark.parametrize("mask", [3, 12, 1, 0])
def test_rows_with_a_flag_are_counted_and_listed(kernel_set, mask):
    """Ascending positions; a raised flag in the last byte counts."""
    for rows in SIZES:
        flags = _flags(rows)
        expected = np.flatnonzero(flags & mask)
        assert row_kernel.count_rows(flags, mask) == len(expected)
        found = row_kernel.find_rows(flags, mask)
        assert found.dtype == np.int64
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("bits", [1, 5])
def test_flags_move_and_what_is_at_the_target_stays(kernel_set, bits):
    """Up and down again, over every size."""
    for rows in SIZES:
        flags = _flags(rows)
        up = flags & (0xFF ^ bits) | (flags & bits) << 1
        moved = flags.copy()
        row_kernel.move_flags(moved, bits, left=True)
        assert np.array_equal(moved, up)
        row_kernel.move_flags(moved, bits << 1, left=False)
        assert np.array_equal(moved, up & (0xFF ^ bits << 1) | (up & bits << 1) >> 1)
