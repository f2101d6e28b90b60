"""Discovery: which parameters of a model are tables, and what everything is called whatever wraps the model.

A *table* is a 2-D floating-point parameter whose rows are saved one by one: the weight of every `nn.Embedding` and
`nn.EmbeddingBag`, and any other 2-D parameter with at least `min_rows` rows and `min_weights` values. All other
parameters and the persistent buffers are *dense* and are saved whole.

Where a table is sharded, the process holds *shards* of it: local tensors, each with its box in the whole table's rows
and columns. A table that is not sharded is one shard, whose box is the whole table.

Names are fully qualified attribute paths without what wrappers add: `_orig_mod` (torch.compile) and
`_dmp_wrapped_module` (TorchRec) always, `module` where the parent is a data-parallel wrapper or an averaged model. A
parameter reachable by several paths is one tensor: its first path in `named_modules` order is the canonical name, the
others are aliases.

A module that shards its tables itself is asked by a `Finder`, which knows that kind of module; nothing else inside of
it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.schema import Box, TableSchema
from torch import Tensor, nn

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REPLICATED_REASON = "each rank looks up rows of its own, and all ranks' gradients change it"
"""Why a table that every rank holds whole is tracked by row hashes."""
_TRANSPARENT = ("_orig_mod", "_dmp_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """What counts as a table."""

    min_rows: int = 65_536
    """A 2-D parameter outside of nn.Embedding and nn.EmbeddingBag is a table from this many rows on."""
    min_weights: int = 1 << 20
    """... and from this many values on."""
    lookups_min_rows: int = 1
    """An nn.Embedding or nn.EmbeddingBag with fewer rows is saved whole, as a dense parameter."""


class Kernel(Protocol):
    """What holds a shard's rows and changes them within the backward pass (a fused optimizer)."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by canonical key, live: [rows] or [rows, columns] of the shard."""

    @property
    def inexact_reason(self) -> str | None:
        """Why rows that nobody looked up may change, too; None: they cannot."""

    def listen(self, updated: Callable[[Tensor], None]) -> Callable[[], None]:
        """Have `updated` called right after each update, with ids that cover it; returns what ends that.

        The ids are int [n] rows of the shard, with repeats; it is called on the thread of the backward pass.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTable:
    """A shard of a table, whole tables included: its tensor, and the modules that hold it."""

    fqn: str
    """The whole table's name; several shards of one table share it."""
    rows: int
    """Of the whole table."""
    columns: int
    """Of the whole table."""
    box: Box
    """What of the table the tensor is."""
    param: Tensor
    """[box rows, box columns]; a parameter, unless a sharded module keeps its rows itself."""
    aliases: tuple[str, ...]
    """Other canonical paths of the same parameter (tied weights)."""
    owners: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute) that holds it."""
    replicated: bool = False
    """Whether every rank holds all of it, and keeps it the same as the others' by reduced gradients."""
    kernel: Kernel | None = None
    """What changes its rows within the backward pass; None: an optimizer does, in its step."""
    hashed: str = ""
    """Why only row hashes can tell what changed in it; empty where something else may."""

    @property
    def key(self) -> str:
        """Names the shard: the table's name where it is whole, else with its box."""
        return shard_key(self.box, self.rows, self.columns)

    @property
    def lookups(self) -> tuple[nn.Module, ...]:
        return tuple(module for module, _ in self.owners if isinstance(module, LOOKUPS))


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Everything of a model that a checkpoint holds, by canonical name."""

    tables: dict[str, FoundTable] = field(default_factory=dict)
    """Shards by key, those of one table one after the other."""
    elsewhere: dict[str, TableSchema] = field(default_factory=dict)
    """Tables of the model of which other processes hold all rows, by name, without fields."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """Parameters that are no tables, and persistent buffers (live tensors)."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alias -> canonical name, for tied parameters and shared buffers."""
    names: dict[Tensor, str] = field(default_factory=dict)
    """Parameter (by identity) -> canonical name; a shard's is its key."""
    sharded: list[nn.Module] = field(default_factory=list)
    """Modules that shard their tables themselves: what is inside of them is theirs."""
    fused: set[Tensor] = field(default_factory=set)
    """Parameters of such modules whose values a kernel updates within the backward pass: an optimizer that is given
    them never finds a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShards:
    """What one module that shards its tables itself says."""

    shards: tuple[FoundTable, ...]
    """Those of this process."""
    elsewhere: tuple[TableSchema, ...]
    """Tables of which this process holds nothing, without fields."""


Finder = Callable[[str, nn.Module], ModuleShards | None]
"""(canonical path, module) -> what it says; None: it is no module that shards tables. Raises `UserError` for one that
cannot be saved."""


def canonical_prefixes(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield (canonical prefix, module) for every module, parents first, shared modules once per path."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel)
    stack: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", model, ())]
    while stack:
        prefix, module, above = stack.pop()
        yield prefix, module
        children = []
        for name, child in module._modules.items():  # noqa: SLF001 - named_children() drops repeated modules
            if child is None or id(child) in above:
                continue
            transparent = name in _TRANSPARENT or (name == "module" and isinstance(module, wrappers))
            path = prefix if transparent else f"{prefix}.{name}" if prefix else name
            children.append((path, child, (*above, id(module))))
        stack.extend(reversed(children))


def is_wrapper(module: nn.Module) -> bool:
    """Whether its `state_dict()` is that of the module it wraps, under that module's names."""
    return "_dmp_wrapped_module" in module._modules  # noqa: SLF001 - torch offers no accessor


