"""The gather of a cut: chosen rows of live tensors of every layout, on one thread and on several, of whole tables and shards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deltashard.cut import block_writer as cut
from deltashard.tracking.marks import RowSelection
from deltashard_checkpoint.format.schema import Box
from deltashard_proto.arena_layout import sections

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_rows_arrive_bit_for_bit(dtype, threads, monkeypatch):
    """Whole rows, row-wise state, a strided view of a wider tensor; with a batch that several threads share."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cut, "_SPLIT_BYTES", 1 << 10)
    torch.manual_seed(0)
    wide = (torch.randn(5000, 40) * 50).to(dtype)
    chosen = torch.nonzero(torch.rand(5000) < 0.3).view(-1)
    for part in (wide, wide[:, 3].contiguous(), wide[:, 8:24], wide[:, :1]):
        out = torch.zeros((len(chosen), *part.shape[1:]), dtype=dtype)
        cut._gather(part, chosen, 0, out)
        assert torch.equal(out, part[chosen])


def test_a_failing_thread_is_heard():
    """A row outside of the table raises, whichever thread met it."""
    with pytest.raises(Exception, match="row 10 of a table of 10"):
        cut._gather(torch.zeros(10, 4), torch.tensor([0, 10]), 0, torch.zeros(2, 4))


class _Blocks:
    """A stream and its arena: one block after the other, and what was sent."""

    def __init__(self):
        self.shape = SimpleNamespace(block_bytes=1 << 20)
        self.blocks, self.sent = [], []

    def block(self, at):
        return memoryview(self.blocks[at])

    def take(self):
        self.blocks.append(bytearray(self.shape.block_bytes))
        return len(self.blocks) - 1

    def send(self, message, _bytes):
        self.sent.append(message.rows)


@pytest.mark.parametrize("chosen", [None, [0, 3, 9]], ids=["all", "chosen"])
def test_rows_of_a_shard_leave_in_the_whole_tables_coordinates(chosen):
    """Ids, row_start and columns are global; what is gathered, and what the observer is told of, is the shard's."""
    box = Box(table="t", row_start=100, row_stop=110, col_start=8, col_stop=12)
    weights = torch.arange(40, dtype=torch.float32).view(10, 4)
    stream, seen = _Blocks(), []
    writer = cut.BlockWriter(
        stream, block=stream.take, send=stream.send, observe=lambda cut, ids, parts: seen.append((cut.box, [*map(int, ids)], parts))
    )  # fmt: skip
    ids = None if chosen is None else torch.tensor(chosen)
    writer.table(
        cut.TableCut(
            position=3, fqn="t", key="t[100:110, 8:12]", box=box, weights=weights, fields=(weights[:, 0].clone(),),
            selection=RowSelection(all=ids is None, ids=ids),
        )
    )  # fmt: skip
    (batch,) = stream.sent
    rows = list(range(10)) if chosen is None else chosen
    assert (batch.table, batch.rows, batch.col_start, batch.col_stop) == (3, len(rows), 8, 12)
    assert (batch.contiguous, batch.row_start) == ((True, 100) if chosen is None else (False, 0))
    ((told, told_ids, parts),) = seen
    assert (told, told_ids) == (box, [100 + row for row in rows])
    assert torch.equal(parts[0], weights[rows])
    assert torch.equal(parts[1], weights[rows, 0])
    if chosen is not None:
        offsets, _ = sections(3, contiguous=False, row_bytes=[16, 4])
        assert np.frombuffer(stream.blocks[0], np.int64, 3, offsets[0]).tolist() == [100, 103, 109]
