"""Import of a DCP directory as the first checkpoint of a new run, validated first and published by one commit.

Weights and optimizer state are stored bit for bit. Each range of rows of a table is assembled from its saved pieces
and encoded; pieces that no later range needs are released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type, frame_encoder, typed_tree
from deltashard_checkpoint.format.object_key import new_token, validate_new_run
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock, raw_row_bytes
from deltashard_checkpoint.format.schema import Box, FieldKind, FieldSpec, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget, PartWriter
from deltashard_checkpoint.write.report import PartReport

from deltashard_cli.dcp.reader import (
    Array,
    StoredObject,
    StoredTensor,
    TensorChunk,
    array_of,
    read_chunk,
    read_contents,
    read_object,
    read_tensor,
)
from deltashard_cli.dcp.state_dict import ClassifiedContents, OptimizerDict, classify
from deltashard_cli.directory import DENSE
from deltashard_cli.option import spool_cache
from deltashard_cli.output import Advance
from deltashard_cli.target import POLICY, Target

SOURCE = "torch.distributed.checkpoint"
MIN_ROWS, MIN_WEIGHTS = 65_536, 1 << 20
"""The trainer's limits: a 2-D parameter of that size is a table in any module."""
_RANGE_BYTES = 64 << 20
_ENCODING_OF = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
"""The lossless encoding of each type."""
_FIELD_DTYPES = frozenset(
    {"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
"""Types of optimizer state that can be stored with a table's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """The caller's options for an import."""

    tables: tuple[str, ...] = ()
    """Name patterns of the tables; empty: guess by name and size."""
    without: tuple[str, ...] = ()
    model: str | None = None
    """Path of the model's dict; None: see `classify`."""
    optimizer: str | None = None
    """The optimizer's class; None: its state is left out."""
    step: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDraft:
    """A validated import: everything except the tables' rows is read and encoded."""

    tables: tuple[TableSchema, ...]
    rows: Mapping[tuple[str, str], StoredTensor]
    """Stored tensors by (table, field); the weights have the field ""."""
    blobs: Mapping[str, bytes]
    dense: int
    guessed: bool
    matrices: tuple[str, ...]
    optimizer: str
    """Module and name of the optimizer's class; empty: no optimizer."""
    left_out: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(table.rows * raw_row_bytes(table, table.columns) for table in self.tables)


def draft(directory: Path, request: ImportRequest) -> ImportDraft:
    """Read everything except the tables of `directory`.

    Raises `NotReadable`, and `UserError` for a request that does not match the directory.
    """
    found = classify(read_contents(directory), request.model)
    model = {name: each for name, each in found.model.items() if not _matches(name, request.without)}
    if unused := [one for one in request.without if not any(fnmatchcase(name, one) for name in found.model)]:
        raise UserError(f"no tensor matches {unused[0]!r}", remedy=_list_some(found.model))
    chosen = _tables(model, request.tables)
    left = list(found.left_out)
    left += [f"{name}: as requested" for name in sorted(found.model.keys() - model.keys())]
    optimizer, unsupported_reason = _optimizer(found, request)
    if unsupported_reason:
        left += [
            f"the optimizer's state ({each.where or 'top level'}): {unsupported_reason}"
            for each in found.optimizers
        ]
    rows = {(name, ""): model[name] for name in chosen}
    tree: dict[str, Any] | None = None
    fields: dict[str, tuple[FieldSpec, ...]] = {}
    if optimizer is not None:
        tree, fields = _optimizer_tree(optimizer, _class_name(request.optimizer or ""), model, chosen, left)
        rows |= {
            (table, spec.name): _tensor_of(optimizer.state[table][spec.name])
            for table, specs in fields.items()
            for spec in specs
        }
    blobs = {
        f"{DENSE}{name}": _encoded(read_tensor(each), each.dtype)
        for name, each in model.items()
        if name not in chosen
    }
    if tree is not None:
        blobs["optim/0"] = typed_tree.encode(tree, adapt=_adapt).to_bytes()
    meta = {"step": request.step, "fingerprint": {}, "content": None, "grown": {}, "modules": []}
    blobs["meta"] = typed_tree.encode(meta).to_bytes()
    # A trainer's restore requires both blobs; None leaves its generators unchanged.
    blobs["rng"] = typed_tree.encode(None).to_bytes()
    return ImportDraft(
        tables=tuple(
            TableSchema(
                fqn=name,
                rows=model[name].shape[0],
                columns=model[name].shape[1],
                dtype=model[name].dtype,
                fields=fields.get(name, ()),
            )
            for name in sorted(chosen)
        ),
        rows=rows,
        blobs=blobs,
        dense=len(model) - len(chosen),
        guessed=not request.tables,
        matrices=tuple(sorted(name for name in model.keys() - chosen if _may_be_table(model[name]))),
        optimizer="" if tree is None else str(tree["class"]),
        left_out=tuple(left),
    )


def check_new(target: Target) -> RunLog:
    """Return the log of a new run. Raises `UserError` if the run exists or its name is invalid."""
    log = RunLog(target.store, target.run)
    validate_new_run(target.run)
    if log.refresh(deadline_s=POLICY.deadline_s).tip >= 0:
        raise _already_exists(target)
    return log


def import_draft(
    made: ImportDraft, target: Target, request: ImportRequest, *, spool: Path | None, advance: Advance
) -> tuple[int, int]:
    """Start the run and commit the draft as its first checkpoint (one rank, all rows); return (seq, stored bytes).

    Raises `UserError` if the run already exists, `NotReadable` for an unreadable table (nothing is committed), and
    store errors.
    """
    log = check_new(target)
    attempt = open_attempt(log, owner=request.owner, closing_wait_s=0.0, deadline_s=POLICY.deadline_s).attempt
    if attempt != 1:  # another writer has started the run meanwhile
        raise _already_exists(target)
    where = PartTarget(
        run=target.run, attempt=attempt, snapshot_id=1, step=request.step, rank=0, token=new_token(),
        tables=made.tables, boxes=tuple(
            Box(table=t.fqn, row_start=0, row_stop=t.rows, col_start=0, col_stop=t.columns) for t in made.tables
        ),
        covers=None,
    )  # fmt: skip
    with (
        spool_cache(spool) as cache,
        PartWriter(target.store, where, cache) as writer,
    ):
        for table in made.tables:
            for frame in _frames(table, made.rows, request.step, advance):
                writer.add(frame)
        for name, data in made.blobs.items():
            for frame in frame_encoder.encode_blob_frames(name=name, data=data, step=request.step):
                writer.add(frame)
        part = writer.finish()
    index = writer.index
    assert index is not None
    done = commit_parts(
        log, attempt=attempt, snapshot_id=1, step=request.step, world_size=1,
        reports=[PartReport(
            part=part, tables=made.tables, encodings=index.encodings, rows=index.rows, raw_bytes=index.raw_bytes,
            stall_s=0.0, directive="full", metadata={"imported": SOURCE},
        )],
    )  # fmt: skip
    return done.seq, part.stored_bytes


def _already_exists(target: Target) -> UserError:
    return UserError(
        "the run already exists, and an import needs a new one",
        where=f"{target.store.url}, run {target.run}",
        remedy="choose another --run; if the run has no checkpoints, delete it as the rest of a failed import",
    )


# Choice of tables


def _tables(model: Mapping[str, StoredTensor], patterns: Collection[str]) -> frozenset[str]:
    """Return the names of the tables: by `patterns`, or without patterns by name and size."""
    if not patterns:
        return frozenset(
            name for name, each in model.items() if _may_be_table(each) and _looks_like_table(name, each)
        )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in model):
            raise UserError(f"no tensor matches {pattern!r}", where="--tables", remedy=_list_some(model))
    chosen = frozenset(name for name in model if _matches(name, patterns))
    if odd := sorted(name for name in chosen if not _may_be_table(model[name])):
        shape = f"{model[odd[0]].dtype} {list(model[odd[0]].shape)}"
        raise UserError(
            f"{odd[0]} is {shape}, which cannot be a table",
            where="--tables",
            remedy=f"a table is 2-D, not empty, and one of {', '.join(element_type.WEIGHT_DTYPES)}",
        )
    return chosen


def _may_be_table(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and 0 not in tensor.shape and tensor.dtype in element_type.WEIGHT_DTYPES


def _looks_like_table(name: str, tensor: StoredTensor) -> bool:
    """Whether a 2-D tensor is probably a table, by its size or by a segment of its name."""
    rows, columns = tensor.shape
    *above, last = name.lower().split(".")
    named = last == "weight" and any("emb" in word or "lookup" in word for word in above)
    return named or (rows >= MIN_ROWS and rows * columns >= MIN_WEIGHTS)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _list_some(model: Mapping[str, StoredTensor]) -> str:
    return f"available: {', '.join(sorted(model)[:12])}{', ...' if len(model) > 12 else ''}"


# The optimizer


def _optimizer(found: ClassifiedContents, request: ImportRequest) -> tuple[OptimizerDict | None, str]:
    """Return (optimizer to import, "") or (None, reason). Raises `UserError` if a requested import is impossible."""
    if request.optimizer is None:
        return None, "give its class, which DCP does not store, by --optimizer CLASS to import it"
    if len(found.optimizers) != 1:
        raise UserError(
            f"the directory has {len(found.optimizers)} optimizers, but an import takes exactly one",
            where="--optimizer",
            remedy="omit it to import only weights and dense tensors",
        )
    (only,) = found.optimizers
    unknown = sorted(only.state.keys() - found.model.keys())
    if not only.unsupported_reason and unknown:
        only.unsupported_reason = f"it has state of {unknown[0]!r}, which the model does not have"
    if not only.unsupported_reason and sorted(only.groups) != list(range(len(only.groups))):
        only.unsupported_reason = "a group is missing"
    if only.unsupported_reason:
        raise UserError(
            f"the optimizer's state cannot be imported: {only.unsupported_reason}",
            where=only.where or "top level",
            remedy="save get_optimizer_state_dict(model, optimizer), not flattened; or omit --optimizer",
        )
    return only, ""


def _class_name(given: str) -> str:
    """Return module and name of an optimizer's class, as a trainer records them; `given` may omit torch.optim."""
    known = getattr(torch.optim, given.removeprefix("torch.optim."), None)
    if isinstance(known, type):
        return f"{known.__module__}.{known.__qualname__}"
    if "." not in given:
        raise UserError(
            f"torch.optim has no {given!r}",
            where="--optimizer",
            remedy="include its module: package.module.Class",
        )
    return given


def _optimizer_tree(
    optimizer: OptimizerDict,
    class_name: str,
    model: Mapping[str, StoredTensor],
    tables: Collection[str],
    left: list[str],
) -> tuple[dict[str, Any], dict[str, tuple[FieldSpec, ...]]]:
    """Return (the optimizer's blob in the trainer's format, fields stored with the rows of each table)."""
    fields: dict[str, tuple[FieldSpec, ...]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, entry in optimizer.state.items():
        specs = {}
        for key in sorted(entry) if name in tables else ():
            if (kind := _field_kind(entry[key], model[name].shape)) is not None:
                specs[key] = FieldSpec(name=key, kind=kind, dtype=_tensor_of(entry[key]).dtype)
        state[name] = {key: _read(value) for key, value in entry.items() if key not in specs}
        if specs:
            fields[name] = tuple(specs.values())
            shapes[name] = {key: _tensor_of(entry[key]).shape[1:] for key in specs}
    groups = []
    for number, group in sorted(optimizer.groups.items()):
        held = {key: _read(value) for key, value in group.items()}
        params = held.get("params")
        if not isinstance(params, list) or not all(isinstance(each, str) for each in params):
            raise UserError(
                f"group {number} does not name its parameters: optimizer.state_dict() only numbers them",
                where=optimizer.where or "top level",
                remedy="save get_optimizer_state_dict(model, optimizer); or omit --optimizer",
            )
        if absent := sorted(set(params) - model.keys()):
            left.append(f"{absent[0]} of group {number}: the model does not have it")
        groups.append(held)
    tree = {
        "class": class_name,
        "groups": groups,
        "state": state,
        "fields": shapes,
        "extra": {},
        "orphans": {},
    }
    return tree, fields


def _field_kind(value: StoredTensor | StoredObject, table: tuple[int, ...]) -> FieldKind | None:
    """Return the kind of field of a table's state, by the trainer's rule; None: it is in the optimizer's blob."""
    if not isinstance(value, StoredTensor) or value.dtype not in _FIELD_DTYPES:
        return None
    if value.shape == table:
        return "pointwise"
    return "rowwise" if value.shape in ((table[0],), (table[0], 1)) else None


def _tensor_of(value: StoredTensor | StoredObject) -> StoredTensor:
    assert isinstance(value, StoredTensor)
    return value


def _read(value: StoredTensor | StoredObject) -> Any:
    if isinstance(value, StoredObject):
        return read_object(value)
    return typed_tree.Tensor(dtype=value.dtype, shape=value.shape, data=_bytes(read_tensor(value)))


def _adapt(value: object) -> object:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return NotImplemented
    dtype = str(value.dtype).removeprefix("torch.")
    return typed_tree.Tensor(dtype=dtype, shape=tuple(value.shape), data=_bytes(array_of(value)))


def _encoded(values: Array, dtype: str) -> bytes:
    return typed_tree.encode(
        typed_tree.Tensor(dtype=dtype, shape=values.shape, data=_bytes(values))
    ).to_bytes()


def _bytes(values: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


# Rows


class _Rows:
    """Sequential reader of a table's weights or of one of its fields, by ranges of rows."""

    def __init__(self, stored: StoredTensor, shape: tuple[int, ...]) -> None:
        """`shape` is the shape of one row."""
        self._stored = stored
        self._shape = shape
        self._waiting = sorted(stored.chunks, key=lambda chunk: chunk.offsets[0])[::-1]
        self._held: list[tuple[TensorChunk, Array]] = []

    def take(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) and release the rows before `start`."""
        self._held = [(chunk, values) for chunk, values in self._held if chunk.stop(0) > start]
        while self._waiting and self._waiting[-1].offsets[0] < stop:
            chunk = self._waiting.pop()
            self._held.append((chunk, read_chunk(self._stored, chunk)))
        found = np.zeros(
            (stop - start, *self._stored.shape[1:]), element_type.by_name(self._stored.dtype).carrier
        )
        for chunk, values in self._held:
            low, high = max(start, chunk.offsets[0]), min(stop, chunk.stop(0))
            at = (
                slice(low - start, high - start),
                *(slice(offset, chunk.stop(d)) for d, offset in enumerate(chunk.offsets) if d > 0),
            )
            found[at] = values[low - chunk.offsets[0] : high - chunk.offsets[0]]
        return found.reshape(stop - start, *self._shape)


def _frames(
    table: TableSchema, stored: Mapping[tuple[str, str], StoredTensor], step: int, advance: Advance
) -> Iterator[frame_encoder.EncodedFrame]:
    weights = _Rows(stored[table.fqn, ""], (table.columns,))
    fields = {
        spec.name: _Rows(stored[table.fqn, spec.name], spec.shape(1, table.columns)[1:])
        for spec in table.fields
    }
    row_bytes = raw_row_bytes(table, table.columns)
    rows_at_once = max(1, _RANGE_BYTES // row_bytes)
    options = EncodeOptions(encoding=ENCODINGS[_ENCODING_OF[table.dtype]])
    for start in range(0, table.rows, rows_at_once):
        stop = min(start + rows_at_once, table.rows)
        block = RowBlock.of_whole_rows(
            table,
            range(start, stop),
            weights.take(start, stop),
            {name: rows.take(start, stop) for name, rows in fields.items()},
        )
        yield from frame_encoder.encode_row_frames(block, options, step=step)
        advance((stop - start) * row_bytes)
