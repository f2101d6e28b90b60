"""How a table learns which of its rows changed: exactly, or a superset, never less.

- gradients: `SparseGradientTracker`, for optimizers of the whitelist: the rows that the applied gradient lists. This
  covers functional and tied lookups, accumulation, closures and gradients that were not zeroed, for it is the very
  gradient that was applied. A dense gradient lists none: `Untracked`
- lookups: `LookupTracker`, for fused kernels, which report the rows that they update
- hashes: `HashTracker`, for everything else: one 64-bit hash of weights and state per row, kept from cut to cut. Exact
  for any optimizer; costs one read of the table per cut and 8 bytes per row
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from deltashard.state import row_hash
from deltashard.state.discovery import FoundTable
from deltashard.tracking.marks import Marks


class Untracked(Exception):
    """The rows that changed in this step cannot be proven; the message says why."""


class Tracker:
    """Of one table: marks its changed rows when they change, or at the look of a cut."""

    name: ClassVar[str]

    def hold_gradient(self) -> None:
        """The optimizer is about to apply the gradient: keep it, another hook may drop it."""

    def stepped(self) -> None:
        """The optimizer applied the gradient that was held: mark its rows.

        Raises:
            Untracked: which rows that were is not known.
        """

    def begin(self, _sections: Sequence[Tensor]) -> row_hash.Hashing | None:
        """Begin a look at the weights and row fields, [R] or [R, D] each: run its jobs, then `end`. None: no look."""
        return None

    def end(self, hashing: row_hash.Hashing, sections: Sequence[Tensor], marks: Marks) -> None:
        """Mark the rows that differ from the last look."""

    def adopt(self, sections: Sequence[Tensor]) -> None:
        """Take what is there as known (after a restore), without marking."""

    def close(self) -> None:
        """Remove the hooks."""


class SparseGradientTracker(Tracker):
    """Marks the rows of sparse gradients after every step."""

    name = "gradients"

    def __init__(self, found: FoundTable, marks: Marks) -> None:
        self._param = found.param
        self._marks = marks
        # The gradient of the step under way, and its rows if it is sparse.
        self._held: Tensor | None = None
        self._rows: Tensor | None = None

    def hold_gradient(self) -> None:
        self._held = grad = self._param.grad
        if grad is None or not grad.is_sparse:
            self._rows = None
            return
        indices = grad._indices()  # noqa: SLF001 - indices() refuses uncoalesced gradients
        # [1, n] is as good as [n], and `indices[0]` costs more than the marks.
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
    """Marks the rows whose hash differs from the one at the last look."""

    name = "hashes"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._hashes: Tensor | None = None
        self._layout: tuple[object, ...] = ()

    def begin(self, sections: Sequence[Tensor]) -> row_hash.Hashing:
        return row_hash.Hashing(sections, self._seed)

    def end(self, hashing: row_hash.Hashing, sections: Sequence[Tensor], marks: Marks) -> None:
        # A first look, or another set of fields than last time, counts as a change of every row.
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
