"""Which rows changed since what: one byte of flags per row, and the rules by which flags rise and fall.

A row is `FRESH` when it changed since the newest commit this trainer knows of, and `BASE` when it changed since the
newest baseline it knows of. A cut moves flags to their pending twins, for its fate is not known yet:

    event                 FRESH -> FRESH_PENDING        BASE -> BASE_PENDING
    row changes           set FRESH                     set BASE
    cut taken             moved                         moved, if the cut is full (a baseline when it commits)
    commit of the newest  pending cleared               pending cleared, if it was the newest full cut
    commit of an older    pending kept: a newer cut     as above: only full cuts ever fill it
                          still holds those rows
    cut failed            pending merged back unless    pending merged back unless another full cut in flight
                          a newer cut holds them        holds them
    rebased               kept                          set for the rows that are FRESH or pending, else cleared
    restored              cleared                       set for the rows that came from delta frames

Every selection is the flag *or* its pending twin, so a cut taken while another is in flight includes that one's rows.
Whatever arrives late, twice or never, a selection stays a superset of what truly changed: an acknowledgement of a cut
that is not in flight any more clears nothing. (2-format: "What a part covers".)

Marking writes the constant `FRESH | BASE | TOUCHED` over the byte and so forgets pending twins of that row. Nothing is
lost by that, since a raised flag selects the row wherever its twin would and outlives it; and it makes marking one
blind store per row, without a read. No uniqueness is needed either.

On an accelerator the flags lie beside the table and marking is one kernel more of the step's own stream, for which
nothing waits. What reads flags and writes them back must not run beside it: on whatever streams a program marks, such
an operation begins when all of them are done, and is over when it returns (`_synchronized`). There is none within a step.

Rows may be copied ahead of a cut, while training goes on (docs/design/030). A third flag tells which changed since that
began: `watch` lowers `TOUCHED` of all, and every mark raises it. No selection knows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from deltashard_checkpoint.codecs import row_kernel
from torch import Tensor

FRESH = 1
FRESH_PENDING = 2
BASE = 4
BASE_PENDING = 8
TOUCHED = 16
_MARK = FRESH | BASE | TOUCHED

Mode = Literal["all", "since_baseline", "since_commit"]
_SELECTS = {"since_commit": FRESH | FRESH_PENDING, "since_baseline": BASE | BASE_PENDING}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows of one table that a cut takes: all of them, or `ids`."""

    all: bool
    ids: Tensor | None
    """int64 [n], ascending and unique, on the table's device; None when `all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirtyCounts:
    """How many rows a cut would take now, by mode."""

    commit: int
    baseline: int
    total: int


def in_graph(tensor: Tensor) -> bool:
    """Whether what is done with it now becomes part of a CUDA graph, to be done at each replay instead of now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """The flags of one table's `rows` rows, as uint8 [rows] on `device`."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.flags = torch.full((rows,), _MARK, dtype=torch.uint8, device=device)
        # The same memory for numpy: on the CPU a fancy store costs half of torch's dispatch.
        self._array = self.flags.numpy() if self.flags.device.type == "cpu" else None
        self._in_flight: dict[int, bool] = {}

    def mark(self, ids: Tensor) -> None:
        """Rows `ids` (integers of any shape and order, repeats allowed, on the flags' device) changed."""
        if self._array is not None:
            self._array[ids.numpy()] = _MARK
        else:
            self.flags.index_fill_(0, ids.reshape(-1).long(), _MARK)

    def mark_all(self) -> None:
        self.flags.fill_(_MARK)

    def mark_where(self, changed: Tensor) -> None:
        """Rows where `changed` (bool [rows], on the flags' device) changed."""
        self.flags.masked_fill_(changed, _MARK)

    def select(self, mode: Mode) -> RowSelection:
        if mode == "all":
            return RowSelection(all=True, ids=None)
        if self._array is not None:
            ids = torch.from_numpy(row_kernel.find_rows(self._array, _SELECTS[mode]))
        else:
            ids = torch.nonzero(self.flags & _SELECTS[mode]).view(-1)
        if ids.numel() == self.rows:
            return RowSelection(all=True, ids=None)
        return RowSelection(all=False, ids=ids)

    def select_older(self, mode: Mode) -> RowSelection:
        """What `select` has and `select("since_commit")` has not."""
        if self._array is not None:
            return RowSelection(all=False, ids=torch.from_numpy(self.find_older(mode, 0, self.rows)))
        older = (self.flags & _SELECTS["since_commit"]) == 0
        if mode != "all":
            older &= (self.flags & _SELECTS[mode]) != 0
        return RowSelection(all=False, ids=torch.nonzero(older).view(-1))

    def watch(self) -> None:
        """From now on `touched` tells what changes."""
        self._keep(0xFF ^ TOUCHED)

    def touched(self) -> npt.NDArray[np.int64]:
        """Rows of a table on the CPU that changed since `watch`: int64 [n], ascending."""
        assert self._array is not None
        return row_kernel.find_rows(self._array, TOUCHED)

    def count(self, mode: Mode) -> int:
        if mode == "all":
            return self.rows
        if self._array is not None:
            return row_kernel.count_rows(self._array, _SELECTS[mode])
        return int(torch.count_nonzero(self.flags & _SELECTS[mode]))

    def find(self, mode: Mode, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Those of them in [start, stop), of a table on the CPU: int64 [n], ascending. Rows may be marked meanwhile."""
        assert self._array is not None
        if mode == "all":
            return np.arange(start, min(stop, self.rows))
        # IMPORTANT: found in a copy. Another thread may mark rows between the two passes that count and list them.
        return row_kernel.find_rows(self._array[start:stop].copy(), _SELECTS[mode]) + start

    def find_older(self, mode: Mode, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The like of `select_older`. By numpy: torch's threads would wait for cores, and training for them."""
        assert self._array is not None
        flags = self._array[start:stop].copy()
        older = (flags & _SELECTS["since_commit"]) == 0
        if mode != "all":
            older &= (flags & _SELECTS[mode]) != 0
        return np.flatnonzero(older) + start

    @contextlib.contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Within, no stream of an accelerator marks rows."""
        synchronize(self.flags.device)
        yield
        synchronize(self.flags.device)

    def snapshot_taken(self, cut: int, *, full: bool) -> None:
        """Cut number `cut` copied this table's selection; `full`: of the mode "all", for every table."""
        self._in_flight[cut] = full
        moving = FRESH | BASE if full else FRESH
        # Pending twins lie one bit higher than their flags.
        self._shift(moving, left=1)

    def committed(self, cut: int, *, baseline: bool) -> None:
        """The commit of `cut` is known; `baseline`: its part covers null. Late or repeated news is harmless."""
        full = self._in_flight.pop(cut, None)
        if full is None:
            return
        keep = 0xFF
        if not any(other > cut for other in self._in_flight):
            keep ^= FRESH_PENDING
        if baseline and full and not any(o_full and other > cut for other, o_full in self._in_flight.items()):
            keep ^= BASE_PENDING
        elif full and not baseline:
            # Complete, yet not accepted as a baseline: its rows still count as changed since the older one.
            self._merge(BASE_PENDING)
        # Older cuts can no longer commit (cuts commit in increasing order) and this one holds what they held.
        for other in [o for o in self._in_flight if o < cut]:
            del self._in_flight[other]
        self._keep(keep)

    def failed(self, cut: int) -> None:
        """`cut` will not commit as far as this trainer can tell: the next one takes its rows again."""
        full = self._in_flight.pop(cut, None)
        if full is None:
            return
        if not any(other > cut for other in self._in_flight):
            self._merge(FRESH_PENDING)
        if full and not any(o_full and other > cut for other, o_full in self._in_flight.items()):
            self._merge(BASE_PENDING)

    def rebase(self) -> None:
        """The newest commit takes the baseline's place: what changed since it is what changed since that.

        Rows of a cut in flight are among them, and their flags stand whatever becomes of it.
        """
        with self._synchronized():
            ids = self.select("since_commit")
            self.flags.bitwise_and_(0xFF ^ (BASE | BASE_PENDING))
            if ids.ids is None:
                self.flags.bitwise_or_(BASE)
            else:
                self.flags[ids.ids] |= BASE

    def reseed(self, ids: Tensor | None) -> None:
        """After a restore: nothing is fresh, and `ids` (int64 [n]; None: every row) differ from the baseline."""
        self._in_flight.clear()
        with self._synchronized():
            self.flags.fill_(TOUCHED | (BASE if ids is None else 0))
            if ids is not None and ids.numel():
                self.flags.index_fill_(0, ids.to(self.flags.device, torch.int64), TOUCHED | BASE)

    def clean(self, ids: Tensor) -> Tensor:
        """Which of `ids` did not change since the last cut was taken: bool [n], where `ids` are."""
        return ((self.flags[ids] & FRESH) == 0).to(ids.device)

    def _keep(self, bits: int) -> None:
        if self._array is not None:
            np.bitwise_and(self._array, bits, out=self._array)
            return
        with self._synchronized():
            self.flags.bitwise_and_(bits)

    def _merge(self, pending: int) -> None:
        self._shift(pending, left=-1)

    def _shift(self, bits: int, *, left: int) -> None:
        """Move `bits` of every row one place up (1) or down (-1); what is at the target stays set."""
        if self._array is not None:
            row_kernel.move_flags(self._array, bits, left=left > 0)
            return
        with self._synchronized():
            moved_on = self.flags & bits
            moved_on = moved_on << 1 if left > 0 else moved_on >> 1
            self.flags.bitwise_and_(0xFF ^ bits).bitwise_or_(moved_on)
