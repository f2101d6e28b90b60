"""Row hashes: the formula, sections, chosen rows, and that changes show."""

from __future__ import annotations

import numpy as np
import pytest
from deltashard_checkpoint.codecs.encoding import EncodingError
from deltashard_checkpoint.codecs.row_kernel import hash_weights, row_hashes, row_words


def _by_hand(sections, seed):
    weights = [int(w) for w in hash_weights(seed, sum(row_words(s) for s in sections))]
    out = []
    for i in range(len(sections[0])):
        words = []
        for s in sections:
            data = s[i].tobytes()
            data += bytes(-len(data) % 4)
            words += np.frombuffer(data, "<u4").tolist()
        out.append(sum(w * x for w, x in zip(weights, words, strict=True)) % (1 << 64))
    return out


def _sections(rng, n=23):
    return [
        rng.normal(0, 1, (n, 16)).astype(np.float32),
        rng.normal(0, 1, n),
        rng.integers(0, 1 << 16, (n, 5), dtype=np.uint16),
        rng.integers(0, 256, (n, 3), dtype=np.uint8),
        rng.normal(0, 1, (n, 7)).astype(np.float16),
    ]


def test_the_formula_over_sections_of_any_dtype(kernel_set):
    sections = _sections(np.random.default_rng(0))
    assert row_hashes(sections, 99).tolist() == _by_hand(sections, 99)


def test_chosen_rows_hash_as_among_all(kernel_set):
    sections = _sections(np.random.default_rng(1))
    rows = np.array([5, 22, 0, 5], np.int64)
    everything = row_hashes(sections, 3)
    out = np.full(4, 12345, np.uint64)
    assert row_hashes(sections, 3, rows=rows, out=out) is out
    assert (out == everything[rows]).all()


def test_weights_are_odd_and_follow_the_seed():
    assert (hash_weights(7, 1000) & np.uint64(1)).all()
    assert len(set(hash_weights(7, 1000).tolist())) == 1000
    assert (hash_weights(7, 10) == hash_weights(7, 1000)[:10]).all()
    assert not (hash_weights(7, 10) == hash_weights(8, 10)).any()
    assert hash_weights(-1, 1) == hash_weights((1 << 64) - 1, 1)


def test_every_single_bit_of_a_row_shows(kernel_set):
    row = np.random.default_rng(0).integers(0, 2**32, 8, dtype=np.uint32)
    flips = np.array(
        [row ^ np.uint32([0] * j + [1 << b] + [0] * (7 - j)) for j in range(8) for b in range(32)]
    )
    hashes = row_hashes([np.concatenate([row[None], flips])], 5)
    assert len(set(hashes.tolist())) == 257


def test_sign_flips_of_many_values_show(kernel_set):
    """The worst case of the collision bound: nothing but top bits change."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (1, 64)).astype(np.float32)
    flipped = x * rng.choice([-1, 1], (5000, 64)).astype(np.float32)
    assert len(set(row_hashes([flipped], 1).tolist())) == len(np.unique(flipped, axis=0))


def test_no_rows():
    assert row_hashes([np.empty((0, 4), np.float32)], 1).shape == (0,)


def test_what_cannot_be_hashed_is_said():
    x = np.ones((4, 6), np.float32)
    for bad in ([], [x[:, ::2]], [x, x[:3]], [x[0, 0]]):
        with pytest.raises((EncodingError, TypeError)):
            row_hashes(bad, 1)
    for rows in (np.array([4]), np.array([-1]), np.array([0], np.int32)):
        with pytest.raises(EncodingError):
            row_hashes([x], 1, rows=rows)
    with pytest.raises(EncodingError, match="hashes into"):
        row_hashes([x], 1, out=np.zeros(3, np.uint64))
