"""Trackers, which determine the changed rows of a table: exactly or as a superset, never fewer.

- gradients: `SparseGradientTracker`, for whitelisted optimizers, marks the rows listed in the applied gradient. This
  covers functional and tied lookups, accumulation, closures and gradients that were not zeroed, because it uses the
  gradient that was applied. A dense gradient raises `Untracked`.
- lookups: `LookupTracker`, for fused kernels, which report the rows that they update.
- hashes: `HashTracker`, for all other tables, keeps one 64-bit hash of weights and state per row between snapshots. It
  is exact for any optimizer and costs one read of the table per snapshot and 8 bytes per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from deltashard.state import row_hash
from deltashard.state.discovery import FoundTable
from deltashard.tracking.marks import Marks


class Untracked(Exception):
    """The rows that changed in this step cannot be proven; the message is the reason."""


class Tracker:
    """Marks the changed rows of one table, when they change or at a snapshot."""

    name: ClassVar[str]

    def hold_gradient(self) -> None:
        """Keep the gradient that the optimizer is about to apply, since another hook may drop it."""

    def stepped(self) -> None:
        """Mark the rows of the gradient that the optimizer has applied.

        Raises:
            Untracked: The changed rows are unknown.
        """

    def begin(self, _sections: Sequence[Tensor]) -> row_hash.Hashing | None:
        """Begin to hash weights and row-wise fields, [R] or [R, D] each: run its jobs, then `end`. None: no hashing."""
        return None

    def end(self, hashing: row_hash.Hashing, sections: Sequence[Tensor], marks: Marks) -> None:
        """Mark the rows that differ from the last hashing."""

    def adopt(self, sections: Sequence[Tensor]) -> None:
        """Accept the current values (after a restore) without marking."""

    def close(self) -> None:
        """Remove the hooks."""


class SparseGradientTracker(Tracker):
    """Marks the rows of sparse gradients after every step."""

    name = "gradients"

    def __init__(self, found: FoundTable, marks: Marks) -> None:
        self._param = found.param
        self._marks = marks
        # The gradient of the current step, and its rows if it is sparse.
        self._held: Tensor | None = None
        self._rows: Tensor | None = None

    def hold_gradient(self) -> None:
        self._held = grad = self._param.grad
        if grad is None or not grad.is_sparse:
            self._rows = None
            return
        indices = grad._indices()  # noqa: SLF001 - indices() rejects uncoalesced gradients
        # [1, n] works like [n], and `indices[0]` would cost more than marking.
        self._rows = indices if grad.sparse_dim() == 1 else indices[0]

    def stepped(self) -> None:
        grad, rows = self._held, self._rows
        self._held = self._rows = None
        if self._param.grad is not grad and self._param.grad is not None:
            raise Untracked("its gradient was replaced within the optimizer's step")
        if grad is None:
            return
        if rows is None:
            raise Untracked("its gradient is dense")
        self._marks.mark(rows)


class HashTracker(Tracker):
    """Marks the rows whose hash differs from the one at the last snapshot."""

    name = "hashes"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hashes: Tensor | None = None
        self._layout: tuple[object, ...] = ()

    def begin(self, sections: Sequence[Tensor]) -> row_hash.Hashing:
        return row_hash.Hashing(sections, self._seed)

    def end(self, hashing: row_hash.Hashing, sections: Sequence[Tensor], marks: Marks) -> None:
        # The first hashing, or a changed set of fields, counts as a change of every row.
        layout = row_hash.layout(sections)
        hashes = hashing.result()
        if self._hashes is None or layout != self._layout:
            marks.mark_all()
        else:
            marks.mark_where(hashes != self._hashes)
        self._hashes, self._layout = hashes, layout

    def adopt(self, sections: Sequence[Tensor]) -> None:
        self._layout = row_hash.layout(sections)
        self._hashes = row_hash.row_hashes(sections, self._seed)
