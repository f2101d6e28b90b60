"""The sampled audit: does a row that no tracker marked really stay as it was?

Tracking by gradients believes that nothing else writes weights or state. A fused kernel, a write through `.data` or a
replayed CUDA graph does so without a trace: no hook runs and no version moves. So after each cut a fresh random
sample of rows is hashed (live weights and state, before any quantization), and before the next cut it is hashed again.
A difference in a row that is still unmarked is a *fault*: every row of the table is marked, the coming cut is full,
and the table is tracked by hashes from then on.

If a fraction f of the unmarked rows was written behind our back between two cuts, a sample of k unmarked rows misses
that with probability (1 - f) ** k, and n such intervals with (1 - f) ** (n * k): with k = 2,048, writes to 0.1 % of
the rows are missed once with 13 %, five times in a row with 0.004 %. Writes to a single row of a large table are
practically never found: an audit is a net under the proof, not the proof.

Where rows may be copied ahead of a cut, the copying thread hashes the sample, beside training, and compares it shortly
before the next cut: to walk to so many rows takes longer than most else of a small cut. What is written before the
first look of that thread is not found, and what is written after its second only by the tables whose turn it is to be
compared at the cut, as without that thread: each at every `SYNC_CHECK_INTERVAL`th of its cuts. A sample of all rows is hashed and
compared at cuts only, while training waits: who asks for that wants nothing missed.

Rows are drawn from a generator of the audit's own; the training's random streams are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltashard.state import row_hash
from deltashard.tracking.marks import Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFault:
    """Rows of a table changed although no tracker marked them."""

    table: str
    rows: tuple[int, ...]
    """Up to 16 of them."""
    found: int
    checked: int

    def __str__(self) -> str:
        return (
            f"{self.found} of {self.checked} sampled rows of {self.table} changed outside of all that is tracked "
            f"(a fused kernel, a write through .data?), e.g. rows {list(self.rows[:4])}; "
            "the next cut is full and this table is tracked by row hashes from now on"
        )


SYNC_CHECK_INTERVAL = 8
"""At one of so many cuts a table's sample is compared at the cut itself, whatever was compared ahead of it."""


class Audit:
    """The sample of one table between two cuts."""

    def __init__(self, table: str, seed: int) -> None:
        self._table = table
        self._seed = seed
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._ids: Tensor | None = None
        self._hashes: Tensor | None = None
        self._layout: tuple[object, ...] = ()
        self._ahead: Tensor | None = None
        """Of the sampled rows, those that had changed shortly before the cut; None: nobody looked."""

    def draw(self, sections: Sequence[Tensor], count: int) -> Callable[[], None]:
        """Draw `count` rows (with repeats; every row once if there are no more); the result hashes them, and remembers.

        It may run on another thread while training goes on: a row that is written meanwhile is marked, and drops out.
        """
        rows = sections[0].shape[0]
        few = count < rows
        ids = (
            torch.randint(rows, (count,), generator=self._generator, device="cpu")
            if few
            else torch.arange(rows, device="cpu")
        )
        drawn = self._ids = ids.to(sections[0].device)
        self._hashes, self._ahead, self._layout = None, None, row_hash.layout(sections)

        def remember() -> None:
            hashes = row_hash.row_hashes(sections, self._seed, rows=drawn)
            if self._ids is drawn:
                self._hashes = hashes

        return remember

    def ahead(self, sections: Sequence[Tensor]) -> Callable[[], None]:
        """What compares the sample: on another thread, after what remembers it, and at an end before `check` begins.

        A row that is written meanwhile is marked when `check` asks, and drops out.
        """
        self._ahead = None

        def compare() -> None:
            ids, hashes = self._ids, self._hashes
            if ids is None or hashes is None or self._layout != row_hash.layout(sections):
                return
            changed = ids[row_hash.row_hashes(sections, self._seed, rows=ids) != hashes]
            if self._ids is ids:
                self._ahead = changed

        return compare

    def check(self, sections: Sequence[Tensor], marks: Marks, *, ahead: bool = False) -> AuditFault | None:
        """Hash the sampled rows again; None when those that are still unmarked agree, or nothing was sampled.

        `ahead`: take what was found right before this cut, if somebody looked.
        """
        if self._ids is None or self._hashes is None:
            return None
        if self._layout != row_hash.layout(sections):
            return None  # a field appeared: the whole table is marked anyway
        changed = self._ahead if ahead else None
        if changed is None:
            changed = self._ids[row_hash.row_hashes(sections, self._seed, rows=self._ids) != self._hashes]
        unmarked = changed[marks.clean(changed)]
        if not unmarked.numel():
            return None
        wrong = torch.unique(unmarked).tolist()
        checked = int(marks.clean(self._ids).sum())
        return AuditFault(table=self._table, rows=tuple(wrong[:16]), found=len(wrong), checked=checked)

    def forget(self) -> None:
        self._ids = self._hashes = self._ahead = None
