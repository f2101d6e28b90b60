"""Which range search quantizes a table's rows: the codecs' default, plain, or tuned on a sample of the table itself.

A tuned search is chosen on the first batch of a table that a baseline brings (0.001 % of rows, at least 4,096 where the
batch has them) and kept for the deltas over it. Tuning happens on the encode pool, once a table and baseline; other
threads that bring the same table meanwhile wait for it, so one checkpoint has one search a table.
"""

from __future__ import annotations

import threading

import numpy as np
from deltashard_checkpoint.codecs.encoding import effective_encoding
from deltashard_checkpoint.codecs.quantizer import PLAIN, Search
from deltashard_checkpoint.codecs.tuning import sample_positions, tune
from deltashard_checkpoint.format.row_block import RowBlock
from deltashard_checkpoint.vocabulary import Encoding

SEED = 7


class Searches:
    """The searches in use. Thread-safe."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._lock = threading.Lock()
        self._tuned: dict[tuple[str, str], Search] = {}
        self._tuning: dict[tuple[str, str], threading.Lock] = {}

    def begin_baseline(self) -> None:
        """Every row is encoded anew: so is the choice."""
        with self._lock:
            self._tuned.clear()

    def of(self, block: RowBlock, encoding: Encoding) -> Search | None:
        """The search for rows; None is the codecs' default."""
        if self._mode == "default":
            return None
        if self._mode == "plain":
            return PLAIN
        held = effective_encoding(encoding, block.schema.dtype, len(block.columns))
        if not held.quantized:
            return None
        key = (block.schema.fqn, held.name)
        with self._lock:
            found = self._tuned.get(key)
            turn = self._tuning.setdefault(key, threading.Lock())
        if found is not None:
            return found
        with turn:
            with self._lock:
                found = self._tuned.get(key)
            if found is None:
                sample = np.ascontiguousarray(block.weights[sample_positions(len(block), SEED)])
                found = tune(held, sample, dtype=block.schema.dtype).search
                with self._lock:
                    self._tuned[key] = found
        return found
