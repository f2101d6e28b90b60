"""Relative error of each table's rows at few bits, measured on a sample of a baseline's rows.

The sample is from the table's first batch in a baseline (`SAMPLE_ROWS` rows, or all), quantized and decoded as in a
save and a restore. Each table and width has one relative L2 error, sqrt(sum |x - x'|^2 / sum |x|^2).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.codecs.decoder import decode_rows
from deltashard_checkpoint.codecs.encoding import dtype_name, effective_encoding, section_bytes
from deltashard_checkpoint.codecs.quantizer import encode_rows, widened
from deltashard_checkpoint.deciding.precision import BITS
from deltashard_checkpoint.format.row_block import RowBlock
from deltashard_checkpoint.vocabulary import BITS_CHOICES, Encoding, encoding_named

SAMPLE_ROWS = 1024
SEED = 11


class RowErrors:
    """Newest errors per table. Thread-safe: threads of the encode pool add batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampled: set[str] = set()
        self._errors: dict[str, Mapping[int, float]] = {}

    def begin_baseline(self) -> None:
        with self._lock:
            self._sampled.clear()

    def add_sample(self, block: RowBlock) -> None:
        table = block.schema.fqn
        with self._lock:
            if table in self._sampled:
                return
            self._sampled.add(table)
        count, dtype, found = min(len(block), SAMPLE_ROWS), block.schema.dtype, {}
        places = np.random.default_rng(SEED).choice(len(block), count, replace=False, shuffle=False)
        sample = np.ascontiguousarray(block.weights[np.sort(places)])
        for bits in BITS:
            encoding = effective_encoding(encoding_named(BITS_CHOICES[bits]), dtype, len(block.columns))
            if (error := _relative_error(encoding, sample, dtype=dtype)) is not None:
                found[bits] = error
        self._errors[table] = found

    def of(self, table: str) -> Mapping[int, float]:
        """Return bits -> relative error; empty: not measured yet."""
        return self._errors.get(table, {})


def _relative_error(encoding: Encoding, weights: npt.NDArray[np.generic], *, dtype: str) -> float | None:
    """Return sqrt(sum |x - x'|^2 / sum |x|^2) over finite rows x and their values x' after a save and a restore.

    None if there is nothing to compare: all rows are zero, or the encoding does not fit the block.
    """
    n, d = weights.shape
    scales, biases, codes = (np.empty(size, np.uint8) for size in section_bytes(encoding, n, d))
    encoded = encode_rows(encoding, weights, scales, biases, codes, dtype=dtype)
    if not encoded.fits:
        return None
    exact = widened(weights, dtype_name(weights, dtype)).astype(np.float64)
    exceptions, exponent = encoded.exceptions, encoded.exponent
    restored = decode_rows(
        encoding, scales, biases, codes, exponent, rows=n, columns=d, exceptions=exceptions, dtype="float64"
    )
    finite = np.isfinite(exact).all(axis=1)
    norm = float((exact[finite] ** 2).sum())
    lost = float(((restored[finite].astype(np.float64) - exact[finite]) ** 2).sum())
    return math.sqrt(lost / norm) if norm else None
