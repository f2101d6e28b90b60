"""A checkpoint as a directory that plain `dcp.load` reads, in one process or sharded over many.

A table becomes several shards of one tensor, a range of rows each, and each is read from the store only when DCP asks
for it: no more than one range of one table is in memory, whatever the table's size.

Tensors have the model's own names. Optimizer state stands under `optimizer`, in the dict that
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` makes: `state` by parameter name, `param_groups`. So
this loads everything:

    found = get_model_state_dict(model) | {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(found, checkpoint_id=directory)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type, typed_tree
from deltashard_checkpoint.format.row_block import raw_row_bytes
from deltashard_checkpoint.format.schema import FieldSpec, TableSchema
from deltashard_checkpoint.restore.checkpoint_reader import TableArrays
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from deltashard_cli.directory import (
    ExportResult,
    array_of,
    atomic_output,
    check_output,
    dense_tensors,
    non_tensor_blobs,
)
from deltashard_cli.export import torch_tensor
from deltashard_cli.output import Advance

OPTIMIZER = "optimizer"
"""The key under which the optimizers' state stands."""
SHARD_BYTES = 256 << 20
"""Of weights and optimizer state that are read at once; a shard is no larger, but for a row that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """Rows [start, stop) of a table's weights, or of one field of its optimizer state."""

    schema: TableSchema
    spec: FieldSpec | None
    start: int
    stop: int
    tail: tuple[int, ...]
    """Shape of one row."""

    @property
    def dtype(self) -> str:
        return self.schema.dtype if self.spec is None else self.spec.dtype

    def item(self, name: str) -> WriteItem:
        zeros = (0,) * len(self.tail)
        offsets = torch.Size((self.start, *zeros))
        return WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(
                    offsets=offsets, sizes=torch.Size((self.stop - self.start, *self.tail))
                ),
                properties=TensorProperties(dtype=getattr(torch, self.dtype)),
                size=torch.Size((self.schema.rows, *self.tail)),
            ),
        )


@dataclass(slots=True, kw_only=True)
class _Optimizers:
    """The state of all optimizers as one dict, as `get_optimizer_state_dict` gives it."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tails: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Shape behind the rows of a table's field, by (table, field)."""
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, tree: Any) -> None:
        """One optimizer's blob; what of it has no place in such a dict is noted."""
        if not isinstance(tree, Mapping) or not {"groups", "state", "fields", "orphans"} <= tree.keys():
            self.left_out.append(f"{name}: its state has an unknown shape")
            return
        orphans = tree["orphans"]
        for param, entry in tree["state"].items():
            if param in orphans:
                continue
            held = self.state.setdefault(param, {})
            for key, value in entry.items():
                where = f"{name}: {key!r} of {param}"
                if str(key) in held:
                    self.left_out.append(f"{where}: another optimizer has one, too")
                elif not _is_plain(value):
                    self.left_out.append(f"{where}: no plain tensor or number")
                else:
                    held[str(key)] = value
        for group in tree["groups"]:
            fit = {key: value for key, value in group.items() if _is_plain(value)}
            self.left_out += [
                f"{name}: {key!r} of a group: no plain value" for key in group.keys() - fit.keys()
            ]
            self.groups.append(fit | {"params": [p for p in group["params"] if p not in orphans]})
        for table, shapes in tree["fields"].items():
            self.tails |= {(table, key): tuple(shape) for key, shape in shapes.items()}
        for what, there in (
            ("parameters that the model has not", orphans),
            ("state that belongs to no parameter", tree.get("extra")),
            ("what its class keeps beside its state", tree.get("beside")),
        ):
            if there:
                self.left_out.append(f"{name}: {what}")


class _Planner(DefaultSavePlanner):
    """DCP's own plan for what is in memory, and shards that are read when they are asked for."""

    def __init__(self, checkpoint: OpenCheckpoint, *, state: bool, advance: Advance) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._fields = state
        self._advance = advance
        self._shards: dict[MetadataIndex, _Shard] = {}
        self._items: list[WriteItem] = []
        self._paths: dict[str, tuple[str, ...]] = {}
        self._read: tuple[str, int, TableArrays] | None = None

    def add(self, paths: Mapping[tuple[str, ...], Sequence[_Shard]]) -> None:
        """Shards of one table by the path of the tensor they are of, ranges of rows the same in all."""
        names = {path: ".".join(path) for path in paths}
        self._paths |= {name: path for path, name in names.items()}
        # A range's weights and fields one after the other: they are read together.
        for together in zip(*paths.values(), strict=True):
            for path, shard in zip(paths, together, strict=True):
                item = shard.item(names[path])
                self._shards[item.index] = shard
                self._items.append(item)

    @property
    def tensors(self) -> int:
        held = sum(isinstance(value, torch.Tensor) for value in self.state_dict.values())
        return held + len(self._paths)

    def create_local_plan(self) -> SavePlan:
        if twice := self._paths.keys() & self.mappings.keys():
            raise UserError(f"two tensors are called {min(twice)!r}", where=self._checkpoint.where)
        self.mappings |= self._paths
        plan = super().create_local_plan()
        return replace(plan, items=[*self._items, *plan.items])

    def resolve_data(self, write_item: WriteItem) -> Any:
        shard = self._shards.get(write_item.index)
        if shard is None:
            return super().resolve_data(write_item)
        rows = self._rows(shard)
        values = rows.weights if shard.spec is None else rows.fields[shard.spec.name]
        return torch_tensor(shard.dtype, values).view(shard.stop - shard.start, *shard.tail)

    def _rows(self, shard: _Shard) -> TableArrays:
        key = (shard.schema.fqn, shard.start)
        if self._read is None or self._read[:2] != key:
            self._read = None  # before the next ones come
            rows = self._checkpoint.span(
                shard.schema, shard.start, shard.stop, fields=self._fields, advance=self._advance
            )
            self._read = (*key, rows)
        return self._read[2]


