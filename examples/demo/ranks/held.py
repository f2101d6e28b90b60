"""SHA-256 sums of a rank's content from TorchRec's own view of its live tensors, and a file with the last content.

A rank whose peer ends may hang in a collective that Python cannot interrupt, so its rows must be recorded earlier. Rows
change only in the fused updates within the backward pass. `LastShardState` records them after each update, before the
next collective. The last record is the rank's content when it ended, including updates of an unfinished step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from content import Content, Kept, dense_of, sha256, short
from evidence import write_atomic
from sharded_model import SHARDING
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer


def held(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> Content:
    """Return this rank's complete content, after at least one step."""
    return {"shards": _shards(model, list(SHARDING)), "dense": _dense(model, optimizer)}


def _shards(model: DistributedModelParallel, tables: Collection[str]) -> list[dict[str, Any]]:
    found = []
    fused = model.fused_optimizer.state_dict()["state"]
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards") or short(name) not in tables:
            continue
        for number, shard in enumerate(value.local_shards()):
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            state = [sha256(each.local_shards()[number].tensor) for each in fused[name].values()]
            found.append(
                {
                    "table": name,
                    "rows": [first, first + rows],
                    "weights": sha256(shard.tensor),
                    "state": sorted(state),
                }
            )
    return found


def _dense(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict[str, str]:
    dense = {name: value for name, value in model.state_dict().items() if not hasattr(value, "local_shards")}
    return dense_of(dense, optimizer.state_dict()["state"])


def _kernels(model: DistributedModelParallel) -> Iterator[BatchedFusedEmbeddingBag]:
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in module._lookups:  # noqa: SLF001 - TorchRec offers no accessor
                yield from (each for each in lookup.modules() if isinstance(each, BatchedFusedEmbeddingBag))


class LastShardState:
    """One rank's current `Kept`, in a file, from the restore on."""

    def __init__(
        self, path: Path, model: DistributedModelParallel, optimizer: CombinedOptimizer, *, step: int
    ) -> None:
        """Start with the restored content; training continues after `step`."""
        self._path, self._model, self._optimizer = path, model, optimizer
        content = held(model, optimizer)
        shards = [shard | {"step": step} for shard in content["shards"]]
        self._kept: Kept = content | {"step": step, "shards": shards}
        write_atomic(path, self._kept)
        for kernel in _kernels(model):
            tables = [table.name for table in kernel.config.embedding_tables]
            kernel.emb_module.register_forward_hook(partial(self._looked_up, tables))

    def _looked_up(self, tables: Collection[str], _kernel: nn.Module, _given: Any, output: Tensor) -> None:
        if output.grad_fn is not None:  # empty where no gradient is computed
            output.grad_fn.register_hook(lambda *_: self._updated(tables))

    def _updated(self, tables: Collection[str]) -> None:
        """Record that a kernel has updated its shards of `tables`, in the step after the last finished one."""
        step = self._kept["step"] + 1
        others = [shard for shard in self._kept["shards"] if short(shard["table"]) not in tables]
        now = [shard | {"step": step} for shard in _shards(self._model, tables)]
        self._kept = self._kept | {"shards": others + now}
        write_atomic(self._path, self._kept)

    def finished(self, step: int) -> None:
        self._kept = self._kept | {"step": step, "dense": _dense(self._model, self._optimizer)}
        write_atomic(self._path, self._kept)
