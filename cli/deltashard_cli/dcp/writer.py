"""Export of a checkpoint as a directory that plain `dcp.load` reads, in one process or sharded over many.

A table becomes several shards of one tensor, each a range of rows. A shard is read from the store only when DCP writes
it, so at most one range of one table is in memory.

Tensors have the model's own names. Optimizer state has the key `optimizer` and the format of
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: `state` by parameter name, and `param_groups`. This
loads everything:

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
SHARD_BYTES = 256 << 20
"""Maximum size of weights and optimizer state that are read at once, unless a single row is larger."""


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
    """The state of all optimizers in the format of `get_optimizer_state_dict`."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tails: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Shape of one row of a table's field, by (table, field)."""
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, tree: Any) -> None:
        """Add one optimizer's blob; values that the format cannot hold are listed in `left_out`."""
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
                    self.left_out.append(f"{where}: another optimizer has the same entry")
                elif not _is_plain(value):
                    self.left_out.append(f"{where}: not a plain tensor or number")
                else:
                    held[str(key)] = value
        for group in tree["groups"]:
            fit = {key: value for key, value in group.items() if _is_plain(value)}
            self.left_out += [
                f"{name}: {key!r} of a group: not a plain value" for key in group.keys() - fit.keys()
            ]
            self.groups.append(fit | {"params": [p for p in group["params"] if p not in orphans]})
        for table, shapes in tree["fields"].items():
            self.tails |= {(table, key): tuple(shape) for key, shape in shapes.items()}
        for what, there in (
            ("parameters that the model does not have", orphans),
            ("state that belongs to no parameter", tree.get("extra")),
            ("attributes of its class", tree.get("beside")),
        ):
            if there:
                self.left_out.append(f"{name}: {what}")


class _Planner(DefaultSavePlanner):
    """DCP's own plan for values in memory, plus shards that are read on demand."""

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
        """Add the shards of one table by tensor path; all tensors have the same ranges of rows."""
        names = {path: ".".join(path) for path in paths}
        self._paths |= {name: path for path, name in names.items()}
        # The weights and fields of a range are adjacent because they are read together.
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
            raise UserError(f"two tensors have the name {min(twice)!r}", where=self._checkpoint.where)
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
            self._read = None  # free the previous range before the next one is read
            rows = self._checkpoint.span(
                shard.schema, shard.start, shard.stop, fields=self._fields, advance=self._advance
            )
            self._read = (*key, rows)
        return self._read[2]


class _DcpWriter(FileSystemWriter):
    """Writes one file per shard: torch keeps the last shard of each tensor in a file in memory until the file ends."""

    def __init__(self, place: Path) -> None:
        # Copying ahead, meant for accelerators, would hold several shards in memory.
        super().__init__(place, single_file_per_rank=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta | None:
        """Return None: the metadata would contain the temporary path of the directory."""
        return None


def export_dcp(
    checkpoint: OpenCheckpoint, out: Path, *, state: bool, advance: Advance, shard_bytes: int = SHARD_BYTES
) -> ExportResult:
    """Write tables and dense tensors into the new DCP directory `out`; `state` adds the optimizers' state.

    Raises `UserError` if `out` exists or cannot be created, and errors from reading the checkpoint.
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
                f"a tensor of the model has the name {OPTIMIZER!r}",
                where=checkpoint.where,
                remedy="omit --state",
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
        # A single process is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save(held, storage_writer=writer, planner=planner)
        except CheckpointException as error:
            # It collects the failures of all ranks and hides the error of the only one.
            raise next(iter(error.failures.values()))[0] from None


def _shards(
    schema: TableSchema, optimizers: _Optimizers | None, shard_bytes: int
) -> dict[tuple[str, ...], list[_Shard]]:
    """Return the shards of one table by tensor path: its weights, and with `optimizers` its fields."""
    wanted: dict[tuple[str, ...], tuple[FieldSpec | None, tuple[int, ...]]] = {
        (schema.fqn,): (None, (schema.columns,))
    }
    for spec in schema.fields if optimizers is not None else ():
        assert optimizers is not None
        if "@" in spec.name:  # deltashard's name for the state of a nested optimizer
            optimizers.left_out.append(f"{spec.name} of {schema.fqn}: of an optimizer that wraps another")
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
    """Whether plain torch can load `value`: tensors, numbers, strings, and lists and dicts of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
