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
from deltashard_checkpoint.vocabulary import encoding_named

from deltashard_sidecar.arena.batch import Rows

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

    def of(self, batch: Rows, data: memoryview, encoding: str) -> Search | None:
        """The search for a batch; None is the codecs' default."""
        if self._mode == "default":
            return None
        if self._mode == "plain":
            return PLAIN
        held = effective_encoding(encoding, batch.schema.dtype, batch.columns)
        if not encoding_named(held).quantized:
            return None
        key = (batch.schema.fqn, held)
        with self._lock:
            found = self._tuned.get(key)
            turn = self._tuning.setdefault(key, threading.Lock())
        if found is not None:
            return found
        with turn:
            with self._lock:
                found = self._tuned.get(key)
            if found is None:
                weights = batch.weights(data)
                sample = np.ascontiguousarray(weights[sample_positions(len(weights), SEED)])
                found = tune(held, sample, dtype=batch.schema.dtype).search
                with self._lock:
                    self._tuned[key] = found
        return found
