"""Checkpoints of sharded tables restore bit for bit into any other sharding. Unsupported cases are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deltashard.checkpointer import Checkpointer
from deltashard.errors import UserError
from deltashard.sharded.embedding_module import find
from deltashard.state.discovery import discover
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

from tests.support.trainer import sharded_case as case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
    from torchrec.distributed.model_parallel import DMPCollection
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:torchrec",
    "ignore::UserWarning:torchrec",
    "ignore:fbgemm..dense_embedding_codegen_lookup_function:UserWarning",  # logged at the first backward pass
)


@pytest.fixture(autouse=True)
def _single_rank_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _checkpointer(folder: Path, model: Any, optimizer: Any, **more: Any) -> Checkpointer:
    return Checkpointer(
        model,
        optimizer,
        url=str(folder / "store"),
        run="sharded",
        encoding="fp32",
        differential="consecutive",
        tracking=TrackingSettings(hash_below_bytes=0),
        grace_s=None,
        **more,
    )


def _whole(ckpt: Checkpointer) -> dict[str, Tensor]:
    """Return unsharded tables and their state. Row-wise state of column shards is averaged by their widths."""
    found: dict[str, Tensor] = {}
    for table in ckpt._program.tracking.tables:
        box, schema = table.box, table.schema
        rows = slice(box.row_start, box.row_stop)
        whole = found.setdefault(table.fqn, torch.zeros(schema.rows, schema.columns))
        whole[rows, box.col_start : box.col_stop] = table.param.detach()
        for name, value in table.state_tensors().items():
            shape = (schema.rows, schema.columns)[: value.dim()]
            state = found.setdefault(f"{table.fqn} {name}", torch.zeros(shape))
            if value.dim() == 2:
                state[rows, box.col_start : box.col_stop] = value
            else:
                state[rows] += value * ((box.col_stop - box.col_start) / schema.columns)
    return found


def _equal(a: dict[str, Tensor], b: dict[str, Tensor], *, bits: bool = True) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]) if bits else torch.allclose(value, b[name], rtol=1e-6), name


def _saved(folder: Path, training: Any, steps: int = 5) -> dict[str, Tensor]:
    ckpt = _checkpointer(folder, training.model, training.dense)
    assert ckpt.restore() is None
    for step in range(steps):
        training.train(case.batch(step, 0))
        ckpt.step()
        ckpt.save().wait()
    whole = _whole(ckpt)
    ckpt.close()
    return whole


@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [
        ("table_wise", "rowwise"),
        ("row_wise", "rowwise"),
        ("row_wise", "adagrad"),
        ("column_wise", "sgd"),
        ("data_parallel", "rowwise"),
    ],
)
def test_restored_sharded_training_continues_exactly(tmp_path: Path, sharding: str, optimizer: str) -> None:
    """A new process' model has other initial rows. It restores everything, and its next steps are the same."""
    first = case.ShardedTraining(sharding, optimizer)
    saved = _saved(tmp_path, first)
    torch.manual_seed(99)
    again = case.ShardedTraining(sharding, optimizer, lr=0.7)
    with torch.no_grad():
        for found in again.model.parameters():
            found.add_(1)
    ckpt = _checkpointer(tmp_path, again.model, [again.model.fused_optimizer, again.dense])
    restored = ckpt.restore()
    assert restored.step == 5
    assert restored.notes, "the script sets another learning rate"
    assert all("set other hyperparameters than this one (lr " in note for note in restored.notes)
    _equal(_whole(ckpt), saved)
    for step in range(5, 8):
        first.train(case.batch(step, 0))
        again.train(case.batch(step, 0))
        ckpt.step()
    other = _checkpointer(tmp_path / "other", first.model, first.dense)
    _equal(_whole(ckpt), _whole(other))
    ckpt.close()
    other.close()


