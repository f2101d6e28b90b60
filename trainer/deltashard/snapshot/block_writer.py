"""Copies dirty rows' weights and optimizer state into granted blocks of the arena.

Training waits for the copy, except for rows that `precopy` copied ahead. Rows are sent as batches of at most
BATCH_BYTES whose sections (ids, weights, fields) are laid out by `arena_layout.sections`. The descriptor of a batch is
sent as soon as the batch is written, so the sidecar can encode the first batches, and grant their blocks again, while a
snapshot larger than the arena is still being copied. One block is open at a time and shared by small tables.

A selection of all rows is copied directly. Selected rows are gathered by the checkpoint package's kernel into the
arena, on as many threads as torch uses, with prefetch and non-temporal stores. On an accelerator the gather runs on the
device, which then writes into the arena. If the device cannot write there, two pinned buffers alternate: the host
copies one into the arena while the other is filled. Copies and events use the caller's current stream; writes of other
streams must have completed (`tracking.settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from deltashard_checkpoint.codecs.row_kernel import gather_rows
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.format.typed_tree import EncodedTree
from deltashard_proto.arena_layout import ALIGN, BATCH_BYTES, Arena, aligned, sections
from deltashard_proto.v1 import trainer_pb2 as pb
from torch import Tensor

from deltashard.errors import UserError
from deltashard.state.kernel_thread import split
from deltashard.state.row_hash import row_bytes
from deltashard.tracking.marks import RowSelection

MIN_BATCH_ROWS = 512
"""With room for fewer rows in the open block, the next block is taken."""

IN_FLIGHT = 4
"""Maximum number of batches in transfer from a device that writes into the arena: it holds their rows twice."""

_SPLIT_BYTES = 1 << 20
"""Bytes of a gather per additional thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableSnapshot:
    """The part of one table in a snapshot."""

    position: int
    """Position of the table in this attachment."""
    fqn: str
    key: str
    box: Box
    """The part of the table in `weights`; row ids and columns are sent in coordinates of the whole table."""
    weights: Tensor
    """[R, C], live: rows and columns of the box."""
    fields: tuple[Tensor, ...]
    """[R], [R, 1] or [R, C] each, live, in schema order."""
    selection: RowSelection
    """Rows of the shard, counted from 0."""

    @property
    def row_bytes(self) -> int:
        return sum(_width(part) for part in section_tensors(self))


Bytes = npt.NDArray[np.uint8]
Observer = Callable[[TableSnapshot, Tensor | range, list[Tensor]], None]
"""Called with the table, global row ids, and [weights, *fields] of the batch."""


@dataclass(slots=True, kw_only=True)
class CopiedRows:
    """Counts of the rows that were handed over."""

    rows: int = 0
    """Each row counts once."""
    raw_bytes: int = 0
    batches: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A batch in transfer from the device."""

    message: pb.SaveRequest
    target: memoryview
    staging: Tensor | None
    """None: the device writes directly into the target."""
    events: list[torch.cuda.Event]
    """One event per device that holds a part of the batch."""

    def arrive(self) -> None:
        for event in self.events:
            event.synchronize()
        if self.staging is not None:
            torch.frombuffer(self.target, dtype=torch.uint8).copy_(self.staging)


@dataclass(slots=True, kw_only=True, eq=False)
class _Staging:
    """Two pinned buffers that alternate."""

    buffers: list[Tensor] = field(default_factory=list)
    index: int = 0

    def next(self) -> Tensor:
        while len(self.buffers) < 2:
            self.buffers.append(
                torch.empty(BATCH_BYTES + ALIGN, dtype=torch.uint8, pin_memory=True, device="cpu")
            )
        self.index ^= 1
        return self.buffers[self.index]


def _flat(tensor: Tensor) -> Tensor:
    """Return a field of shape [R, 1] as [R], others unchanged."""
    tensor = tensor.detach()
    return tensor.reshape(tensor.shape[0]) if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def section_tensors(snapshot: TableSnapshot) -> list[Tensor]:
    """The tensors of a batch's sections: weights, then each field."""
    return [snapshot.weights.detach(), *(_flat(f) for f in snapshot.fields)]


