"""Rows that are copied ahead of their cut, while training goes on (docs/design/030).

    a cut is near   watch: from this boundary on every row that changes is marked `TOUCHED`; blocks are asked for
    meanwhile       a thread of its own copies the rows that the cut will take, table after table, into these blocks
    the cut         the thread stops, at most a batch later; rows that were touched are copied again over their place,
                    or behind the others; whatever was not reached is copied as always; then all is handed over

Where rows that changed since the newest commit are wanted apart (`fresh`), the thread copies them first, and the others
after them. Of these the touched ones are sent once more, as fresh rows: over their place they are not apart.

Training waits for the rows of the steps that the copy took, instead of for all of them.

Why what is handed over is of one step: a row that was copied ahead and is not touched has not changed since the watch
began, so that what the thread read is what is there at the cut. A row that changed is marked within the step that did
it, before the cut's boundary; what the thread read of it, torn or not, is overwritten. The thread changes no flag and
hands nothing over: that is the training thread's, at the cut. So if anything fails, nothing has to be undone.

Marks are what this stands on: what may have changed a row unseen marks the whole table (`tracking`), which makes all of
it touched. One thing no mark can tell: a write without a trace (`.data`) that is taken back before the cut, as by an
evaluation with averaged weights. What the thread read meanwhile is of no step, and the live rows are what they should
be. So some rows of every batch are compared with the live ones at the cut (`PROBE_ROWS`); a table where one differs is
copied whole, and found by hashes from then on. After the cut every row that was copied ahead is compared, by its hash
and beside training (`compare`): one that differs, and was not marked since, is a fault that is reported, and the next
save takes all rows (`save.comparison`).
Other memory under a table for a while (`.data = `) is not read at all.

Not copied ahead: tables found by hashes (they are marked only when they are looked at), on an accelerator (its bus is
faster than copying again what was touched: docs/design/042), strided, or small; and all of a Checkpointer that records
content hashes, which look at every batch.
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
"""So many rows of a table are listed at once: 1 MiB of flags, at most 8 MiB of ids."""
MIN_PRECOPY_BYTES = int(os.environ.get("DELTASHARD_PRECOPY_BYTES", str(4 << 20)))
"""A cut of less is over sooner than a copy ahead of it is begun."""
MIN_PRECOPY_TABLE_BYTES = min(1 << 20, MIN_PRECOPY_BYTES)
"""Copying less than this takes no longer than keeping account of what was copied."""
MAX_RECOPY_FRACTION = 1 / 2
"""Share of the rows that were copied: if more than that was touched since, to copy all of them anew is as fast."""
RESERVED_BLOCKS_FRACTION = 1 / 8
"""Share of the granted blocks that is left for the cut itself."""
NICENESS = 10
"""Of the copying thread: on shared cores training goes first."""

PROBE_ROWS = 16
"""Rows of every batch that are compared at the cut: a batch of which a share f was read while the table was something
else is not found with probability (1 - f) ** 16. An evaluation takes longer than a batch: f is 1 in all but two."""

Rows = npt.NDArray[np.int64]
_SEED = 0xA4EAD
"""Of the hashes of what is copied."""


class _Stopped(Exception):
    """The cut has come, the blocks are used up, or the sidecar has gone away."""


def _yield_to_training() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remainder:
    """What is still to be copied of a table."""

    snapshot: TableSnapshot
    start: int = 0
    """Where it begins if it is of all rows."""
    fresh: bool | None = None
    """As in `BlockWriter.table`."""
    again: bool = False
    """Whether batches of older rows have them, too: they were copied over their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshedCopy:
    """What was copied ahead of one table, as it is at the cut."""

    full: bool
    """Whether all rows of the table are taken."""
    again: int
    """Rows that were copied once more."""
    rest: tuple[_Remainder, ...]

    def write(self, writer: BlockWriter, *, fresh_first: bool) -> None:
        """Copy the rest; `fresh_first`: whether rows that are apart are said to be fresh."""
        for each in self.rest:
            if fresh_first:
                writer.table(each.snapshot, start=each.start, fresh=each.fresh, again=each.again)
            elif not each.again:
                writer.table(each.snapshot, start=each.start)


@dataclass(slots=True, kw_only=True, eq=False)
class _CopyHashes:
    """What a batch had when it was copied."""

    rows: Rows
    """Of the shard: int64 [n]."""
    hashes: npt.NDArray[np.uint64]
    """Of each row."""
    again: npt.NDArray[np.int64]
    """Places in the batch that were copied once more, at the cut."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Pass:
    """One walk over the rows of a table: over all that the cut takes, or over the fresh or the older ones of them."""

    mode: Mode
    fresh: bool | None = None
    """Whether its rows are those that changed since the newest commit, or all others; None: either."""
    whole: bool = False
    """Whether all rows of the table are taken."""
    stop_row: int = 0
    """Rows below were copied, or were not to be when they were listed."""
    batches: list[Batch] = field(default_factory=list)
    """In ascending order of rows."""
    copies: list[_CopyHashes] = field(default_factory=list)
    """By batch; kept for `compare`, when the batches themselves are the sidecar's."""

    def find(self, marks: Marks, start: int, stop: int) -> Rows:
        return (marks.find_older if self.fresh is False else marks.find)(self.mode, start, stop)

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


