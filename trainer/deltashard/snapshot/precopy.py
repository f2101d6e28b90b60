"""Copies rows ahead of their snapshot, while training continues (docs/design/030).

    snapshot is near   watch: from this boundary on every changed row is marked `TOUCHED`; blocks are requested
    meanwhile          a copying thread copies the rows that the snapshot will take, table by table, into these blocks
    snapshot           the thread stops after at most one batch; touched rows are copied again in place or behind the
                       others; rows that were not reached are copied as usual; then everything is handed over

If the sidecar wants rows that changed since the newest commit separately (`fresh`), the thread copies them first, and
then the others. Touched rows among the others are sent once more, as fresh rows.

Training waits for the rows of the steps during the copy, instead of for all rows.

Why all rows that are handed over belong to one step: a row that was copied ahead and is not touched has not changed
since the watch began, so the copy equals the row at the snapshot. A changed row is marked within the step that changed
it, before the snapshot's boundary; its copy, torn or not, is overwritten. The thread changes no flag and hands nothing
over; the training thread does, at the snapshot. So a failure leaves nothing to undo.

This relies on marks: an event that may have changed rows without a mark marks the whole table (`tracking`), which makes
all of it touched. One case escapes marks: an untracked write (`.data`) that is reverted before the snapshot, such as an
evaluation with averaged weights. Rows read meanwhile belong to no step, while the live rows are correct. Therefore some
rows of every batch are compared with the live ones at the snapshot (`PROBE_ROWS`); a table with a difference is copied
completely and tracked by hashes from then on. After the snapshot every row that was copied ahead is compared by its
hash, in parallel with training (`compare`). A row that differs without a mark is a fault: it is reported, and the next
save takes all rows (`save.comparison`). Memory that replaces a table's temporarily (`.data = `) is never read.

Not copied ahead: tables tracked by hashes (they are marked only when hashed), on an accelerator (its bus is faster than
copying touched rows twice: docs/design/042), strided or small tables; and all tables of a Checkpointer that records
content hashes, which observe every batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from deltashard_checkpoint.codecs import row_kernel
from deltashard_checkpoint.crash_point import crash_point
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.pinned import pin
from deltashard.attach.session import Link, SidecarSession
from deltashard.errors import SidecarUnavailable
from deltashard.snapshot import memory
from deltashard.snapshot.block_writer import Batch, BlockWriter, TableSnapshot, section_tensors
from deltashard.snapshot.save_stream import HOLD_S, SaveStream, SnapshotFailed
from deltashard.state.row_hash import row_bytes
from deltashard.tracking.marks import Marks, Mode, RowSelection
from deltashard.tracking.tracking import TrackedTable

log = logging.getLogger("deltashard")

LIST_ROWS = 1 << 20
"""Rows of a table that are listed at once: 1 MiB of flags, at most 8 MiB of ids."""
MIN_PRECOPY_BYTES = int(os.environ.get("DELTASHARD_PRECOPY_BYTES", str(4 << 20)))
"""A smaller snapshot takes less time than starting a copy ahead of it."""
MIN_PRECOPY_TABLE_BYTES = min(1 << 20, MIN_PRECOPY_BYTES)
"""Copying a smaller table takes no longer than the bookkeeping."""
MAX_RECOPY_FRACTION = 1 / 2
"""Limit of the share of copied rows that were touched since; above it, copying all rows again is as fast."""
RESERVED_BLOCKS_FRACTION = 1 / 8
"""Share of the granted blocks that is reserved for the snapshot itself."""
NICENESS = 10
"""Niceness of the copying thread: on shared cores training has priority."""

PROBE_ROWS = 16
"""Rows of every batch that are compared at the snapshot: a batch of which a share f was read during an untracked write
is missed with probability (1 - f) ** 16. An evaluation takes longer than a batch: f is 1 in all but two batches."""

Rows = npt.NDArray[np.int64]
_SEED = 0xA4EAD
"""Seed of the hashes of copied rows."""


class _Stopped(Exception):
    """The snapshot is due, the blocks are used up, or the sidecar disconnected."""


def _yield_to_training() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remainder:
    """Rows of a table that are still to be copied."""

    snapshot: TableSnapshot
    start: int = 0
    """First row, for a selection of all rows."""
    fresh: bool | None = None
    duplicated: bool = False
    """Whether batches of older rows contain them, too, because they were copied again in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshedCopy:
    """Rows of one table that were copied ahead, as of the snapshot."""

    full: bool
    recopied: int
    """Number of rows that were copied again."""
    rest: tuple[_Remainder, ...]

    def write(self, writer: BlockWriter, *, fresh_first: bool) -> None:
        """Copy the rest; `fresh_first`: whether separate rows are declared fresh."""
        for each in self.rest:
            if fresh_first:
                writer.table(each.snapshot, start=each.start, fresh=each.fresh, duplicated=each.duplicated)
            elif not each.duplicated:
                writer.table(each.snapshot, start=each.start)


