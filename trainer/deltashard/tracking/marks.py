"""Marks: one byte of flags per row that records since which snapshot the row has changed.

A row is `FRESH` if it changed since the newest commit known to this trainer, and `BASE` if it changed since the newest
known baseline. A snapshot moves flags to their pending twins until its outcome is known:

    event                 FRESH -> FRESH_PENDING        BASE -> BASE_PENDING
    row changes           set FRESH                     set BASE
    snapshot taken        moved                         moved, if it is full (a baseline when it commits)
    commit of the newest  pending cleared               pending cleared, if it was the newest full snapshot
    commit of an older    pending kept: a newer one     as above: only full snapshots ever fill it
                          still holds those rows
    snapshot failed       pending merged back unless    pending merged back unless another full snapshot in flight
                          a newer one holds them        holds them
    rebased               kept                          set for the rows that are FRESH or pending, else cleared
    restored              cleared                       set for the rows that came from delta frames

Every selection includes the flag *or* its pending twin, so a snapshot taken while another is in flight includes the
rows of both. Reports may be late, repeated or lost: an acknowledgement of a snapshot that is no longer in flight clears
nothing, so a selection is always a superset of the changed rows. (2-format: "What a part covers".)

Marking stores the constant `FRESH | BASE | TOUCHED` and drops the row's pending twins. This is safe, because a set flag
selects the row wherever its twin would and outlives it. Marking is therefore one blind store per row, without a read,
and needs no unique ids.

On an accelerator, flags are on the table's device, and marking is one more kernel on the stream of the step, without
synchronization. Operations that read and write back flags must not overlap with marking on any stream: they start when
all streams are done and complete before they return (`_synchronized`). No such operation runs within a step.

Rows may be copied ahead of a snapshot while training continues (docs/design/030). The third flag records which rows
changed meanwhile: `watch` clears `TOUCHED` of all rows, and every mark sets it. Selections ignore it.
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
    """Rows of one table that a snapshot takes: all rows, or `ids`."""

    all: bool
    ids: Tensor | None
    """int64 [n], ascending and unique, on the table's device; None if `all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirtyCounts:
    """Number of rows that a snapshot would take now, by mode."""

    commit: int
    baseline: int
    total: int