def test_restore_into_unsharded_model(tmp_path: Path) -> None:
    """Unsharded collections have tables of the same names, for example for evaluation."""
    saved = _saved(tmp_path, case.ShardedTraining("column_wise"))
    plain = case.ShardedModel("cpu")
    ckpt = _checkpointer(tmp_path, plain, ())
    assert ckpt.restore(weights_only=True) is not None
    _equal(dict(plain.ebc.named_parameters(prefix="ebc")) | dict(plain.ec.named_parameters(prefix="ec")), {
        name: value for name, value in saved.items() if " " not in name
    })  # fmt: skip
    ckpt.close()


def test_unfused_table_keeps_state_of_same_optimizer(tmp_path: Path) -> None:
    """Fused Adagrad has the same state as torch's Adagrad. Adam has different state and is refused."""
    first = case.ShardedTraining("row_wise", "adagrad", dense=torch.optim.Adagrad)
    saved = _saved(tmp_path, first)
    replicated = case.ShardedTraining("data_parallel", "adagrad", dense=torch.optim.Adagrad)
    ckpt = _checkpointer(tmp_path, replicated.model, replicated.dense)
    assert ckpt.restore() is not None
    _equal(_whole(ckpt), saved)
    for step in range(5, 8):
        replicated.train(case.batch(step, 0))
        ckpt.step()
    ckpt.close()


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            "rowwise",
            "data_parallel",
            r"fused exact_row_wise_adagrad and is updated by Adam now.*ParameterConstraints",
        ),
        ("rowwise", "adagrad", "field sum is stored rowwise, the model has it pointwise"),
        ("rowwise", "sgd", "'sum' is stored rowwise of float32, the fused optimizer has none"),
        ("sgd", "rowwise", "It was updated by exact_sgd and is updated by exact_row_wise_adagrad"),
    ],
)
def test_other_fused_optimizer_is_refused(tmp_path: Path, then: str, now: str, message: str) -> None:
    """One rule's state is not converted to another's. The remedy names the option that keeps tables fused."""
    _saved(tmp_path, case.ShardedTraining("row_wise", then))
    replicated = now == "data_parallel"
    training = case.ShardedTraining(
        "data_parallel" if replicated else "row_wise", then if replicated else now
    )
    ckpt = _checkpointer(tmp_path, training.model, training.dense)
    with pytest.raises(UserError, match=message):
        ckpt.restore()
    ckpt.close()


def test_untested_sharding_is_refused_by_name() -> None:
    """The cases are other sharded modules, two-dimensional parallelism, and TorchRec optimizers with separate state."""
    training = case.ShardedTraining("table_wise")
    for kind, message in (
        (DMPCollection, "2D parallelism"),
        (ShardedManagedCollisionEmbeddingBagCollection, "ShardedManagedCollisionEmbeddingBagCollection is"),
    ):
        module = kind.__new__(kind)  # none of these modules can be built on a CPU
        nn.Module.__init__(module)
        with pytest.raises(UserError, match=message):
            discover(nn.ModuleDict({"it": module}), find=find)
    fused, over = training.model.fused_optimizer, training.bare.over.parameters()
    for optimizer in (
        WarmupOptimizer(fused, [WarmupStage(WarmupPolicy.LINEAR, 10)]),
        ZeroRedundancyOptimizer(over, torch.optim.Adam),
    ):
        with pytest.raises(UserError, match=f"{type(optimizer).__name__} is not supported"):
            Tracking(training.model, [optimizer])
    _apply_optimizer_in_backward(torch.optim.SGD, training.bare.over.parameters(), {"lr": 0.1})
    with pytest.raises(UserError, match=r"only attached to it.*over.weight"):
        Tracking(training.model)


def test_external_write_marks_all_rows() -> None:
    """Loading a state_dict increments torch's version of the kernel's memory. The kernel's own updates do not."""
    training = case.ShardedTraining("column_wise")
    tracking = Tracking(training.model, settings=TrackingSettings(hash_below_bytes=0))
    watch = case.MarkChecker(tracking)
    training.train(case.batch(0, 0))
    case.check_marked(tracking, watch.check(), (0,), 1)
    training.model.load_state_dict(training.model.state_dict())
    assert all(
        len(ids) == table.marks.rows
        for table, ids in zip(tracking.tables, watch.check().values(), strict=True)
    )
    tracking.close()
