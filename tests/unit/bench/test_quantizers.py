"""The compiled quantizers of `make papers` do what the slow ones do that they stand for."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_k_means_is_that_of_the_reference(papers, bits):
    quantizers, reference = papers("quantizers"), papers("codecs_reference")
    x = reference.rows_like("student", 40, 32)
    x[0] = 0.25  # of one value
    np.testing.assert_allclose(quantizers.k_means(x, bits), reference.k_means(x, bits), atol=1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symmetric_is_that_of_the_reference(papers, bits):
    quantizers, reference = papers("quantizers"), papers("codecs_reference")
    x = reference.rows_like("gaussian", 40, 32)
    codes, scales = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    quantizers.symmetric_rows(x, 2**bits - 1, codes, scales)
    decoded = codes * scales[:, None].astype(np.float64) - np.abs(x).max(axis=1, keepdims=True)
    # A value in the middle of two codes may get either of them.
    step = scales[:, None]
    assert (np.abs(decoded - x) <= step * 0.5001).all()
    assert reference.mean_l2(x, decoded) == pytest.approx(
        reference.mean_l2(x, reference.symmetric(x, bits)), rel=1e-4
    )