class TablePrecopy:
    """What is copied ahead of one table: by the copying thread, and after it by the training thread."""

    def __init__(self, table: TrackedTable, snapshot: TableSnapshot) -> None:
        """`snapshot`: where its rows are; which ones is found out while they are copied."""
        self.table = table
        self.has_unmarked_writes = False
        """Whether rows that nothing touched are not what was copied of them."""
        # The memory of this boundary: a parameter whose `.data` is another's for a while is read where it was.
        self._snapshot = snapshot = replace(
            snapshot,
            weights=snapshot.weights.detach(),
            fields=tuple(each.detach() for each in snapshot.fields),
        )
        self._marks = table.marks
        self._schema_version = table.schema_version
        self._random = np.random.default_rng()
        self.unmarked_rows: Rows = np.empty(0, np.int64)
        """Of the shard, what `compare` found."""
        self._passes: list[_Pass] = []

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self._passes)

    def copy(self, writer: BlockWriter, mode: Mode, *, fresh_first: bool = False) -> Iterator[Batch]:
        """Copy what a cut of this mode takes: a batch each time that one is asked for.

        `fresh_first`: rows that changed since the newest commit by themselves, and then the others.
        """
        # IMPORTANT: rows are marked meanwhile, and none is unmarked. A row that the first pass lists is fresh when the
        # second one comes to it, so no row is in both; one that is in neither, and is to be, is touched.
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
                again=np.empty(0, np.int64),
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
        """After the cut, on the copying thread: find rows that are not what was copied of them ahead of it.

        One that was written since is marked when `unmarked_rows` is asked for, at a boundary.
        """
        found = []
        walks, self._passes = self._passes, []
        for each in (each for walk in walks for each in walk.copies):
            with memory.read_lock:
                values = [row_bytes(part).numpy() for part in section_tensors(self._snapshot)]
                differ = row_kernel.row_hashes(values, _SEED, rows=each.rows) != each.hashes
            differ[each.again] = False
            found.append(each.rows[differ])
        self.unmarked_rows = np.concatenate([self.unmarked_rows, *found])

    def refresh_copy(self, now: TableSnapshot, mode: Mode) -> RefreshedCopy | None:
        """Bring the batches up to what the table is now; None: they cannot be, copy it as always."""
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

        def remains(rows: Rows, *, fresh: bool | None, again: bool = False) -> None:
            chosen = replace(now, selection=RowSelection(all=False, ids=torch.from_numpy(rows)))
            rest.append(_Remainder(snapshot=chosen, fresh=fresh, again=again))

        for walk in self._passes:
            here = self._recopy_touched(walk, values, touched)
            if here is None:
                self.has_unmarked_writes = True
                return None
            recopied |= here
            if walk is not first:
                remains(touched[here], fresh=True, again=True)
        # Whatever was touched is fresh: the first pass is that of the rows that are fresh, or of all.
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
            return None  # never seen; what was copied is not what the cut takes
        return RefreshedCopy(full=taken == count, again=int(recopied.sum()), rest=tuple(rest))

    def _recopy_touched(
        self, walk: _Pass, values: Sequence[npt.NDArray[np.uint8]], touched: Rows
    ) -> npt.NDArray[np.bool_] | None:
        """Copy touched rows over their places; which of them have one. None: others are not what was copied."""
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
            copies.again = places
        return found

    def _has_unmarked_writes(
        self, batch: Batch, copied: Rows, values: Sequence[npt.NDArray[np.uint8]], touched: Rows
    ) -> bool:
        """Whether some rows of a batch that were not touched differ from the live ones."""
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
        """Whether it is the table that was copied: marks, schema and memory are what they were."""
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
    """Whether its rows lie where a thread can read them, and marks tell when they change."""
    parts = section_tensors(snapshot)
    return (
        table.tracker != "hashes"
        and parts[0].numel() * parts[0].element_size() >= MIN_PRECOPY_TABLE_BYTES
        and all(part.device.type == "cpu" and part.is_contiguous() for part in parts)
    )


class Precopy:
    """One copy ahead of a cut. Made, stopped and used by the training thread; in between its own thread is at it."""

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
        """`mode` tells which rows the answer asks for; `checks` are done last of all, so that the cut need not."""
        self.stream, self.link = stream, link
        self.began_s = self.until_s = time.monotonic()
        """From the beginning until `stop`."""
        self.copied_s = 0.0
        """How long the thread was at it."""
        self.mode: Mode | None = None
        """Of the rows that were copied; None: there are none."""
        self.fresh_first = False
        """Whether those that changed since the newest commit are apart."""
        self.incomplete_reason = ""
        """Why it ended before all was copied; empty: it did not."""
        self.checks_done = False
        """Whether all looks were done."""
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
            pin=functools.partial(pin, link.arena),  # at the cut it writes the tables on a GPU, too
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
        """Have the thread end, and wait for it: as long as one batch takes."""
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
            log.debug("rows could not be copied ahead of a cut", exc_info=error)
            self.incomplete_reason = "error"
        finally:
            self.copied_s = time.monotonic() - began_s

    def _run_checks(self) -> None:
        for look in self._checks:
            if self._stop:
                return
            with memory.read_lock:
                look()
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

    # At the cut.

    def hand_over(self, kept: Iterable[TablePrecopy]) -> int:
        """Hand over the batches of these tables, in the order in which they lie; returns how many rows."""
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
    raise AssertionError("only the cut hands over")


def copying_thread() -> ThreadPoolExecutor:
    """The thread of one Checkpointer's copies; it is started by the first of them."""
    memory.guard()
    return ThreadPoolExecutor(1, thread_name_prefix="deltashard-precopy", initializer=_yield_to_training)
