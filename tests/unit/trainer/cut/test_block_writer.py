"""The gather of a cut: chosen rows of live tensors of every layout, on one thread and on several, of whole tables and shards."""

from __future__ import annotations

import pytest
import torch
from deltashard.cut import block_writer as cut
from deltashard.tracking.marks import RowSelection
from deltashard_checkpoint.format.schema import Box

from tests.support.trainer.arena import Arena, cut_of

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


@pytest.mark.parametrize("chosen", [None, [0, 3, 9]], ids=["all", "chosen"])
def test_rows_of_a_shard_leave_in_the_whole_tables_coordinates(chosen):
    """Ids, row_start and columns are global; what is gathered, and what the observer is told of, is the shard's."""
    box = Box(table="t", row_start=100, row_stop=110, col_start=8, col_stop=12)
    weights = torch.arange(40, dtype=torch.float32).view(10, 4)
    state = weights[:, 0].clone()
    arena, seen = Arena(1 << 20), []
    ids = None if chosen is None else torch.tensor(chosen)
    arena.writer(observe=lambda *told: seen.append(told)).table(
        cut_of(weights, [state], box=box, selection=RowSelection(all=ids is None, ids=ids))
    )
    (batch,) = arena.sent
    rows = list(range(10)) if chosen is None else chosen
    assert (batch.rows, batch.col_start, batch.col_stop) == (len(rows), 8, 12)
    assert (batch.contiguous, batch.row_start) == ((True, 100) if chosen is None else (False, 0))
    ((told, told_ids, parts),) = seen
    found, values = arena.rows(batch, [weights, state])
    assert told.box == box
    assert found.tolist() == [*map(int, told_ids)] == [100 + row for row in rows]
    for each in (parts, values):
        assert torch.equal(each[0], weights[rows])
        assert torch.equal(each[1], state[rows])
