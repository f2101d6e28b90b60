"""Row-wise Adagrad compared with a loop over rows that is written from the formula."""

from __future__ import annotations

import pytest
import torch
from deltashard.optim import RowWiseAdagrad
from deltashard_checkpoint.errors import UserError
from torch import nn


def by_hand(weight, total, ids, grads, lr, eps):
    for row in sorted(set(ids)):
        g = sum(grad for i, grad in zip(ids, grads, strict=True) if i == row)
        total[row] += float(g.square().mean())
        weight[row] -= lr / (total[row].sqrt() + eps) * g


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("initial", [0.0, 0.25])
def test_duplicate_rows_are_summed_before_the_update(sparse, initial):
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=sparse)
    weight, total = table.weight.detach().clone(), torch.full((20,), initial)
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.1, eps=1e-6, initial_accumulator_value=initial)
    for _ in range(4):
        ids = torch.randint(20, (12,))
        grads = torch.randn(12, 4)
        optimizer.zero_grad()
        (table(ids) * grads).sum().backward()
        optimizer.step()
        by_hand(weight, total, ids.tolist(), list(grads), 0.1, 1e-6)
    torch.testing.assert_close(table.weight.detach(), weight)
    torch.testing.assert_close(optimizer.state[table.weight]["sum"], total)
    start = table.weight.detach().clone()
    optimizer.zero_grad()
    (table(torch.tensor([1, 1, 7])) * torch.arange(12.0).view(3, 4)).sum().backward()
    optimizer.step()
    assert (table.weight != start).any(1).nonzero().view(-1).tolist() == [1, 7]


def test_low_precision_weights_keep_a_float32_accumulator():
    table = nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
    before = table.weight.detach().float()
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.5)
    table(torch.tensor([2, 2])).float().sum().backward()
    optimizer.step()
    assert optimizer.state[table.weight]["sum"].dtype == torch.float32
    assert optimizer.state[table.weight]["sum"][2] == 4.0
    assert torch.equal(table.weight.detach()[2], (before[2] - 0.5).bfloat16())


@pytest.mark.parametrize("arguments", [{"lr": -1}, {"eps": 0}, {"initial_accumulator_value": -1}])
def test_arguments_out_of_range_are_refused(arguments):
    """With eps = 0 a row without a gradient would become NaN."""
    with pytest.raises(UserError, match="out of range"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2, 2))], **arguments)
    with pytest.raises(UserError, match="no rows"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2))])
