"""Row hashes of torch tensors: CPU kernels and torch arithmetic agree bit for bit and detect every change."""

from __future__ import annotations

import pytest
import torch
from deltashard.state import row_hash

from tests.support.gpu import DEVICES

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


def sections(dtype: torch.dtype, columns: int, rows: int = 257) -> list[torch.Tensor]:
    torch.manual_seed(3)
    wide = (torch.randn(rows, columns) * 50).to(dtype)
    return [wide, torch.rand(rows), torch.rand(rows, 1).double()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 8, 33])
def test_torch_arithmetic_agrees_with_the_kernels(dtype, columns, device, monkeypatch):
    monkeypatch.setattr(row_hash, "_GPU_CHUNK_BYTES", 1000)
    parts = sections(dtype, columns)
    there = [p.to(device) for p in parts]
    expected = row_hash.row_hashes(parts, 11)
    assert torch.equal(row_hash._on_device(there, 11, None).cpu(), expected)
    rows = torch.tensor([256, 0, 7, 7])
    assert torch.equal(row_hash._on_device(there, 11, rows.to(device)).cpu(), expected[rows])
    assert torch.equal(row_hash.row_hashes(parts, 11, rows=rows), expected[rows])


def test_large_tables_hash_the_same_on_several_threads(monkeypatch):
    table = torch.randn(100_003, 16)
    one = row_hash.row_hashes([table, table[:, 0]], 5)
    monkeypatch.setattr(row_hash, "_CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(row_hash.row_hashes([table, table[:, 0]], 5), one)


def test_every_value_changes_the_hash():
    parts = sections(torch.float32, 8)
    before = row_hash.row_hashes(parts, 1)
    for part in parts:
        flat = part.view(part.shape[0], -1)
        for column in range(flat.shape[1]):
            flat[100, column] += 1
            after = row_hash.row_hashes(parts, 1)
            assert (after != before).nonzero().view(-1).tolist() == [100]
            before = after
