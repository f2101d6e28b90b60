"""Discovery: what is a table, and names that do not depend on wrappers."""

from __future__ import annotations

import pytest
import torch
from deltashard.state.discovery import FoundTable, Sharded, TableSettings, discover, sharing
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import Box, TableSchema
from torch import nn


class Model(nn.Module):
    """Tables, a large matrix, and things that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(10, 4)
        self.bags = nn.ModuleList([nn.EmbeddingBag(5, 4), nn.EmbeddingBag(6, 4)])
        self.module = nn.Linear(4, 3)  # a user's own attribute of that name stays in the path
        self.norm = nn.BatchNorm1d(3)
        self.big = nn.Parameter(torch.zeros(1000, 2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


NAMES = {"items.weight", "bags.0.weight", "bags.1.weight"}


def test_lookups_are_tables_and_everything_else_is_dense():
    """Parameters and persistent buffers, each once."""
    found = discover(Model())
    assert set(found.tables) == NAMES
    assert {"module.weight", "module.bias", "norm.running_mean", "norm.num_batches_tracked", "big"} <= set(
        found.dense
    )
    assert "scratch" not in found.dense
    assert not NAMES & set(found.dense)


def test_large_matrices_are_tables_from_a_size_on():
    """Any 2-D parameter may be a table; small lookups may be dense."""
    found = discover(Model(), TableSettings(min_rows=1000, min_weights=2000, lookups_min_rows=6))
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
def test_wrappers_leave_no_trace_in_names(wrap):
    """The same names whatever wraps the model."""
    plain, wrapped = discover(Model()), discover(wrap(Model()))
    assert set(wrapped.tables) == set(plain.tables)
    assert set(plain.dense) <= set(wrapped.dense)
    assert set(wrapped.dense) - set(plain.dense) <= {"n_averaged"}


def test_tied_parameters_have_one_name_and_aliases():
    """The first path is canonical; all owners are known."""
    model = Model()
    model.output = nn.Linear(4, 10, bias=False)
    model.output.weight = model.items.weight
    found = discover(model)
    assert found.tables["items.weight"].aliases == ("output.weight",)
    assert found.aliases == {"output.weight": "items.weight"}
    assert "output.weight" not in found.dense
    assert len(found.tables["items.weight"].owners) == 2
    model.again = model.output
    assert discover(model).tables["items.weight"].aliases == ("output.weight", "again.weight")


def test_memory_that_two_tensors_share_is_found():
    """By address: Parameters over one storage, views of it, memory from outside; neighbours do not share."""
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
    assert sharing(discover(model)).keys() == {f"{n}.weight" for n in ("a", "b", "view", "raw", "again")}
    model.register_buffer("window", model["alone"].weight.detach()[2:3])
    assert sharing(discover(model))["alone.weight"] == "window"


class _Holder(nn.Module):
    """Shards its table itself: two column shards of it are here."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = [torch.zeros(6, 4), torch.ones(6, 4)]
        self.inner = nn.Linear(3, 3)


def _find(path: str, module: nn.Module) -> Sharded | None:
    if not isinstance(module, _Holder):
        return None
    fqn = f"{path}.weight"
    found = [
        FoundTable(
            fqn=fqn,
            rows=6,
            columns=16,
            box=Box(table=fqn, row_start=0, row_stop=6, col_start=start, col_stop=start + 4),
            param=shard,
            aliases=(),
            owners=(),
        )
        for start, shard in zip((0, 8), module.shards, strict=True)
    ]
    away = TableSchema(fqn=f"{path}.away", rows=5, columns=4, dtype="float32")
    return Sharded(shards=tuple(found), elsewhere=(away,))


class _Wrapper(nn.Module):
    """As TorchRec wraps a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._dmp_wrapped_module = model


def test_a_module_that_shards_its_tables_itself_is_asked() -> None:
    """Under the names without wrappers; what else is inside of it is its own."""
    holder = _Holder()
    model = _Wrapper(nn.ModuleDict({"it": holder, "plain": nn.Linear(2, 2)}))
    inventory = discover(model, find=_find)
    assert list(inventory.tables) == ["it.weight[0:6, 0:4]", "it.weight[0:6, 8:12]"]
    assert list(inventory.elsewhere) == ["it.away"]
    assert list(inventory.dense) == ["plain.weight", "plain.bias"]
    assert [inventory.names[shard] for shard in holder.shards] == list(inventory.tables)
    assert inventory.sharded == [holder]


def test_a_sharded_table_of_a_type_that_cannot_be_stored_is_refused() -> None:
    """By the table's name; lazy parameters say where they are, too."""
    with pytest.raises(UserError, match=r"0\.weight"):
        discover(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(UserError, match="complex64"):
        discover(nn.Sequential(nn.Embedding(3, 2, dtype=torch.complex64)))
    holder = _Holder()
    holder.shards[0] = holder.shards[0].to(torch.float8_e5m2)
    with pytest.raises(UserError, match="float8_e5m2 cannot be stored.*it.weight"):
        discover(nn.ModuleDict({"it": holder}), find=_find)