class _DcpWriter(FileSystemWriter):
    """A file for each shard: torch keeps the last one of each tensor of a file in memory until the file ends."""

    def __init__(self, place: Path) -> None:
        # Copying ahead, as for accelerators, would hold several shards at once.
        super().__init__(place, single_file_per_rank=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta | None:
        """Nothing: it would name the place where the directory is made, which is not where it will be."""
        return None


def export_dcp(
    checkpoint: OpenCheckpoint, out: Path, *, state: bool, advance: Advance, shard_bytes: int = SHARD_BYTES
) -> ExportResult:
    """Weights of tables and dense tensors as the new DCP directory `out`; `state` adds that of the optimizers.

    Raises `UserError` where `out` exists or cannot be made, and what reading the checkpoint raises.
    """
    check_output(out)
    blobs = checkpoint.blobs(advance=advance)
    dense = list(dense_tensors(blobs))
    held: dict[str, Any] = {each.name: torch_tensor(each.dtype, each.values) for each in dense}
    optimizers = _Optimizers()
    for name in sorted(name for name in blobs if state and name.startswith("optim/")):
        optimizers.add(name, typed_tree.decode(blobs[name], tensor=_tensor, untag=_untag))
    planner = _Planner(checkpoint, state=state, advance=advance)
    for schema in checkpoint.entry.tables:
        planner.add(_shards(schema, optimizers if state else None, shard_bytes))
    if optimizers.groups or optimizers.state:
        if OPTIMIZER in held:
            raise UserError(
                f"a tensor of the model is called {OPTIMIZER!r}",
                where=checkpoint.where,
                remedy="leave --state away",
            )
        held[OPTIMIZER] = {"state": optimizers.state, "param_groups": optimizers.groups}
    with atomic_output(out) as place:
        place.mkdir()
        _save(held, _DcpWriter(place), planner)
        written = sum(path.stat().st_size for path in place.iterdir())
    return ExportResult.of(
        checkpoint,
        out,
        tensors=planner.tensors,
        bytes=written,
        skipped=non_tensor_blobs(blobs, dense),
        left_out=tuple(optimizers.left_out),
    )


def _save(held: dict[str, Any], writer: _DcpWriter, planner: _Planner) -> None:
    with warnings.catch_warnings():
        # One process is what is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save(held, storage_writer=writer, planner=planner)
        except CheckpointException as error:
            # Made for many ranks, it hides what went wrong on the only one.
            raise next(iter(error.failures.values()))[0] from None


def _shards(
    schema: TableSchema, optimizers: _Optimizers | None, shard_bytes: int
) -> dict[tuple[str, ...], list[_Shard]]:
    """The shards of one table: its weights, and with `optimizers` its fields, as those have them."""
    wanted: dict[tuple[str, ...], tuple[FieldSpec | None, tuple[int, ...]]] = {
        (schema.fqn,): (None, (schema.columns,))
    }
    for spec in schema.fields if optimizers is not None else ():
        assert optimizers is not None
        if "@" in spec.name:  # of a second optimizer, under a name of our own
            optimizers.left_out.append(f"{spec.name} of {schema.fqn}: of an optimizer around another")
            continue
        tail = spec.shape(1, schema.columns)[1:]
        path = (OPTIMIZER, "state", schema.fqn, spec.name)
        wanted[path] = (spec, optimizers.tails.get((schema.fqn, spec.name), tail))
    rows = max(1, shard_bytes // raw_row_bytes(schema, schema.columns))
    return {
        path: [
            _Shard(schema=schema, spec=spec, start=at, stop=min(at + rows, schema.rows), tail=tail)
            for at in range(0, schema.rows, rows)
        ]
        for path, (spec, tail) in wanted.items()
    }


def _tensor(leaf: typed_tree.Tensor) -> object:
    return torch_tensor(leaf.dtype, array_of(leaf)) if element_type.is_known(leaf.dtype) else leaf


def _untag(tag: str, value: Any) -> object:
    return value if tag == "torch.accelerator" else typed_tree.Tagged(tag=tag, value=value)


def _is_plain(value: Any) -> bool:
    """Whether every process with torch reads it back: tensors, numbers, text, and lists and dicts of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
