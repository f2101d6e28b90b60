"""The sampled audit: checks that rows that no tracker marked have not changed.

Tracking by gradients assumes that nothing else writes weights or state. A fused kernel, a write through `.data` or a
replayed CUDA graph writes without a trace: no hook runs and no version changes. After each snapshot a new random sample
of rows (live weights and state, before any quantization) is hashed, and before the next snapshot it is hashed again. A
difference in an unmarked row is a *fault*: all rows of the table are marked, the next snapshot is full, and the table
is tracked by hashes from then on.

If a fraction f of the unmarked rows was written untracked between two snapshots, a sample of k unmarked rows misses it
with probability (1 - f) ** k, and n such intervals miss it with (1 - f) ** (n * k). With k = 2,048, writes to 0.1 % of
the
rows are missed once with 13 %, and five times in a row with 0.004 %. A write to a single row of a large table is
practically never found: the audit supplements the proof of exactness and does not replace it.

Where rows may be copied ahead of a snapshot, the copying thread hashes the sample while training continues, and
compares it shortly before the next snapshot, because reading the rows takes a large part of a small snapshot. Writes
before the thread's first hash are not found. Writes after its second hash are found only for tables whose sample is
also compared at the snapshot, each at every `SYNC_CHECK_INTERVAL`th snapshot. A sample of all rows is hashed and
compared only at snapshots, while training waits, so that it misses nothing.

The audit draws rows from its own generator and does not use the random streams of training.
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
    """Up to 16 of the rows."""
    found: int
    checked: int

    def __str__(self) -> str:
        return (
            f"{self.found} of {self.checked} sampled rows of {self.table} changed untracked "
            f"(by a fused kernel, or a write through .data?), for example rows {list(self.rows[:4])}; "
            "the next snapshot is full and this table is tracked by row hashes from now on"
        )


SYNC_CHECK_INTERVAL = 8
"""One in this many snapshots compares a table's sample at the snapshot itself, in addition to any comparison ahead."""


class Audit:
    """The sample of one table between two snapshots."""

    def __init__(self, table: str, seed: int) -> None:
        self._table = table
        self._seed = seed
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._ids: Tensor | None = None
        self._hashes: Tensor | None = None
        self._layout: tuple[object, ...] = ()
        self._ahead: Tensor | None = None
        """Sampled rows that had changed shortly before the snapshot; None if they were not compared."""

    def draw(self, sections: Sequence[Tensor], count: int) -> Callable[[], None]:
        """Draw `count` rows with repeats, or all rows if there are no more; return a job that hashes them.

        The job may run on another thread while training continues: rows written meanwhile are marked and excluded.
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
        """Return a job that compares the sample on another thread, after the job of `draw` and before `check`.

        Rows written meanwhile are marked when `check` runs, and excluded.
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
        """Hash the sampled rows again; return a fault if an unmarked row differs.

        `ahead`: use the result of the comparison right before this snapshot, if there is one.
        """
        if self._ids is None or self._hashes is None:
            return None
        if self._layout != row_hash.layout(sections):
            return None  # a field appeared, so the whole table is marked
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