def _width(tensor: Tensor) -> int:
    return tensor.element_size() * (tensor.shape[1] if tensor.dim() == 2 else 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows that are written to the arena but not handed over."""

    message: pb.SaveRequest
    target: memoryview
    """Bytes of the batch, laid out by `arena_layout.sections`."""
    widths: tuple[int, ...]
    """Bytes per row of the weights and of each field."""

    @property
    def rows(self) -> int:
        return int(self.message.rows.rows)

    def sections(self) -> list[Bytes]:
        """Writable views of the weights and each field: uint8 [rows, width]."""
        offsets, _ = sections(self.rows, contiguous=self.message.rows.contiguous, row_bytes=self.widths)
        return [
            np.frombuffer(self.target, np.uint8, self.rows * width, at).reshape(self.rows, width)
            for at, width in zip(offsets[1:], self.widths, strict=True)
        ]

    def ids(self) -> npt.NDArray[np.int64]:
        """Row ids in the whole table: int64 [rows], ascending; undefined for a contiguous batch."""
        return np.frombuffer(self.target, np.int64, self.rows)


class BlockWriter:
    """Fills granted blocks in order, one open at a time."""

    def __init__(
        self,
        arena: Arena,
        *,
        block: Callable[[], int],
        send: Callable[[pb.SaveRequest, int], None],
        observe: Observer | None = None,
        threads: int = 0,
        pin: Callable[[], bool] = lambda: False,
    ) -> None:
        """`block` returns a writable block; `send` hands over a batch, or a piece of a blob, of a number of bytes.

        `observe` is called with every row batch in the arena before it is handed over. `threads` limits the gathering
        threads; 0: as many as torch has. `pin` returns whether a device can write into the arena.
        """
        self._take_block, self._hand_over = block, send
        self._observe = observe
        self._threads = threads
        self._pin = pin
        self._arena = arena
        self._block_bytes = arena.shape.block_bytes
        self._block = -1
        self._view = memoryview(b"")
        self._at = self._block_bytes  # full: the first batch takes a block
        self._staging = _Staging()
        self._pending: deque[_Pending] = deque()
        self._parts: list[Tensor] = []
        self._snapshot: TableSnapshot | None = None
        self.copied = CopiedRows()

    @property
    def open_block(self) -> int:
        """The block that was written last; -1: none."""
        return self._block

    def redirect(self, *, block: Callable[[], int], send: Callable[[pb.SaveRequest, int], None]) -> None:
        """Use other callbacks and all threads from now on, and reset the counts."""
        self._take_block, self._hand_over = block, send
        self._threads = 0
        self.copied = CopiedRows()

    def table(
        self, snapshot: TableSnapshot, *, start: int = 0, fresh: bool | None = None, duplicated: bool = False
    ) -> None:
        """Copy one table's rows; returns when they are in the arena (or in transfer from a device: see `flush`).

        `start`: first row to copy, for a selection of all rows. `fresh`: whether the rows changed since the newest
        commit; None: unknown. `again`: whether other batches contain these rows, too.
        """
        self._parts, self._snapshot = section_tensors(snapshot), snapshot
        for batch in self.batches(snapshot, start=start, fresh=fresh, duplicated=duplicated):
            if batch is not None:
                self._send(batch.message, batch.target)
            self._count()
        if self._observe is not None:
            self.flush()  # the observer needs this table's parts

    def batches(
        self, snapshot: TableSnapshot, *, start: int = 0, fresh: bool | None = None, duplicated: bool = False
    ) -> Iterator[Batch | None]:
        """Copy one table's rows lazily, batch by batch; yields None for a batch in transfer from a device."""
        parts = section_tensors(snapshot)
        widths = tuple(_width(part) for part in parts)
        first = snapshot.box.row_start
        ids = None if snapshot.selection.all else snapshot.selection.ids
        total = parts[0].shape[0] - start if ids is None else ids.numel()
        for at_row, rows, at in self._places(total, widths, contiguous=ids is None, where=snapshot.fqn):
            begin = start + at_row
            offsets, length = sections(rows, contiguous=ids is None, row_bytes=widths)
            message = pb.SaveRequest(
                rows=pb.RowBatch(
                    block=self._block,
                    offset=at,
                    table=snapshot.position,
                    rows=rows,
                    contiguous=ids is None,
                    row_start=first + begin if ids is None else 0,
                    col_start=snapshot.box.col_start,
                    col_stop=snapshot.box.col_stop,
                    fresh=fresh,
                    duplicated=duplicated,
                )
            )
            chosen = None if ids is None else ids[at_row : at_row + rows]
            target = self._view[at : at + length]
            batch: Batch | None = None
            if parts[0].device.type == "cpu":
                if chosen is not None:
                    torch.add(chosen, first, out=_view_at(target, offsets[0], torch.int64, (rows,)))
                for part, offset in zip(parts, offsets[1:], strict=True):
                    out = _view_at(target, offset, part.dtype, (rows, *part.shape[1:]))
                    _gather(part, chosen, begin, out, threads=self._threads)
                batch = Batch(message=message, target=target, widths=widths)
            else:
                self._from_device(message, target, parts, chosen, begin, rows, first, offsets, length)
            if not duplicated:
                self.copied.rows += rows
                self.copied.raw_bytes += rows * sum(widths)
            yield batch

    def hand_over(self, batch: Batch) -> None:
        """Send a batch that was copied ahead and now holds the rows of this step."""
        self.copied.rows += batch.rows
        self.copied.raw_bytes += batch.rows * sum(batch.widths)
        self._hand_over(batch.message, 0)
        self._count()

    def blob(self, name: str, tree: EncodedTree) -> None:
        done = 0
        while done < tree.total_bytes:
            room = min(self._block_bytes - self._at, BATCH_BYTES)
            if room < min(tree.total_bytes - done, 1 << 16):
                self._next_block()
                room = min(self._block_bytes, BATCH_BYTES)
            length = min(room, tree.total_bytes - done)
            tree.copy_into(done, self._view[self._at : self._at + length])
            self._hand_over(
                pb.SaveRequest(
                    blob=pb.BlobChunk(
                        block=self._block,
                        offset=self._at,
                        length=length,
                        name=name,
                        blob_offset=done,
                        blob_bytes=tree.total_bytes,
                    )
                ),
                length,
            )
            self._at += aligned(length)
            done += length
            self._count()
        self.copied.raw_bytes += tree.total_bytes

    def flush(self) -> None:
        while self._pending:
            self._complete_oldest()

    def stop(self) -> None:
        """Wait for all copies into the arena, before an abort."""
        for pending in self._pending:
            for event in pending.events:
                event.synchronize()
        self._pending.clear()

    def _count(self) -> None:
        self.copied.batches += 1
        if self.copied.batches == 1:
            crash_point("snapshot.first_batch")

    def _next_block(self) -> None:
        self.flush()  # a descriptor that names another block closes this one
        self._block = self._take_block()
        self._view = self._arena.block(self._block)
        self._at = 0

    def _places(
        self, total: int, widths: Sequence[int], *, contiguous: bool, where: str
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (start, rows, offset in the open block) until `total` rows are placed."""
        per_row = sum(widths) + (0 if contiguous else 8)
        slack = ALIGN * (len(widths) + 1)
        if per_row + slack > BATCH_BYTES:
            raise UserError(
                f"a row of {per_row} bytes is larger than a record batch ({BATCH_BYTES} bytes)",
                where=where,
                remedy="register the parameter as dense, or split its columns",
            )
        start = 0
        while start < total:
            room = min(self._block_bytes - self._at, BATCH_BYTES) - slack
            rows = min(max(room, 0) // per_row, total - start)
            if rows < min(total - start, MIN_BATCH_ROWS) and self._at > 0:
                self._next_block()
                continue
            at = self._at
            _, length = sections(rows, contiguous=contiguous, row_bytes=widths)
            self._at += length
            yield start, rows, at
            start += rows

    def _from_device(  # noqa: PLR0913
        self,
        message: pb.SaveRequest,
        target: memoryview,
        parts: Sequence[Tensor],
        chosen: Tensor | None,
        start: int,
        rows: int,
        first: int,
        offsets: Sequence[int],
        length: int,
    ) -> None:
        direct = self._pin()
        if len(self._pending) == (IN_FLIGHT if direct else 2):
            self._complete_oldest()
        staging = None if direct else self._staging.next()

        def room(offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            if staging is None:
                return _view_at(target, offset, dtype, shape)
            return _staging_view(staging, offset, dtype, shape)

        if chosen is not None:
            room(offsets[0], torch.int64, (rows,)).copy_(chosen + first, non_blocking=True)
        there: dict[torch.device, Tensor] = {}
        for part, offset in zip(parts, offsets[1:], strict=True):
            if chosen is None:
                piece = part[start : start + rows]
            else:
                ids = there.setdefault(part.device, chosen.to(part.device))
                piece = part.index_select(0, ids)
            # The allocator does not reuse the freed gather result before this copy ends: reuse is ordered by stream,
            # and gather and copy run on the current one.
            room(offset, part.dtype, tuple(piece.shape)).copy_(piece, non_blocking=True)
        events = []
        for device in {part.device for part in parts} | ({chosen.device} if chosen is not None else set()):
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
                event.record(torch.cuda.current_stream(device))
                events.append(event)
        staged = None if staging is None else staging[:length]
        self._pending.append(_Pending(message=message, target=target, staging=staged, events=events))

    def _complete_oldest(self) -> None:
        pending = self._pending.popleft()
        pending.arrive()
        self._send(pending.message, pending.target)

    def _send(self, message: pb.SaveRequest, target: memoryview) -> None:
        if self._observe is not None:
            self._notify_observer(message.rows, target)
        self._hand_over(message, len(target))

    def _notify_observer(self, batch: pb.RowBatch, target: memoryview) -> None:
        parts = self._parts
        offsets, _ = sections(batch.rows, contiguous=batch.contiguous, row_bytes=[_width(p) for p in parts])
        ids: Tensor | range = range(batch.row_start, batch.row_start + batch.rows)
        if not batch.contiguous:
            ids = _view_at(target, offsets[0], torch.int64, (batch.rows,))
        values = [
            _view_at(target, offset, part.dtype, (batch.rows, *part.shape[1:]))
            for part, offset in zip(parts, offsets[1:], strict=True)
        ]
        assert self._observe is not None
        assert self._snapshot is not None
        self._observe(self._snapshot, ids, values)


def _view_at(target: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.frombuffer(target, dtype=dtype, count=count, offset=offset).view(shape)


def _staging_view(staging: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return staging[offset : offset + count].view(dtype).view(shape)


def _gather(part: Tensor, chosen: Tensor | None, start: int, out: Tensor, *, threads: int = 0) -> None:
    if chosen is None:
        out.copy_(part[start : start + out.shape[0]])
    elif part.device.type == "cpu" and part.is_contiguous():
        rows, values, target = chosen.numpy(), row_bytes(part).numpy(), row_bytes(out).numpy()

        def work(a: int, b: int) -> None:
            gather_rows(values, rows[a:b], target[a:b])

        split(len(rows), target.nbytes // _SPLIT_BYTES, work, threads=threads)
    else:  # strided, or a CPU table with state on a device
        out.copy_(part.index_select(0, chosen.to(part.device)))
