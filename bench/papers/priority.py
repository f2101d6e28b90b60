"""The three scores of CPR (Maeng et al., MLSys 2021) that choose a table's rows for a priority save.

In partial recovery lost rows return to their last saved values. Instead of the whole table every T, CPR saves the
r N of its N rows that matter most every r T, at the same bytes. The score is one of

* SCAR (Qiao et al., ICML 2019): how far a row has moved since it was saved; needs a copy of the table, 4 D bytes per
  row;
* MFU, most frequently used: how often it was read since it was saved; 4 bytes per row, 1 / D of the table;
* SSU, sub-sampled used: whether it was among the rows read in every second step; a list of at most r N ids, 4 r bytes
  per row, r / D of the table, and no sort.

Pure numpy; ids are positions in the table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64] | npt.NDArray[np.float32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]
EVERY = 2


def top(scores: Scores, k: int) -> Ids:
    if k == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) <= k:
        return candidates
    values = scores[candidates]
    least = np.partition(values, len(values) - k)[len(values) - k]
    above, equal = candidates[values > least], candidates[values == least]
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def scar(weights: npt.NDArray[np.float32], saved: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the Euclidean distance of each row of `weights` from `saved`, both float32 [N, D]: float32 [N].

    Needs `saved`, the last saved values of all rows: 4 D bytes per row, as much as the table.
    """
    distances = np.empty(len(weights), np.float32)
    for at in range(0, len(weights), 1 << 14):  # in parts that fit into a processor's cache
        part = weights[at : at + (1 << 14)] - saved[at : at + (1 << 14)]
        distances[at : at + (1 << 14)] = np.sqrt(np.einsum("nd,nd->n", part, part))
    return distances


class AccessCounts:
    """MFU: how often each row was read since it was last saved. uint32: 4 bytes per row."""

    def __init__(self, rows: int) -> None:
        self.counts = np.zeros(rows, np.uint32)

    def read(self, ids: Ids) -> None:
        """Count reads of `ids`, with repeats. A counter saturates at its largest value."""
        found, times = np.unique(ids, return_counts=True)
        self.counts[found] = np.minimum(self.counts[found] + times, np.iinfo(np.uint32).max)

    def top(self, k: int) -> Ids:
        return top(self.counts, k)

    def saved(self, ids: Ids) -> None:
        self.counts[ids] = 0


class SampledReads:
    """SSU: at most `capacity` ids of those that every second step read. uint32: 4 bytes per id, 4 r per row."""

    def __init__(self, capacity: int, *, seed: int) -> None:
        self.capacity = capacity
        self.ids = np.empty(0, np.uint32)
        """Ascending, without repeats."""
        self._generator = np.random.default_rng(seed)
        self._steps = 0

    def read(self, ids: Ids) -> None:
        """Record one step's reads of `ids`, with repeats; beyond the capacity, old and new ids are discarded alike."""
        self._steps += 1
        if (self._steps - 1) % EVERY:
            return
        held = np.union1d(self.ids, ids.astype(np.uint32))
        if len(held) > self.capacity:
            kept = self._generator.choice(len(held), self.capacity, replace=False, shuffle=False)
            held = held[np.sort(kept)]
        self.ids = held

    def take(self) -> Ids:
        taken, self.ids = self.ids.astype(np.int64), np.empty(0, np.uint32)
        return taken
