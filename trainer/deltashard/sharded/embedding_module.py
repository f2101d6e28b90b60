"""Sharded embedding modules of TorchRec: which parts of which tables are here, and what the tables are called.

A table has the name that it has in the plain module (`ebc.embedding_bags.t1.weight`), so that a checkpoint goes from
any sharding to any other, and to none. Its shards are read from the kernels that look rows up: a shard's box is what
the kernel's own table says, in the whole table's rows and columns, and its tensor is the kernel's own memory.

TorchRec is not imported here: a model that holds such a module has loaded it. What was never seen to work is refused,
by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import Box, TableSchema
from torch import nn

from deltashard.sharded.batched_kernel import kernel_of
from deltashard.state.discovery import REPLICATED_REASON, FoundTable, ModuleShards, world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What one class of sharded modules calls things."""

    holder: str
    """The attribute that holds the tables, in the plain module as well."""
    configs: str
    """The attribute with the tables' configurations."""


_KINDS = {
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection": _Kind(
        holder="embedding_bags", configs="_embedding_bag_configs"
    ),
    "torchrec.distributed.embedding.ShardedEmbeddingCollection": _Kind(
        holder="embeddings", configs="_embedding_configs"
    ),
}
_FUSED = ("BatchedFusedEmbedding", "BatchedFusedEmbeddingBag")
_DENSE = ("BatchedDenseEmbedding", "BatchedDenseEmbeddingBag")
_WHOLE_MEMORY = ("DEVICE", "HOST")
"""Where a kernel may keep rows: in one memory, without a cache in front."""
_DTYPES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}


def find(path: str, module: nn.Module) -> ModuleShards | None:
    """A `discovery.Finder`: what a sharded embedding module at `path` holds.

    Raises:
        UserError: a kind of sharding that is not supported.
    """
    types = sys.modules.get("torchrec.distributed.types")
    if types is None:
        return None
    collection = getattr(sys.modules.get("torchrec.distributed.model_parallel"), "DMPCollection", None)
    if collection is not None and isinstance(module, collection):
        raise UserError(
            "DMPCollection (2D parallelism) keeps copies of shards apart for several steps",
            where=path or "the model",
            remedy="use DistributedModelParallel",
        )
    if not isinstance(module, types.ShardedModule):
        _refuse_hidden(path, module)
        return None
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    kind = _KINDS.get(name)
    if kind is None:
        raise UserError(
            f"{type(module).__name__} is a kind of sharded module that is not supported",
            where=path or "the model",
            remedy="EmbeddingBagCollection and EmbeddingCollection are; leave others out of the model that is given",
        )
    return _read_module(f"{path}.{kind.holder}" if path else kind.holder, module, kind)


def _refuse_hidden(path: str, module: nn.Module) -> None:
    """Raise `UserError` for a plain parameter that an optimizer of its own updates within the backward pass."""
    for name, param in module._parameters.items():  # noqa: SLF001 - torch offers no accessor to its own ones
        if getattr(param, "_in_backward_optimizers", None):
            raise UserError(
                "An optimizer that only the parameter knows updates it within the backward pass",
                where=f"{path}.{name}" if path else name,
                remedy="apply_optimizer_in_backward to sharded tables only; step other parameters by an optimizer "
                "that is given here",
            )


def _read_module(path: str, module: Any, kind: _Kind) -> ModuleShards:
    shards = []
    for lookup in module._lookups:  # noqa: SLF001 - TorchRec offers no accessor
        while isinstance(lookup, nn.parallel.DistributedDataParallel):
            lookup = lookup.module  # noqa: PLW2901 - it is unwrapped
        for kernel in lookup._emb_modules:  # noqa: SLF001 - as above
            shards += list(_shards(path, kernel, getattr(module, kind.holder)))
    here = {found.fqn for found in shards}
    elsewhere = [
        TableSchema(
            fqn=fqn,
            rows=config.num_embeddings,
            columns=config.embedding_dim,
            dtype=_dtype(fqn, config.data_type),
        )
        for config in getattr(module, kind.configs)
        if (fqn := _fqn(path, config.name)) not in here
    ]
    shards.sort(key=lambda found: found.fqn)  # those of one table one after the other, in the kernels' order
    return ModuleShards(shards=tuple(shards), elsewhere=tuple(elsewhere))


def _shards(path: str, kernel: Any, holder: nn.ModuleDict) -> Iterator[FoundTable]:
    """Those that one kernel looks up; none of no rows."""
    name = type(kernel).__name__
    tables = kernel.config.embedding_tables
    where = ", ".join(_fqn(path, table.name) for table in tables)
    if name in _DENSE:
        for table in tables:
            yield _replicated(path, table, holder)
        return
    if name not in _FUSED:
        raise UserError(
            f"The compute kernel {name} is not supported",
            where=where,
            remedy="constrain the planner: ParameterConstraints(compute_kernels=['fused'])",
        )
    places = {place.name for _, _, place, _ in kernel.emb_module.embedding_specs}
    if not places.issubset(_WHOLE_MEMORY):
        raise UserError(
            "A kernel that keeps rows behind a cache (UVM) is not supported",
            where=where,
            remedy="constrain the planner: ParameterConstraints(compute_kernels=['fused'])",
        )
    batch = kernel_of(kernel)
    for table, weights, shard in zip(tables, batch.weights, batch.shards, strict=True):
        row, column = table.local_metadata.shard_offsets
        rows, columns = weights.shape
        if rows == 0:
            continue
        fqn = _fqn(path, table.name)
        yield FoundTable(
            fqn=fqn,
            rows=table.num_embeddings,
            columns=table.embedding_dim,
            box=Box(
                table=fqn, row_start=row, row_stop=row + rows, col_start=column, col_stop=column + columns
            ),
            param=weights,
            aliases=(),
            owners=(),
            kernel=shard,
        )


def _replicated(path: str, table: Any, holder: nn.ModuleDict) -> FoundTable:
    """A data-parallel table: a whole parameter, whose reduced gradients an optimizer of the program applies.

    Raises:
        UserError: it is sharded, and its gradients are handed out all the same.
    """
    fqn = _fqn(path, table.name)
    if table.local_metadata is not None:
        raise UserError(
            "A table that is sharded under the dense compute kernel is not supported",
            where=fqn,
            remedy="constrain the planner: ParameterConstraints(compute_kernels=['fused'])",
        )
    rows, columns = table.num_embeddings, table.embedding_dim
    return FoundTable(
        fqn=fqn,
        rows=rows,
        columns=columns,
        box=Box(table=fqn, row_start=0, row_stop=rows, col_start=0, col_stop=columns),
        param=holder[table.name].weight,  # type: ignore[arg-type]  # torch does not know that it is a tensor
        aliases=(),
        owners=(),
        replicated=world_size() > 1,
        hashed=REPLICATED_REASON,
    )


def _fqn(path: str, table: str) -> str:
    return f"{path}.{table}.weight"


def _dtype(fqn: str, data_type: Any) -> str:
    if data_type.value not in _DTYPES:
        raise UserError(
            f"A table of {data_type.value} cannot be stored",
            where=fqn,
            remedy=f"use one of {', '.join(_DTYPES)}",
        )
    return _DTYPES[data_type.value]
