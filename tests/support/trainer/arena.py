"""A save stream and its arena without a sidecar: blocks that the trainer takes and fills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from deltashard.snapshot.block_writer import BlockWriter, TableSnapshot
from deltashard.tracking.marks import RowSelection
from deltashard_checkpoint.format.schema import Box
from deltashard_proto.arena_layout import sections
from torch import Tensor

NO_ROWS = RowSelection(all=False, ids=None)


class FakeArena:
    """Blocks of one size; returned blocks are granted again."""

    def __init__(self, block_bytes: int) -> None:
        self.shape = SimpleNamespace(block_bytes=block_bytes)
        self.blocks: list[bytearray] = []
        self.free: list[int] = []
        self.sent: list[Any] = []

    def block(self, at: int) -> memoryview:
        return memoryview(self.blocks[at])

    def take(self) -> int:
        if self.free:
            return self.free.pop(0)
        self.blocks.append(bytearray(b"\xee" * self.shape.block_bytes))
        return len(self.blocks) - 1

    def send(self, message: Any, _bytes: int) -> None:
        self.sent.append(message.rows)

    def return_blocks(self, blocks: Iterable[int]) -> None:
        self.free.extend(blocks)

    def writer(self, **options: Any) -> BlockWriter:
        return BlockWriter(self, block=self.take, send=self.send, **options)  # type: ignore[arg-type]

    def rows(self, batch: Any, parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the row ids of a batch and their values in each section; `parts` give the dtypes and widths."""
        widths = [part[0].numel() * part.element_size() for part in parts]
        offsets, _ = sections(batch.rows, contiguous=batch.contiguous, row_bytes=widths)
        block, ids = self.blocks[batch.block], np.arange(batch.row_start, batch.row_start + batch.rows)
        if not batch.contiguous:
            ids = np.frombuffer(block, np.int64, batch.rows, batch.offset + offsets[0]).copy()
        values = [
            torch.frombuffer(
                block, dtype=part.dtype, count=batch.rows * part[0].numel(), offset=batch.offset + at
            ).view(batch.rows, *part.shape[1:])
            for part, at in zip(parts, offsets[1:], strict=True)
        ]
        return torch.from_numpy(ids), values


def table_snapshot(
    weights: Tensor,
    fields: Iterable[Tensor] = (),
    *,
    box: Box | None = None,
    selection: RowSelection = NO_ROWS,
) -> TableSnapshot:
    box = box or Box(table="t", row_start=0, row_stop=len(weights), col_start=0, col_stop=weights.shape[1])
    return TableSnapshot(
        position=0, fqn=box.table, key=box.table, box=box, weights=weights, fields=tuple(fields), selection=selection
    )  # fmt: skip