def discover(  # noqa: C901
    model: nn.Module, settings: TableSettings | None = None, find: Finder = lambda _path, _module: None
) -> Inventory:
    """The inventory of `model`; `find` is asked about every module.

    Raises:
        UserError: two different tensors share a canonical name, a lookup table has a type that cannot be stored,
            a lazy parameter is not initialised yet, or `find` says so.
    """
    settings = settings or TableSettings()
    inventory = Inventory()
    replicated = world_size() > 1
    owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    aliases: dict[Tensor, list[str]] = {}
    inside: set[int] = set()
    for prefix, module in canonical_prefixes(model):
        if id(module) in inside:
            continue
        if (said := find(prefix, module)) is not None:
            inside.update(id(each) for each in module.modules())
            _add_sharded(inventory, module, said)
            continue
        persistent = module._non_persistent_buffers_set  # noqa: SLF001 - torch offers no accessor
        held: list[tuple[str, Tensor]] = [(n, p) for n, p in module._parameters.items() if p is not None]  # noqa: SLF001 - as above
        held += [(n, b) for n, b in module._buffers.items() if b is not None and n not in persistent]  # noqa: SLF001
        for name, tensor in held:
            fqn = f"{prefix}.{name}" if prefix else name
            if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
                raise UserError(
                    "A lazy parameter has no shape yet",
                    where=fqn,
                    remedy="run one forward pass before building the Checkpointer",
                )
            if isinstance(tensor, nn.Parameter):
                owners.setdefault(tensor, [])
                if not any(m is module for m, _ in owners[tensor]):
                    owners[tensor].append((module, name))
            known = inventory.names.get(tensor)
            if known is not None:
                if known != fqn:
                    inventory.aliases[fqn] = known
                    aliases.setdefault(tensor, []).append(fqn)
                continue
            if fqn in inventory.dense or fqn in inventory.tables:
                raise UserError(
                    "Two tensors have the same name once wrappers are removed",
                    where=fqn,
                    remedy="rename one of the attributes",
                )
            inventory.names[tensor] = fqn
            inventory.dense[fqn] = tensor
    for param, holders in owners.items():
        if not _is_table(param, holders, settings):
            continue
        fqn = inventory.names[param]
        _refuse_dtype(param.dtype, fqn)
        del inventory.dense[fqn]
        rows, columns = param.shape
        inventory.tables[fqn] = FoundTable(
            fqn=fqn,
            rows=rows,
            columns=columns,
            box=Box(table=fqn, row_start=0, row_stop=rows, col_start=0, col_stop=columns),
            param=param,
            aliases=tuple(dict.fromkeys(aliases.get(param, ()))),
            owners=tuple(holders),
            replicated=replicated,
            hashed=REPLICATED_REASON if replicated else "",
        )
    return inventory


def world_size() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def _add_sharded(inventory: Inventory, module: nn.Module, said: ModuleShards) -> None:
    inventory.sharded.append(module)
    for found in said.shards:
        _refuse_dtype(found.param.dtype, found.fqn)
        inventory.tables[found.key] = found
        inventory.names[found.param] = found.key
    for schema in said.elsewhere:
        inventory.elsewhere[schema.fqn] = schema
    held = [param for each in module.modules() for param in each._parameters.values() if param is not None]  # noqa: SLF001 - torch offers no accessor to its own ones
    inventory.fused.update(param for param in held if param not in inventory.names)


def _refuse_dtype(dtype: torch.dtype, fqn: str) -> None:
    if dtype not in TABLE_DTYPES:
        raise UserError(
            f"A table of {dtype} cannot be stored",
            where=fqn,
            remedy=f"use one of {', '.join(str(d) for d in TABLE_DTYPES)}",
        )


def shard_key(box: Box, rows: int, columns: int) -> str:
    """A name for the part `box` of a table of [rows, columns]: the table's own where it is all of it."""
    if (box.row_start, box.row_stop, box.col_start, box.col_stop) == (0, rows, 0, columns):
        return box.table
    return f"{box.table}[{box.row_start}:{box.row_stop}, {box.col_start}:{box.col_stop}]"


def overlapping_tables(inventory: Inventory) -> dict[str, str]:
    """Tables whose memory overlaps that of another parameter or buffer of the model: shard -> the other's name.

    Compared by address, so that views, and several Parameters over one storage, are found.
    """
    held: list[tuple[Tensor, str]] = [(t.param, name) for name, t in inventory.tables.items()]
    held += [(tensor, name) for name, tensor in inventory.dense.items()]
    spans: dict[torch.device, list[tuple[int, int, str]]] = {}
    for tensor, name in held:
        if tensor.layout != torch.strided or not tensor.numel():
            continue
        start = tensor.data_ptr()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        spans.setdefault(tensor.device, []).append((start, start + (last + 1) * tensor.element_size(), name))
    found: dict[str, str] = {}
    for members in spans.values():
        reach, by = 0, ""
        for start, stop, name in sorted(members):
            if start < reach:
                found.setdefault(name, by)
                found.setdefault(by, name)
            if stop > reach:
                reach, by = stop, name
    return {name: other for name, other in found.items() if name in inventory.tables}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The numpy-style name of a torch type: float32, bfloat16, int64, ..."""
    return str(dtype).removeprefix("torch.")


def _is_table(param: Tensor, holders: list[tuple[nn.Module, str]], settings: TableSettings) -> bool:
    if param.dim() != 2 or param.is_sparse or 0 in param.shape:
        return False
    if any(isinstance(module, LOOKUPS) and name == "weight" for module, name in holders):
        return param.shape[0] >= settings.lookups_min_rows
    return (
        param.dtype in TABLE_DTYPES
        and param.shape[0] >= settings.min_rows
        and param.numel() >= settings.min_weights
    )