@dataclass(slots=True, kw_only=True, eq=False)
class _CopyHashes:
    """Hashes of a batch when it was copied."""

    rows: Rows
    """int64 [n], rows of the shard."""
    hashes: npt.NDArray[np.uint64]
    """uint64 [n], one per row."""
    duplicated: npt.NDArray[np.int64]
    """Positions in the batch that were copied again at the snapshot."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Pass:
    """One pass over the rows of a table that the snapshot takes: over all, over the fresh, or over the older ones."""

    mode: Mode
    fresh: bool | None = None
    """Whether the rows changed since the newest commit (True) or are the others (False); None: both."""
    whole: bool = False
    stop_row: int = 0
    """Rows below were copied, or were not selected when they were listed."""
    batches: list[Batch] = field(default_factory=list)
    """In ascending order of rows."""
    copies: list[_CopyHashes] = field(default_factory=list)
    """By batch; kept for `compare`, when the batches already belong to the sidecar."""

    def find(self, marks: Marks, start: int, stop: int) -> Rows:
        return (marks.find_older if self.fresh is False else marks.find)(self.mode, start, stop)

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


class TablePrecopy:
    """The rows of one table that are copied ahead, by the copying thread and then by the training thread."""

    def __init__(self, table: TrackedTable, snapshot: TableSnapshot) -> None:
        """`snapshot` locates the rows; the selection is made during the copy."""
        self.table = table
        self.has_unmarked_writes = False
        """Whether untouched rows differ from their copies."""
        # The memory at this boundary: if another tensor's memory replaces a parameter's `.data` temporarily, the
        # original is read.
        self._snapshot = snapshot = replace(
            snapshot,
            weights=snapshot.weights.detach(),
            fields=tuple(each.detach() for each in snapshot.fields),
        )
        self._marks = table.marks
        self._schema_version = table.schema_version
        self._random = np.random.default_rng()
        self.unmarked_rows: Rows = np.empty(0, np.int64)
        """Rows of the shard that `compare` found to differ."""
        self._passes: list[_Pass] = []

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self._passes)

    def copy(self, writer: BlockWriter, mode: Mode, *, fresh_first: bool = False) -> Iterator[Batch]:
        """Copy the rows that a snapshot of this mode takes, one batch per iteration.

        `fresh_first`: rows that changed since the newest commit first, and then the others, in separate batches.
        """
        # IMPORTANT: rows are marked meanwhile, and none is unmarked. A row listed by the first pass is still fresh in
        # the second one, so no row is in both; a row of the snapshot that is in neither pass is touched.
        if fresh_first:
            self._passes = [_Pass(mode="since_commit", fresh=True), _Pass(mode=mode, fresh=False)]
        else:
            self._passes = [_Pass(mode=mode)]
        for each in self._passes:
            yield from self._walk(writer, each)

    def _walk(self, writer: BlockWriter, walk: _Pass) -> Iterator[Batch]:
        rows = self._marks.rows
        walk.whole = walk.fresh is not False and self._marks.count(walk.mode) == rows  # all stays all
        if walk.whole:
            yield from self._copied(writer, walk, RowSelection(all=True, ids=None))
        else:
            for start in range(0, rows, LIST_ROWS):
                stop = min(start + LIST_ROWS, rows)
                ids = torch.from_numpy(walk.find(self._marks, start, stop))
                yield from self._copied(writer, walk, RowSelection(all=False, ids=ids))
                walk.stop_row = stop
        walk.stop_row = rows

    def _copied(self, writer: BlockWriter, walk: _Pass, selection: RowSelection) -> Iterator[Batch]:
        for batch in writer.batches(replace(self._snapshot, selection=selection), fresh=walk.fresh):
            assert batch is not None  # on the CPU
            copies = _CopyHashes(
                rows=self._rows_of(batch),
                hashes=row_kernel.row_hashes(batch.sections(), _SEED),
                duplicated=np.empty(0, np.int64),
            )
            walk.batches.append(batch)
            walk.copies.append(copies)
            walk.stop_row = int(copies.rows[-1]) + 1
            yield batch

    def _rows_of(self, batch: Batch) -> Rows:
        first, message = self._snapshot.box.row_start, batch.message.rows
        if message.contiguous:
            return np.arange(message.row_start, message.row_start + batch.rows) - first
        return batch.ids() - first

    def compare(self) -> None:
        """After the snapshot, on the copying thread: find rows that differ from their copies.

        Rows that were written since are marked by the time `unmarked_rows` is read, at a boundary.
        """
        found = []
        walks, self._passes = self._passes, []
        for each in (each for walk in walks for each in walk.copies):
            with memory.read_lock:
                values = [row_bytes(part).numpy() for part in section_tensors(self._snapshot)]
                differ = row_kernel.row_hashes(values, _SEED, rows=each.rows) != each.hashes
            differ[each.duplicated] = False
            found.append(each.rows[differ])
        self.unmarked_rows = np.concatenate([self.unmarked_rows, *found])

    def refresh_copy(self, now: TableSnapshot, mode: Mode) -> RefreshedCopy | None:
        """Update the batches to the current rows; None: not possible, copy the table as usual."""
        if not self.rows or not self._same(now):
            return None
        touched = self._marks.touched()
        first = self._passes[0]
        count = self._marks.rows
        touched = touched[: np.searchsorted(touched, first.stop_row)]
        if len(touched) > self.rows * MAX_RECOPY_FRACTION:
            return None
        values = [row_bytes(part).numpy() for part in section_tensors(now)]
        recopied = np.zeros(len(touched), np.bool_)
        rest: list[_Remainder] = []
        left = 0

        def remains(rows: Rows, *, fresh: bool | None, duplicated: bool = False) -> None:
            chosen = replace(now, selection=RowSelection(all=False, ids=torch.from_numpy(rows)))
            rest.append(_Remainder(snapshot=chosen, fresh=fresh, duplicated=duplicated))

        for walk in self._passes:
            here = self._recopy_touched(walk, values, touched)
            if here is None:
                self.has_unmarked_writes = True
                return None
            recopied |= here
            if walk is not first:
                remains(touched[here], fresh=True, duplicated=True)
        # Every touched row is fresh: the first pass covers the fresh rows, or all rows.
        for walk in self._passes:
            if walk.whole:
                rest.append(_Remainder(snapshot=now, start=walk.stop_row, fresh=walk.fresh))
                left += count - walk.stop_row
                continue
            rows = walk.find(self._marks, walk.stop_row, count)
            if walk is first:
                rows = np.concatenate([touched[~recopied], rows])
            remains(rows, fresh=walk.fresh)
            left += len(rows)
        taken = self._marks.count(mode)
        if self.rows + left != taken:
            return None  # not expected; the copied rows are not those that the snapshot takes
        return RefreshedCopy(full=taken == count, recopied=int(recopied.sum()), rest=tuple(rest))

    def _recopy_touched(
        self, walk: _Pass, values: Sequence[npt.NDArray[np.uint8]], touched: Rows
    ) -> npt.NDArray[np.bool_] | None:
        """Copy touched rows again in place; returns which of them have a place, or None if untouched rows differ."""
        found = np.zeros(len(touched), np.bool_)
        at = 0
        for batch, copies in zip(walk.batches, walk.copies, strict=True):
            start, at = at, int(np.searchsorted(touched, copies.rows[-1], side="right"))
            rows = touched[start:at]
            if self._has_unmarked_writes(batch, copies.rows, values, rows):
                return None
            if not len(rows):
                continue
            places = np.searchsorted(copies.rows, rows)
            here = found[start:at] = copies.rows[places] == rows
            rows, places = rows[here], places[here]
            for source, target in zip(values, batch.sections(), strict=True):
                row_kernel.replace_rows(source, rows, target, places)
            copies.duplicated = places
        return found

    def _has_unmarked_writes(
        self, batch: Batch, copied: Rows, values: Sequence[npt.NDArray[np.uint8]], touched: Rows
    ) -> bool:
        """Whether a sample of a batch's untouched rows differs from the live rows."""
        places = self._random.integers(batch.rows, size=PROBE_ROWS)
        rows = copied[places]
        if len(touched):
            still = touched[np.searchsorted(touched[:-1], rows)] != rows
            rows, places = rows[still], places[still]
        return any(
            not np.array_equal(live[rows], mine[places])
            for live, mine in zip(values, batch.sections(), strict=True)
        )

    def _same(self, now: TableSnapshot) -> bool:
        """Whether the table is still the one that was copied: same marks, schema and memory."""
        table, before = self.table, self._snapshot
        return (
            table.tracker != "hashes"
            and table.marks is self._marks
            and table.schema_version == self._schema_version
            and (now.position, now.key, now.box) == (before.position, before.key, before.box)
            and [_place(part) for part in section_tensors(now)]
            == [_place(part) for part in section_tensors(before)]
        )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def can_precopy(table: TrackedTable, snapshot: TableSnapshot) -> bool:
    """Whether a thread can read the table's rows and marks record their changes."""
    parts = section_tensors(snapshot)
    return (
        table.tracker != "hashes"
        and parts[0].numel() * parts[0].element_size() >= MIN_PRECOPY_TABLE_BYTES
        and all(part.device.type == "cpu" and part.is_contiguous() for part in parts)
    )


