"""Discovery of tables, and names that do not depend on wrappers."""

from __future__ import annotations

import pytest
import torch
from deltashard.state.discovery import TableSettings, discover, overlapping_tables
from deltashard_checkpoint.errors import UserError
from torch import nn


class MixedModel(nn.Module):
    """A model with tables, a large matrix, and values that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(10, 4)
        self.bags = nn.ModuleList([nn.EmbeddingBag(5, 4), nn.EmbeddingBag(6, 4)])
        self.module = nn.Linear(4, 3)  # a user's attribute of that name stays in the path
        self.norm = nn.BatchNorm1d(3)
        self.big = nn.Parameter(torch.zeros(1000, 2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


NAMES = {"items.weight", "bags.0.weight", "bags.1.weight"}


def test_lookups_are_tables_and_everything_else_is_dense():
    found = discover(MixedModel())
    assert set(found.tables) == NAMES
    assert {"module.weight", "module.bias", "norm.running_mean", "norm.num_batches_tracked", "big"} <= set(
        found.dense
    )
    assert "scratch" not in found.dense
    assert not NAMES & set(found.dense)


def test_matrices_above_a_size_are_tables():
    """Any 2-D parameter may be a table; small lookup tables may be dense."""
    found = discover(MixedModel(), TableSettings(min_rows=1000, min_weights=2000, lookups_min_rows=6))
    assert set(found.tables) == {"items.weight", "bags.1.weight", "big"}


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.compile,
        lambda m: torch.compile(nn.DataParallel(m)),
        torch.optim.swa_utils.AveragedModel,
        lambda m: (setattr(m, "bags", torch.compile(m.bags)), m)[
            1
        ],  # inserts _orig_mod in the middle of paths
    ],
    ids=["data_parallel", "compiled", "both", "averaged", "part"],
)
def test_wrappers_do_not_change_names(wrap):
    plain, wrapped = discover(MixedModel()), discover(wrap(MixedModel()))
    assert set(wrapped.tables) == set(plain.tables)
    assert set(plain.dense) <= set(wrapped.dense)
    assert set(wrapped.dense) - set(plain.dense) <= {"n_averaged"}


def test_shared_memory_is_detected():
    """Addresses show sharing: one storage, views, memory from outside. Adjacent memory is not shared."""
    whole = torch.zeros(30, 4)
    raw = bytearray(400)
    names = ("a", "b", "view", "left", "right", "raw", "again", "alone")
    model = nn.ModuleDict({name: nn.Embedding(5, 4) for name in names})
    model["a"].weight = nn.Parameter(whole[:5])
    model["b"].weight = nn.Parameter(whole[:5])
    model["view"].weight = nn.Parameter(whole[4:9])
    model["left"].weight = nn.Parameter(whole[10:15])
    model["right"].weight = nn.Parameter(whole[15:20])
    model["raw"].weight = nn.Parameter(torch.frombuffer(raw, dtype=torch.float32)[:20].view(5, 4))
    model["again"].weight = nn.Parameter(torch.frombuffer(raw, dtype=torch.float32)[:20].view(5, 4))
    assert overlapping_tables(discover(model)).keys() == {
        f"{n}.weight" for n in ("a", "b", "view", "raw", "again")
    }
    model.register_buffer("window", model["alone"].weight.detach()[2:3])
    assert overlapping_tables(discover(model))["alone.weight"] == "window"


def test_table_of_unsupported_dtype_is_refused() -> None:
    """The message names the table, and the position of lazy parameters."""
    with pytest.raises(UserError, match=r"0\.weight"):
        discover(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(UserError, match="complex64"):
        discover(nn.Sequential(nn.Embedding(3, 2, dtype=torch.complex64)))
