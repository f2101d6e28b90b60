"""Row kernels count, gather, overwrite and hash as numpy does, bit for bit."""

import numpy as np
import pytest
from deltashard_checkpoint.codecs import row_kernel
from deltashard_checkpoint.codecs.encoding import EncodingError
from deltashard_checkpoint.codecs.row_kernel import (
    gather_rows,
    hash_weights,
    replace_rows,
    row_hashes,
    row_words,
)

X = np.ones((4, 6), np.float32)


def _random(rows, width):
    return np.random.default_rng(width).integers(0, 256, (rows, width), dtype=np.uint8)


@pytest.mark.parametrize("bits", [1, 5])
def test_flags_are_counted_listed_and_merged_into_the_target(kernel_set, bits):
    for rows in (0, 1, 7, 63, 64, 65, 128, 1000, 4097):
        flags = np.random.default_rng(rows).integers(0, 16, rows, dtype=np.uint8)
        for mask in (3, 12, 1, 0):
            expected = np.flatnonzero(flags & mask)
            assert row_kernel.count_rows(flags, mask) == len(expected)
            found = row_kernel.find_rows(flags, mask)
            assert found.dtype == np.int64
            assert np.array_equal(found, expected)
        up = flags & (0xFF ^ bits) | (flags & bits) << 1
        moved = flags.copy()
        row_kernel.move_flags(moved, bits, left=True)
        assert np.array_equal(moved, up)
        row_kernel.move_flags(moved, bits << 1, left=False)
        assert np.array_equal(moved, up & (0xFF ^ bits << 1) | (up & bits << 1) >> 1)


def _aligned(rows, width, shift):
    """Return a buffer `shift` bytes after a multiple of 64, and all memory around it."""
    space = np.full(rows * width + 256, 0xAA, np.uint8)
    start = -space.ctypes.data % 64 + shift
    return space[start : start + rows * width].reshape(rows, width), space


@pytest.mark.parametrize("shift", [0, 4, 32])
@pytest.mark.parametrize(
    ("width", "n"), [(256, 9000), *((w, 300) for w in (1, 2, 4, 7, 8, 60, 64, 100, 640))]
)
def test_rows_are_gathered_and_overwritten_in_any_order(kernel_set, width, n, shift):
    """Rows have any stride and alignment. Above 1 MiB the native gather bypasses the caches. Other memory is unchanged."""
    random = np.random.default_rng(0)
    for values in (_random(n, width), _random(n, width + 32)[:, 16:-16]):
        for chosen in (np.arange(n), np.array([n - 1, 0, 0, 7]), random.permutation(n)[:90], np.arange(0)):
            rows = chosen.astype(np.int64)
            out, space = _aligned(len(rows), width, shift)
            gather_rows(values, rows, out)
            assert (out == values[rows]).all()
            assert np.count_nonzero(space != 0xAA) == np.count_nonzero(out != 0xAA)
            out, space = _aligned(n + 20, width, shift)
            places = random.permutation(n + 20)[: len(rows)].astype(np.int64)
            expected = out.copy()
            expected[places] = values[rows]
            replace_rows(values, rows, out, places)
            assert (out == expected).all()
            assert np.count_nonzero(space != 0xAA) == np.count_nonzero(out != 0xAA)


@pytest.mark.parametrize("row", [-1, 10, 2**40])
def test_out_of_range_row_is_refused_before_any_write(kernel_set, row):
    values, out = _random(10, 8), np.zeros((2, 8), np.uint8)
    bad, good = np.array([row], np.int64), np.array([1], np.int64)
    with pytest.raises(EncodingError, match=f"row {row} of a table of 10"):
        gather_rows(values, np.array([0, row], np.int64), out)
    with pytest.raises(EncodingError, match=f"row {row} of a table of 10"):
        replace_rows(values, bad, out, good)
    with pytest.raises(EncodingError, match=f"row {row} of a table of 2"):
        replace_rows(values, good, out, bad)
    assert not out.any()


def test_mismatched_buffers_are_refused():
    values, two = _random(10, 8), np.arange(2)
    for rows, shape in ((two, (2, 7)), (two, (3, 8)), (two.astype(np.int32), (2, 8))):
        with pytest.raises(EncodingError, match="rows"):
            gather_rows(values, rows, np.zeros(shape, np.uint8))
    with pytest.raises(EncodingError, match="into"):
        replace_rows(values, two, np.zeros((4, 8), np.uint8), np.array([1]))
    for bad in ([], [X[:, ::2]], [X, X[:3]], [X[0, 0]]):
        with pytest.raises((EncodingError, TypeError)):
            row_hashes(bad, 1)
    for rows in (np.array([4]), np.array([-1]), np.array([0], np.int32)):
        with pytest.raises(EncodingError):
            row_hashes([X], 1, rows=rows)
    with pytest.raises(EncodingError, match="hashes into"):
        row_hashes([X], 1, out=np.zeros(3, np.uint64))


def test_hashes_match_the_formula_for_any_dtype(kernel_set):
    rng = np.random.default_rng(0)
    sections = [
        rng.normal(0, 1, (23, 16)).astype(np.float32), rng.normal(0, 1, 23), rng.integers(0, 1 << 16, (23, 5), dtype=np.uint16),
        rng.integers(0, 256, (23, 3), dtype=np.uint8), rng.normal(0, 1, (23, 7)).astype(np.float16),
    ]  # fmt: skip
    weights = [int(w) for w in hash_weights(99, sum(row_words(s) for s in sections))]
    expected = []
    for i in range(23):
        padded = [s[i].tobytes() + bytes(-len(s[i].tobytes()) % 4) for s in sections]
        words = np.frombuffer(b"".join(padded), "<u4").tolist()
        expected.append(sum(w * x for w, x in zip(weights, words, strict=True)) % (1 << 64))
    assert row_hashes(sections, 99).tolist() == expected
    rows, out = np.array([5, 22, 0, 5], np.int64), np.full(4, 12345, np.uint64)
    assert row_hashes(sections, 99, rows=rows, out=out) is out
    assert out.tolist() == [expected[row] for row in rows]
    assert row_hashes([np.empty((0, 4), np.float32)], 1).shape == (0,)


def test_hash_weights_are_odd_and_seeded_and_every_bit_counts(kernel_set):
    weights = hash_weights(7, 1000)
    assert (weights & np.uint64(1)).all()
    assert len(set(weights.tolist())) == 1000
    assert (hash_weights(7, 10) == weights[:10]).all()
    assert not (hash_weights(7, 10) == hash_weights(8, 10)).any()
    row = np.random.default_rng(0).integers(0, 2**32, 8, dtype=np.uint32)
    flips = [row ^ np.uint32([0] * j + [1 << b] + [0] * (7 - j)) for j in range(8) for b in range(32)]
    assert len(set(row_hashes([np.array([row, *flips])], 5).tolist())) == 257
