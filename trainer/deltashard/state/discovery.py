"""Discovery: which parameters of a model are tables, and their canonical names under any wrappers.

A *table* is a 2-D floating-point parameter that is saved row by row: the weight of every `nn.Embedding` and
`nn.EmbeddingBag`, and any other 2-D parameter with at least `min_rows` rows and `min_weights` values. All other
parameters and the persistent buffers are *dense* and are saved whole.

Where a table is sharded, the process holds *shards* of it: local tensors, each with its box in rows and columns of the
whole table. A table that is not sharded is one shard, whose box is the whole table.

Names are fully qualified attribute paths without the parts that wrappers add: `_orig_mod` (torch.compile) and
`_dmp_wrapped_module` (TorchRec) always, `module` where the parent is a data-parallel wrapper or an averaged model. A
parameter reachable by several paths is one tensor: its first path in `named_modules` order is the canonical name, the
others are aliases.

A module that shards its tables itself is handled by a `Finder` for its kind; its submodules are not visited.
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
REPLICATED_REASON = "each rank looks up different rows, and all ranks' gradients change it"
"""Why a table that every rank holds completely is tracked by row hashes."""
_TRANSPARENT = ("_orig_mod", "_dmp_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """Thresholds that make a parameter a table."""

    min_rows: int = 65_536
    """A 2-D parameter outside nn.Embedding and nn.EmbeddingBag is a table with at least this many rows ..."""
    min_weights: int = 1 << 20
    """... and at least this many values."""
    lookups_min_rows: int = 1
    """An nn.Embedding or nn.EmbeddingBag with fewer rows is saved whole, as a dense parameter."""


class Kernel(Protocol):
    """Holds a shard's rows and changes them within the backward pass (a fused optimizer)."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by canonical key, live: [rows] or [rows, columns] of the shard."""

    @property
    def inexact_reason(self) -> str | None:
        """Why rows that were not looked up may change, too; None: they cannot."""

    def listen(self, updated: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call `updated` right after each update, with ids that cover it; returns a function that stops the calls.

        The ids are int [n] rows of the shard, with repeats. `updated` runs on the thread of the backward pass.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTable:
    """A shard of a table, possibly the whole table: its tensor, and the modules that hold it."""

    fqn: str
    """The whole table's name, shared by its shards."""
    rows: int
    columns: int
    """`rows` and `columns` of the whole table."""
    box: Box
    """The part of the table in the tensor."""
    param: Tensor
    """[box rows, box columns]; a parameter, unless a sharded module keeps its rows itself."""
    aliases: tuple[str, ...]
    """Other canonical paths of the same parameter (tied weights)."""
    owners: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute) that holds it."""
    replicated: bool = False
    """Whether every rank holds the whole table and keeps it equal by reduced gradients."""
    kernel: Kernel | None = None
    """The kernel that changes its rows within the backward pass; None: an optimizer step changes them."""
    hashed: str = ""
    """Why only row hashes can detect its changes; empty where another tracker can."""

    @property
    def key(self) -> str:
        """Key of the shard: the table's name if the shard is the whole table, otherwise with its box."""
        return shard_key(self.box, self.rows, self.columns)

    @property
    def lookups(self) -> tuple[nn.Module, ...]:
        return tuple(module for module, _ in self.owners if isinstance(module, LOOKUPS))


@dataclass(slots=True, kw_only=True)
class Inventory:
    """All parts of a model that a checkpoint contains, by canonical name."""

    tables: dict[str, FoundTable] = field(default_factory=dict)
    """Shards by key; shards of one table are adjacent."""
    elsewhere: dict[str, TableSchema] = field(default_factory=dict)
    """Tables whose rows are all on other processes, by name, without fields."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """Non-table parameters and persistent buffers (live tensors)."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alias -> canonical name, for tied parameters and shared buffers."""
    names: dict[Tensor, str] = field(default_factory=dict)
    """Parameter (by identity) -> canonical name; for a shard, its key."""
    sharded: list[nn.Module] = field(default_factory=list)
    """Modules that shard their tables themselves and own all their submodules."""
    fused: set[Tensor] = field(default_factory=set)
    """Parameters of such modules that a kernel updates within the backward pass; their `.grad` is always None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShards:
    """The tables of one module that shards its tables itself."""

    shards: tuple[FoundTable, ...]
    """Shards of this process."""
    elsewhere: tuple[TableSchema, ...]
    """Tables without a shard on this process, without fields."""


Finder = Callable[[str, nn.Module], ModuleShards | None]
"""(canonical path, module) -> its tables; None: not a module that shards tables. Raises `UserError` for a module that
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
    """Whether `module.state_dict()` is that of the wrapped module, under that module's names."""
    return "_dmp_wrapped_module" in module._modules  # noqa: SLF001 - torch offers no accessor


def discover(  # noqa: C901
    model: nn.Module, settings: TableSettings | None = None, find: Finder = lambda _path, _module: None
) -> Inventory:
    """Return the inventory of `model`; `find` is called for every module.

    Raises:
        UserError: two different tensors share a canonical name, a lookup table has a type that cannot be stored, a
            lazy parameter is not initialised yet, or `find` raised it.
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
        if (module_shards := find(prefix, module)) is not None:
            inside.update(id(each) for each in module.modules())
            _add_sharded(inventory, module, module_shards)
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


def _add_sharded(inventory: Inventory, module: nn.Module, module_shards: ModuleShards) -> None:
    inventory.sharded.append(module)
    for found in module_shards.shards:
        _refuse_dtype(found.param.dtype, found.fqn)
        inventory.tables[found.key] = found
        inventory.names[found.param] = found.key
    for schema in module_shards.elsewhere:
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
    """Key of the part `box` of a table of [rows, columns]: the table's name if the box is the whole table."""
    if (box.row_start, box.row_stop, box.col_start, box.col_stop) == (0, rows, 0, columns):
        return box.table
    return f"{box.table}[{box.row_start}:{box.row_stop}, {box.col_start}:{box.col_stop}]"


def overlapping_tables(inventory: Inventory) -> dict[str, str]:
    """Tables whose memory overlaps that of another parameter or buffer of the model: shard -> the other's name.

    Compared by address, so views, and several Parameters over one storage, are found.
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
