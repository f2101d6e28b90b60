"""The gather of a snapshot: selected rows of tensors of every layout, on one thread and on several."""

from __future__ import annotations

import pytest
import torch
from deltashard.snapshot import block_writer

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_rows_are_copied_bit_for_bit(dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(block_writer, "_SPLIT_BYTES", 1 << 10)
    torch.manual_seed(0)
    wide = (torch.randn(5000, 40) * 50).to(dtype)
    chosen = torch.nonzero(torch.rand(5000) < 0.3).view(-1)
    for part in (wide, wide[:, 3].contiguous(), wide[:, 8:24], wide[:, :1]):
        out = torch.zeros((len(chosen), *part.shape[1:]), dtype=dtype)
        block_writer._gather(part, chosen, 0, out)
        assert torch.equal(out, part[chosen])


def test_thread_failure_is_raised():
    with pytest.raises(Exception, match="row 10 of a table of 10"):
        block_writer._gather(torch.zeros(10, 4), torch.tensor([0, 10]), 0, torch.zeros(2, 4))