class Precopy:
    """One copy ahead of a snapshot, by its own thread; created, stopped and used by the training thread."""

    def __init__(
        self,
        stream: SaveStream,
        link: Link,
        *,
        session: SidecarSession,
        tables: Iterable[tuple[TrackedTable, TableSnapshot]],
        begin: pb.SaveRequest.Begin,
        mode: Callable[[pb.SaveReply.Prepared], Mode],
        pool: ThreadPoolExecutor,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        """`mode` selects the rows that the reply requests; `checks` run last, so that the snapshot can skip them."""
        self.stream, self.link = stream, link
        self.began_s = self.until_s = time.monotonic()
        """Start of the copy, and its end after `stop`."""
        self.copied_s = 0.0
        self.mode: Mode | None = None
        """Mode of the copied rows; None: no rows were copied."""
        self.fresh_first = False
        """Whether rows that changed since the newest commit are in separate batches."""
        self.incomplete_reason = ""
        """Why the copy ended early; empty if it is complete."""
        self.checks_done = False
        self._checks = checks
        self._session = session
        self._mode_of = mode
        self._written: list[tuple[TablePrecopy, Batch]] = []
        self._stop = False
        self.writer = BlockWriter(
            link.arena,
            block=self._block,
            send=_reject_send,
            threads=1,
            pin=functools.partial(pin, link.arena),  # at the snapshot it also writes the tables on a GPU
        )
        self.tables = [TablePrecopy(table, snapshot) for table, snapshot in tables]
        for table in self.tables:
            table.table.marks.watch()
        stream.prepare(begin)
        self._reserved_blocks = 0
        self._job: Future[None] = pool.submit(self._run)

    @property
    def done(self) -> bool:
        return self._job.done()

    def stop(self) -> None:
        """Stop the thread and wait for it, for at most the time of one batch."""
        self.until_s = time.monotonic()
        self._stop = True
        self.stream.wake()
        self._job.cancel()
        wait([self._job])

    @property
    def bytes(self) -> int:
        return self.writer.copied.raw_bytes

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            answer = self.stream.prepared(began_s + HOLD_S, wanted=lambda: not self._stop)
            if answer is None or answer.refused:
                self.incomplete_reason = "stopped" if answer is None else "refused"
                return
            crash_point("precopy.prepared")
            self._reserved_blocks = int(self.stream.spare_blocks * RESERVED_BLOCKS_FRACTION) + 1
            began_s = time.monotonic()
            self.mode, self.fresh_first = self._mode_of(answer), answer.fresh_first
            for table in self.tables:
                self._copy(table, self.mode)
            self._run_checks()
        except _Stopped as stopped:
            self.incomplete_reason = str(stopped)
        except SidecarUnavailable:
            self.incomplete_reason = "sidecar disconnected"
        except SnapshotFailed as failed:
            self.incomplete_reason = failed.cause
        except Exception as error:
            log.debug("rows could not be copied ahead of a snapshot", exc_info=error)
            self.incomplete_reason = "error"
        finally:
            self.copied_s = time.monotonic() - began_s

    def _run_checks(self) -> None:
        for check in self._checks:
            if self._stop:
                return
            with memory.read_lock:
                check()
        self.checks_done = True

    def _copy(self, table: TablePrecopy, mode: Mode) -> None:
        batches = table.copy(self.writer, mode, fresh_first=self.fresh_first)
        while True:
            if self._stop:
                raise _Stopped("stopped")
            with self._session.hold_link(self.link), memory.read_lock:
                batch = next(batches, None)
            if batch is None:
                return
            self._written.append((table, batch))
            if len(self._written) == 1:
                crash_point("precopy.first_batch")

    def _block(self) -> int:
        if self.stream.spare_blocks <= self._reserved_blocks:
            raise _Stopped("arena full")
        return self.stream.spare_block()

    def hand_over(self, kept: Iterable[TablePrecopy]) -> int:
        """Hand over the batches of these tables, in arena order; returns the number of rows."""
        tables = {id(table) for table in kept}
        used = {self.writer.open_block}
        rows = 0
        for table, batch in self._written:
            if id(table) in tables:
                used.add(batch.message.rows.block)
                self.writer.hand_over(batch)
                rows += batch.rows
        self.stream.return_blocks({batch.message.rows.block for _, batch in self._written} - used)
        return rows


def _reject_send(_message: pb.SaveRequest, _bytes: int) -> None:
    raise AssertionError("only the snapshot hands over batches")


def copying_thread() -> ThreadPoolExecutor:
    """The thread of one Checkpointer's copies, started with the first copy."""
    memory.guard()
    return ThreadPoolExecutor(1, thread_name_prefix="deltashard-precopy", initializer=_yield_to_training)