def in_graph(tensor: Tensor) -> bool:
    """Whether operations on `tensor` are being captured into a CUDA graph instead of executed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Flags of the `rows` rows of one table, as uint8 [rows] on `device`."""

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.flags = torch.full((rows,), _MARK, dtype=torch.uint8, device=device)
        # A numpy view of the same memory: on the CPU, an indexed store costs half of torch's dispatch.
        self._array = self.flags.numpy() if self.flags.device.type == "cpu" else None
        self._in_flight: dict[int, bool] = {}

    def mark(self, ids: Tensor) -> None:
        """Mark rows `ids` (integers of any shape and order, repeats allowed, on the flags' device) as changed."""
        if self._array is not None:
            self._array[ids.numpy()] = _MARK
        else:
            self.flags.index_fill_(0, ids.reshape(-1).long(), _MARK)

    def mark_all(self) -> None:
        self.flags.fill_(_MARK)

    def mark_where(self, changed: Tensor) -> None:
        """Mark the rows where `changed` (bool [rows], on the flags' device) is set."""
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
        """Select the rows of `mode` that are not in `select("since_commit")`."""
        if self._array is not None:
            return RowSelection(all=False, ids=torch.from_numpy(self.find_older(mode, 0, self.rows)))
        older = (self.flags & _SELECTS["since_commit"]) == 0
        if mode != "all":
            older &= (self.flags & _SELECTS[mode]) != 0
        return RowSelection(all=False, ids=torch.nonzero(older).view(-1))

    def watch(self) -> None:
        """Start to record changed rows for `touched`."""
        self._keep(0xFF ^ TOUCHED)

    def touched(self) -> npt.NDArray[np.int64]:
        """Rows of a CPU table that changed since `watch`: int64 [n], ascending."""
        assert self._array is not None
        return row_kernel.find_rows(self._array, TOUCHED)

    def count(self, mode: Mode) -> int:
        if mode == "all":
            return self.rows
        if self._array is not None:
            return row_kernel.count_rows(self._array, _SELECTS[mode])
        return int(torch.count_nonzero(self.flags & _SELECTS[mode]))

    def find(self, mode: Mode, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Rows of `mode` in [start, stop) of a CPU table: int64 [n], ascending. Rows may be marked concurrently."""
        assert self._array is not None
        if mode == "all":
            return np.arange(start, min(stop, self.rows))
        # IMPORTANT: search a copy. Another thread may mark rows between the passes that count and list them.
        return row_kernel.find_rows(self._array[start:stop].copy(), _SELECTS[mode]) + start

    def find_older(self, mode: Mode, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Like `select_older` for [start, stop), in numpy: torch's threads would compete with training for cores."""
        assert self._array is not None
        flags = self._array[start:stop].copy()
        older = (flags & _SELECTS["since_commit"]) == 0
        if mode != "all":
            older &= (flags & _SELECTS[mode]) != 0
        return np.flatnonzero(older) + start

    @contextlib.contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Context in which no stream of an accelerator marks rows."""
        synchronize(self.flags.device)
        yield
        synchronize(self.flags.device)

    def snapshot_taken(self, snapshot_id: int, *, full: bool) -> None:
        """Record that snapshot `snapshot_id` copied this table's selection; `full`: mode "all", for every table."""
        self._in_flight[snapshot_id] = full
        moving = FRESH | BASE if full else FRESH
        # Pending twins are one bit higher than their flags.
        self._shift(moving, left=1)

    def committed(self, snapshot_id: int, *, baseline: bool) -> None:
        """Record the commit of `snapshot_id`; `baseline`: its part covers null. Repeated reports have no effect."""
        full = self._in_flight.pop(snapshot_id, None)
        if full is None:
            return
        keep = 0xFF
        if not any(other > snapshot_id for other in self._in_flight):
            keep ^= FRESH_PENDING
        if (
            baseline
            and full
            and not any(o_full and other > snapshot_id for other, o_full in self._in_flight.items())
        ):
            keep ^= BASE_PENDING
        elif full and not baseline:
            # Complete but not accepted as a baseline: its rows still count as changed since the older baseline.
            self._merge(BASE_PENDING)
        # Older snapshots can no longer commit (commits are in increasing order), and this one holds their rows.
        for other in [o for o in self._in_flight if o < snapshot_id]:
            del self._in_flight[other]
        self._keep(keep)

    def failed(self, snapshot_id: int) -> None:
        """Record that `snapshot_id` is not expected to commit: the next snapshot takes its rows again."""
        full = self._in_flight.pop(snapshot_id, None)
        if full is None:
            return
        if not any(other > snapshot_id for other in self._in_flight):
            self._merge(FRESH_PENDING)
        if full and not any(o_full and other > snapshot_id for other, o_full in self._in_flight.items()):
            self._merge(BASE_PENDING)

    def rebase(self) -> None:
        """Make the newest commit the baseline: rows changed since the commit are the rows changed since the baseline.

        The rows of a snapshot in flight are included, and their flags stay set whatever its outcome.
        """
        with self._synchronized():
            ids = self.select("since_commit")
            self.flags.bitwise_and_(0xFF ^ (BASE | BASE_PENDING))
            if ids.ids is None:
                self.flags.bitwise_or_(BASE)
            else:
                self.flags[ids.ids] |= BASE

    def reseed(self, ids: Tensor | None) -> None:
        """After a restore, clear FRESH and set BASE for `ids` (int64 [n], or None for all rows)."""
        self._in_flight.clear()
        with self._synchronized():
            self.flags.fill_(TOUCHED | (BASE if ids is None else 0))
            if ids is not None and ids.numel():
                self.flags.index_fill_(0, ids.to(self.flags.device, torch.int64), TOUCHED | BASE)

    def clean(self, ids: Tensor) -> Tensor:
        """Return which of `ids` have not changed since the last snapshot: bool [n], on the device of `ids`."""
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
        """Move `bits` of every row one bit up (1) or down (-1); bits set at the target stay set."""
        if self._array is not None:
            row_kernel.move_flags(self._array, bits, left=left > 0)
            return
        with self._synchronized():
            moved_on = self.flags & bits
            moved_on = moved_on << 1 if left > 0 else moved_on >> 1
            self.flags.bitwise_and_(0xFF ^ bits).bitwise_or_(moved_on)
