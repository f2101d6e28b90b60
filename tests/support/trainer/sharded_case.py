"""A small model of TorchRec, sharded in every way that runs on CPUs, and the expected tracking after each step.

It is a scenario for `rank_zygote`: `every_case` runs every case of `cases(WORLD)` as one rank and returns {case: ""
or the error}. A rank whose case fails ends there: its peers would wait for it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.train_pipeline.train_pipelines import (
        TorchCompileConfig,
        TrainPipelineBase,
        TrainPipelinePT2,
        TrainPipelineSparseDist,
        TrainPipelineSparseDistLite,
    )
    from torchrec.distributed.types import ShardingType
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.streamable import Pipelineable

from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import Tensor, nn

COLUMNS = 32
BAGS = {"tiny": (3, ("f3",)), "t0": (97, ("f0",)), "t1": (60, ("f1", "f2"))}
"""Over four ranks the last rank has no row of `tiny`, so `tiny` must not be its kernel's last table: FBGEMM's backward then
reads past the end of the tables and fails in about one process of twenty."""
SEQUENCES = {"s": (41, ("fs",))}
FEATURES = ("f0", "f1", "f2", "f3", "fs")
BATCH = 4

SHARDINGS = ("data_parallel", "table_wise", "row_wise", "column_wise", "table_column_wise")
MULTI_HOST_SHARDINGS = ("table_row_wise", "grid_shard")
"""Shardings over hosts of two ranks each."""
SEQUENCE_SHARDINGS = {
    "table_column_wise": "column_wise",
    "table_row_wise": "row_wise",
    "grid_shard": "column_wise",
    "data_parallel": "table_wise",  # the data-parallel kernel for sequences is wrong on CPUs
}
"""Sharding of sequences where they cannot be sharded like the bags."""
OPTIMIZERS = {
    "rowwise": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}
PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "sparse_dist_lite": TrainPipelineSparseDistLite,
    "pt2": partial(
        TrainPipelinePT2, compile_configs=TorchCompileConfig(backend="eager")
    ),  # from its 4th step on
}
"""Pipelines that run on CPUs; the others need a stream of an accelerator."""


@dataclasses.dataclass(frozen=True)
class ShardedCase:
    """How the tables are sharded and updated, and what calls the model."""

    sharding: str
    optimizer: str = "rowwise"
    pipeline: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.sharding, self.optimizer, self.pipeline)))


def cases(world: int) -> list[ShardedCase]:
    """Return each sharding, optimizer and pipeline once at two ranks; at four, only cases that differ there.

    At one rank, return what compiles the model: that takes each rank 45 s.
    """
    if world == 1:
        return [ShardedCase("row_wise", "rowwise", "pt2")]
    if world == 4:
        return [ShardedCase(sharding) for sharding in ("row_wise", *MULTI_HOST_SHARDINGS)]
    found = [ShardedCase(sharding) for sharding in SHARDINGS]
    found += [ShardedCase("row_wise", "adagrad"), ShardedCase("column_wise", "sgd")]
    return found + [
        ShardedCase("row_wise", "rowwise", pipeline) for pipeline in PIPELINES if pipeline != "pt2"
    ]


@dataclasses.dataclass
class ShardedBatch(Pipelineable):
    """The input of one step of one rank."""

    sparse: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> ShardedBatch:
        return ShardedBatch(self.sparse.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)

    def pin_memory(self) -> ShardedBatch:
        return ShardedBatch(self.sparse.pin_memory())


def batch(step: int, rank: int) -> ShardedBatch:
    """Return the batch, equal for every caller; the one of step 3 contains no lookups."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    values, lengths = [], []
    for feature in FEATURES:
        rows = next(rows for rows, names in (BAGS | SEQUENCES).values() if feature in names)
        count = torch.randint(0, 3, (BATCH,), generator=rng) * (step != 3)
        lengths.append(count)
        values.append(torch.randint(rows, (int(count.sum()),), generator=rng))
    return ShardedBatch(
        KeyedJaggedTensor.from_lengths_sync(
            keys=list(FEATURES), values=torch.cat(values), lengths=torch.cat(lengths)
        )
    )


def looked_up(table: str, step: int, world: int) -> Tensor:
    """Return rows of the whole table that the ranks' batches of a step look up together, ascending."""
    features = (BAGS | SEQUENCES)[table][1]
    parts = [batch(step, rank).sparse[feature].values() for rank in range(world) for feature in features]
    return torch.unique(torch.cat(parts))


