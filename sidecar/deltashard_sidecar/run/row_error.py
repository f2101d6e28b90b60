"""How far rows of each table would be from themselves at few bits, measured on a sample of what a baseline brings.

The first batch of a table in a baseline gives the sample (`SAMPLE_ROWS` rows, or all of them), quantized and decoded as
a save and a restore would. One number a table and width: the relative L2 error, sqrt(sum |x - x'|^2 / sum |x|^2).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
from deltashard_checkpoint.codecs.encoding import effective_encoding
from deltashard_checkpoint.codecs.tuning import relative_error, sample_positions
from deltashard_checkpoint.deciding.precision import BITS
from deltashard_checkpoint.format.row_block import RowBlock
from deltashard_checkpoint.vocabulary import BITS_CHOICES, encoding_named

SAMPLE_ROWS = 1024
SEED = 11


class RowErrors:
    """The newest errors by table. Thread-safe: the encode pool's threads bring batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampled: set[str] = set()
        self._errors: dict[str, Mapping[int, float]] = {}

    def begin_baseline(self) -> None:
        """Every row comes anew: so is the sample."""
        with self._lock:
            self._sampled.clear()

    def offer(self, block: RowBlock) -> None:
        """Measure a table once a baseline, by its first batch."""
        table = block.schema.fqn
        with self._lock:
            if table in self._sampled:
                return
            self._sampled.add(table)
        found = _errors(block)
        with self._lock:
            self._errors[table] = found

    def of(self, table: str) -> Mapping[int, float]:
        """Bits -> relative error; empty: not measured yet."""
        with self._lock:
            return self._errors.get(table, {})


def _errors(block: RowBlock) -> dict[int, float]:
    sample = np.ascontiguousarray(block.weights[sample_positions(len(block), SEED, SAMPLE_ROWS)])
    found = {}
    for bits in BITS:
        encoding = effective_encoding(
            encoding_named(BITS_CHOICES[bits]), block.schema.dtype, len(block.columns)
        )
        error = relative_error(encoding, sample, dtype=block.schema.dtype)
        if error is not None:
            found[bits] = error
    return found
