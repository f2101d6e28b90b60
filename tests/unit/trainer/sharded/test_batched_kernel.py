"""Which rows a fused kernel reports as updated, and when, for every form of its input."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deltashard_checkpoint.errors import UserError
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

from deltashard.sharded.batched_kernel import BatchedKernel, kernel_of
from deltashard.sharded.extension import LookupTracker
from deltashard.tracking.marks import Marks

ROWS, COLUMNS = (20, 30), 8


class _Holder(nn.Module):
    """Holds a kernel as TorchRec does: two tables, the second with two features."""

    def __init__(self, optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD) -> None:
        super().__init__()
        self.emb_module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, COLUMNS, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
            feature_table_map=[0, 1, 1],
            optimizer=optimizer,
            learning_rate=0.5,
            bounds_check_mode=BoundsCheckMode.IGNORE,
        )
        for weights in self.emb_module.split_embedding_weights():
            nn.init.normal_(weights)
        self.fused_optimizer = SimpleNamespace(param_groups=[{"params": [], "lr": 0.5}])

    def forward(self, *bags: list[list[int]], **more: Any) -> Tensor:
        """Run the kernel on `bags`: for each feature, the ids of each bag."""
        each = [torch.tensor(bag, dtype=torch.int64) for feature in bags for bag in feature]
        ends = torch.tensor([0, *(len(bag) for bag in each)]).cumsum(0)
        out: Tensor = self.emb_module(indices=torch.cat(each), offsets=ends, **more)
        return out.sum()


class _RowRecorder:
    """Records the rows that the kernel reports for each table."""

    def __init__(self, batch: BatchedKernel) -> None:
        self.ids: dict[int, list[int]] = {0: [], 1: []}
        self.ends = [shard.listen(self._listener(nth)) for nth, shard in enumerate(batch.shards)]

    def _listener(self, nth: int) -> Any:
        return lambda ids: self.ids[nth].extend(ids.tolist())

    def take(self) -> tuple[list[int], list[int]]:
        ids = (sorted(set(self.ids[0])), sorted(set(self.ids[1])))
        self.ids = {0: [], 1: []}
        return ids


def test_batch_sizes_may_differ_by_feature() -> None:
    """The kernel counts the bags of each feature separately. An empty batch raises nothing."""
    holder = _Holder()
    recorder = _RowRecorder(BatchedKernel(holder))
    holder([[], []], [[], []], [[], []]).backward()
    sizes = [[2], [1], [3]]
    holder([[1], [2]], [[3]], [[4], [], [5]], batch_size_per_feature_per_rank=sizes).backward()
    assert recorder.take() == ([1, 2], [3, 4, 5])


def test_ids_beyond_the_table_count_as_row_zero() -> None:
    """The kernel itself reads row zero for such ids."""
    holder = _Holder()
    batch = BatchedKernel(holder)
    recorder = _RowRecorder(batch)
    zero = batch.weights[0][0].clone()
    holder([[1, 999], []], [[], []], [[], []]).backward()
    assert not torch.equal(batch.weights[0][0], zero)
    assert recorder.take() == ([0, 1], [])


def test_invalid_offsets_mark_every_id_of_every_table() -> None:
    """Marking too many rows is harmless, marking too few is not."""
    holder = _Holder()
    batch = BatchedKernel(holder)
    recorder = _RowRecorder(batch)
    for offsets in ([0, 5, 2, 3], [0, 1, 2, 9], [1, 1, 2, 3], []):
        batch.updated(torch.tensor([4, 25, 6]), torch.tensor(offsets, dtype=torch.int64), None)
        assert recorder.take() == ([0, 4, 6], [4, 6, 25])


def test_model_copy_is_not_tracked() -> None:
    holder = _Holder()
    recorder = _RowRecorder(BatchedKernel(holder))
    (hook,) = holder.emb_module._forward_hooks.values()
    copy.deepcopy(holder.emb_module)(
        indices=torch.tensor([1]), offsets=torch.tensor([0, 1, 1, 1])
    ).sum().backward()
    assert pickle.loads(pickle.dumps(hook))._batch is None
    assert recorder.take() == ([], [])


def test_failed_mark_is_reported_and_backward_continues() -> None:
    holder = _Holder()
    lost: list[Exception] = []
    LookupTracker(BatchedKernel(holder).shards[0], Marks(1), lost.append)
    holder([[5], []], [[], []], [[], []]).backward()
    assert [type(error) for error in lost] == [IndexError]


def test_module_keeps_its_kernel_while_its_memory_is_unchanged() -> None:
    """Tables are recognised by their tensors, which must be the same objects at each check."""
    holder = _Holder()
    batch = kernel_of(holder)
    assert kernel_of(holder) is batch
    tbe = holder.emb_module
    tbe.momentum1_host = nn.Parameter(tbe.momentum1_host.detach().clone())
    moved = kernel_of(holder)
    assert moved is not batch
    tbe.weights_host = nn.Parameter(tbe.weights_host.detach().clone())
    assert kernel_of(holder) is not moved


def test_learning_rates_and_counters_are_restored() -> None:
    """The group that a scheduler holds stays the same object."""
    holder, other = _Holder(), _Holder()
    for _ in range(3):
        holder([[1], []], [[], []], [[], []])
    holder.emb_module.set_learning_rate(0.25)
    holder.fused_optimizer.param_groups[0] |= {"lr": 0.125, "initial_lr": 0.5}
    saved = BatchedKernel(holder).capture()
    assert (saved["lr"], saved["iter"], saved["optimizer"]) == (0.25, 3, "exact_row_wise_adagrad")
    group = other.fused_optimizer.param_groups[0]
    BatchedKernel(other).restore(saved)
    assert BatchedKernel(other).capture() == saved
    assert group == {"params": [], "lr": 0.125, "initial_lr": 0.5}
    other([[1], []], [[], []], [[], []])
    assert BatchedKernel(other).capture()["iter"] == 4


def test_a_kernel_without_an_optimizer_is_refused() -> None:
    """The use of its gradients is unknown. An unproven optimizer may change rows that had no lookup."""
    holder = _Holder()
    batch = BatchedKernel(holder)
    holder.emb_module.optimizer = EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD
    assert "may change rows that are not looked up" in str(batch.shards[0].inexact_reason)
    holder.emb_module.optimizer = EmbOptimType.NONE
    with pytest.raises(UserError, match="without an optimizer"):
        BatchedKernel(holder)