class ShardedModel(nn.Module):
    """Bags and sequences under one linear layer; returns (loss, prediction)."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=COLUMNS, num_embeddings=rows, feature_names=list(names)
                )
                for name, (rows, names) in BAGS.items()
            ],
            device=torch.device(device),
        )
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name, embedding_dim=COLUMNS, num_embeddings=rows, feature_names=list(names)
                )
                for name, (rows, names) in SEQUENCES.items()
            ],
            device=torch.device(device),
        )
        self.over = nn.Linear(5 * COLUMNS, 1)

    def forward(self, batch: ShardedBatch) -> tuple[Tensor, Tensor]:
        bags = self.ebc(batch.sparse).values()
        sequence = self.ec(batch.sparse)["fs"].values().sum(0).expand(BATCH, COLUMNS)
        prediction = self.over(torch.cat([bags, sequence], dim=1)).squeeze(1)
        return (prediction - 1).square().mean(), prediction


class _BagSharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [kind.value for kind in ShardingType]


class ShardedTraining:
    """The model under `DistributedModelParallel`, as one rank sees it."""

    def __init__(
        self, sharding: str, optimizer: str = "rowwise", lr: float = 0.1, dense: Any = torch.optim.Adam
    ) -> None:
        torch.manual_seed(dist.get_rank())  # each rank makes the rows that it holds
        fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": lr}
        sharders: Any = [
            _BagSharder(fused_params=dict(fused)),
            EmbeddingCollectionSharder(fused_params=dict(fused)),
        ]
        model = ShardedModel()
        sequence = SEQUENCE_SHARDINGS.get(sharding, sharding)
        constraints = {
            name: ParameterConstraints(
                sharding_types=[sharding if name in BAGS else sequence], min_partition=8
            )
            for name in BAGS | SEQUENCES
        }
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=dist.get_world_size(),
                local_world_size=min(2, dist.get_world_size()),
                compute_device="cpu",
            ),
            constraints=constraints,
        )
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        self.model = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=plan,
            sharders=sharders,
            # DDP keeps its buckets so: after a new layout at the first step, more than two ranks sum in another order.
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
        )
        named = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = dense(named.values(), lr=0.01)

    @property
    def bare(self) -> nn.Module:
        return self.model.module

    def train(self, *batches: ShardedBatch) -> None:
        """Do one step of the dense optimizer, over one or several backward passes."""
        self.dense.zero_grad()
        for each in batches:
            self.model(each)[0].backward()
        self.dense.step()


def check_shards(tracking: Tracking, model: nn.Module) -> None:
    """Check that shards and their state are where TorchRec declares, in the declared memory."""
    for name, value in model.state_dict().items():
        mine = [table for table in tracking.tables if table.fqn == name]
        if not hasattr(value, "local_shards"):
            places = {tracking.dense()[name].data_ptr()} if not mine else {t.param.data_ptr() for t in mine}
            assert places == {value.data_ptr()}, name
            continue
        held = {
            (*shard.metadata.shard_offsets, *shard.tensor.shape, shard.tensor.data_ptr())
            for shard in value.local_shards()
            if shard.tensor.shape[0]
        }
        found = {(t.box.row_start, t.box.col_start, *t.param.shape, t.param.data_ptr()) for t in mine}
        assert held == found, name
        assert bool(mine) != (name in tracking.inventory.elsewhere), name
    for name, state in model.fused_optimizer.state_dict()["state"].items():
        held = {s.tensor.data_ptr() for v in state.values() for s in v.local_shards() if s.tensor.shape[0]}
        mine = [table for table in tracking.tables if table.fqn == name]
        assert held == {t.data_ptr() for table in mine for t in table.state_tensors().values()}, name


def check_tiling(tracking: Tracking, world: int) -> None:
    """Check that the boxes of all ranks tile the tables, each cell once; a replicated table is whole on every rank."""
    gathered: list[Any] = [None] * world
    dist.all_gather_object(
        gathered, [(t.box, t.schema.rows, t.schema.columns, t.found.replicated) for t in tracking.tables]
    )
    cells: dict[str, Tensor] = {}
    for rank, boxes in enumerate(gathered):
        for box, rows, columns, replicated in boxes:
            if replicated and rank:
                continue
            part = cells.setdefault(box.table, torch.zeros(rows, columns, dtype=torch.int64))
            part[box.row_start : box.row_stop, box.col_start : box.col_stop] += 1
    names = {f"ebc.embedding_bags.{n}.weight" for n in BAGS} | {
        f"ec.embeddings.{n}.weight" for n in SEQUENCES
    }
    assert cells.keys() == names
    assert all(bool((part == 1).all()) for part in cells.values())


class MarkChecker:
    """Compares the changes of all tables since the last check with their marks."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking = tracking
        self.snapshot_id = 0
        self.changes = 0
        """Rows that changed, in all."""
        self.check()

    def check(self) -> dict[str, Tensor]:
        """Return the marked rows by shard; fail if a changed row is unmarked. Then commit a snapshot of the marked rows."""
        self.tracking.refresh()
        marked = {}
        for table in self.tracking.tables:
            rows = table.select_rows("since_commit")
            ids = torch.arange(table.marks.rows) if rows.ids is None else rows.ids
            marked[table.key] = ids
            if self.snapshot_id:
                was, now = self._was[table.key], self._sections(table)
                changed = torch.full((table.marks.rows,), was.keys() != now.keys())  # new state
                for name in was.keys() & now.keys():
                    changed |= (was[name] != now[name]).view(len(changed), -1).any(1)
                missed = set(changed.nonzero().view(-1).tolist()) - set(ids.tolist())
                assert not missed, f"{table.key} changed in rows {missed} without a mark"
                self.changes += int(changed.sum())
        self._was = {
            table.key: {name: value.clone() for name, value in self._sections(table).items()}
            for table in self.tracking.tables
        }
        self.snapshot_id += 1
        self.tracking.snapshot_taken(self.snapshot_id, "since_commit", full=self.snapshot_id == 1)
        self.tracking.committed(self.snapshot_id, baseline=self.snapshot_id == 1)
        self.tracking.steps.end_step()
        return marked

    @staticmethod
    def _sections(table: Any) -> dict[str, Tensor]:
        return {"weights": table.param.detach(), **table.state_tensors()}


def check_marked(tracking: Tracking, marked: dict[str, Tensor], steps: tuple[int, ...], world: int) -> None:
    """Check that tables tracked by lookups have exactly the rows that the steps updated."""
    for table in tracking.tables:
        if table.tracker != "lookups":
            continue
        name = table.fqn.split(".")[2]
        ids = torch.unique(torch.cat([looked_up(name, step, world) for step in steps] or [torch.empty(0)]))
        mine = ids[(ids >= table.box.row_start) & (ids < table.box.row_stop)] - table.box.row_start
        assert marked[table.key].tolist() == mine.tolist(), f"{table.key} in steps {steps}"


def run(case: ShardedCase) -> None:
    """Run one case as one rank; raise where tracking is wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    training = ShardedTraining(case.sharding, case.optimizer)
    tracking = Tracking(
        training.model, [training.dense], settings=TrackingSettings(hash_below_bytes=0, audit_rows=8)
    )
    check_shards(tracking, training.model)
    check_tiling(tracking, world)
    _check_trackers(case, tracking)
    watch = MarkChecker(tracking)
    drive = _pipelined if case.pipeline else _plain
    for steps in drive(case, training, rank):
        check_marked(tracking, watch.check(), steps, world)
    check_shards(tracking, training.model)
    assert watch.changes or not tracking.tables
    _check_trackers(case, tracking)
    tracking.close()


def _check_trackers(case: ShardedCase, tracking: Tracking) -> None:
    for table in tracking.tables:
        by_hash = case.sharding == "data_parallel" and table.fqn.startswith("ebc.")
        assert table.tracker == ("hashes" if by_hash else "lookups"), f"{table.key}: {table.reason}"
        assert table.found.replicated == by_hash


def _plain(case: ShardedCase, training: ShardedTraining, rank: int) -> Iterator[tuple[int, ...]]:
    """Train steps, with evaluations in between; yield the steps that were trained on since the last yield."""
    for step in range(5):
        training.train(batch(step, rank))
        yield (step,)
        training.model.eval()
        with torch.no_grad():
            training.model(batch(step + 50, rank))
        training.model.train()
        yield ()
    training.train(batch(5, rank), batch(6, rank))
    yield (5, 6)
    if case.sharding == "data_parallel":
        return
    ahead = training.bare(batch(7, rank))[0]
    yield ()  # looked up but not updated yet: the snapshot in between must not clear the mark
    ahead.backward()
    yield (7,)
    training.bare(batch(8, rank))
    yield ()


def _pipelined(case: ShardedCase, training: ShardedTraining, rank: int) -> Iterator[tuple[int, ...]]:
    """Train under a pipeline, which loads the next batches ahead."""
    pipeline = PIPELINES[case.pipeline](training.model, training.dense, torch.device("cpu"))
    batches = iter([batch(step, rank) for step in range(8)])
    for step in range(8):
        pipeline.progress(batches)
        yield (step,)
        if step == 4 and case.pipeline == "base":
            training.model.eval()
            with torch.no_grad():
                training.model(batch(50, rank))
            training.model.train()
            yield ()


def every_case(rank: int, workdir: Path) -> dict[str, str]:
    """Run one rank of every case in `cases`."""
    logging.disable(logging.WARNING)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # a warning of torchrun on hosts of two ranks
    results: dict[str, str] = {}
    for case in cases(dist.get_world_size()):
        try:
            run(case)
            results[str(case)] = ""
        except Exception:
            results[str(case)] = traceback.format_exc()
            break
    return results
