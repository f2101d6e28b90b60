"""The model's tables as targets of a restore: every frame is scattered directly into parameter and optimizer state.

CPU memory is written in place. Tables on an accelerator use a staging copy, which is copied when all rows arrived.
Unknown, grown, shrunk or missing tables are rejected unless `strict=False`, which adds a note for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.format.frame import Frame
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from torch import Tensor

from deltashard.errors import CheckpointMismatch
from deltashard.state.value import array_of
from deltashard.tracking.tracking import TrackedTable, Tracking


def _in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and (
        tensor.dim() == 1 or tensor.stride(1) == 1 or tensor.shape[1] == 1
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _TargetTable:
    """A table and its target during a restore."""

    table: TrackedTable
    target: TableTarget
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(staging, live) pairs to copy when all rows arrived."""
    from_deltas: np.ndarray[Any, np.dtype[np.bool_]]
    """bool [rows]: rows of the shard that came from delta frames."""
    newer: np.ndarray[Any, np.dtype[np.bool_]]
    """bool [rows]: rows of the shard that are newer than the checkpoint."""


def _differences(live: TableSchema, held: TableSchema, *, strict: bool) -> list[str]:
    """How table `live` differs from the stored one; unless `strict`, also the consequence.

    Raises:
        CheckpointMismatch: with `strict`, if the number of columns differs, since such rows cannot be restored.
    """
    rows, columns = live.rows, live.columns
    was = f"[{held.rows}, {held.columns}]"
    now = f"[{rows}, {columns}]"
    if held.columns != columns and not strict:
        return [
            f"table {live.fqn} has other columns: {was} is stored, the model has {now}; it keeps its initial values"
        ]
    if held.columns != columns:
        raise CheckpointMismatch(
            f"table {live.fqn} has other columns: {was} is stored, the model has {now}",
            where="tables",
            remedy=f"build it with {held.columns} columns, or restore(strict=False) to keep its initial values",
        )
    found = []
    if held.rows != rows:
        change = "grew" if held.rows < rows else "shrank"
        fate = (
            "the new rows keep their initial values" if held.rows < rows else "the rows beyond are left out"
        )
        found.append((f"table {live.fqn} {change}: {was} is stored, the model has {now}", fate))
    if held.dtype != live.dtype:
        types = f"{held.dtype} {was} is stored, the model has {live.dtype} {now}"
        found.append((f"table {live.fqn} has another type: {types}", "values are converted"))
    return [what if strict else f"{what}; {fate}" for what, fate in found]


def _box(table: TrackedTable, held: TableSchema) -> Box:
    """The rows of the shard that both model and checkpoint have; empty where the stored table ends before the shard."""
    stop = max(table.box.row_start, min(held.rows, table.box.row_stop))
    return replace(table.box, row_stop=stop)


class ModelTargets:
    """The model's tables as targets of a restore, after comparison with the stored tables."""

    def __init__(
        self,
        tracking: Tracking,
        stored: Sequence[TableSchema],
        *,
        strict: bool,
        weights_only: bool,
        renames: Mapping[str, str],
    ) -> None:
        """Compare the tables; `renames` maps the model's table names to stored names.

        Raises:
            CheckpointMismatch: tables differ in a way that is not allowed.
        """
        self.notes: list[str] = []
        self.placed: list[_TargetTable] = []
        """Empty before `allocate`."""
        self.renames = dict(renames)
        self.strict = strict
        self.weights_only = weights_only
        by_name = {schema.fqn: schema for schema in stored}
        live = tracking.inventory.elsewhere | {table.fqn: table.schema for table in tracking.tables}
        named = {renames.get(fqn, fqn): schema for fqn, schema in live.items()}
        faults = [f"table {fqn} is stored but not in the model" for fqn in by_name.keys() - named.keys()]
        fitting: dict[str, TableSchema] = {}
        for fqn, schema in named.items():
            held = by_name.get(fqn)
            if held is None:
                faults.append(
                    f"table {schema.fqn} is not stored" + ("" if strict else ": it keeps its initial values")
                )
                continue
            faults += _differences(schema, held, strict=strict)
            if held.columns == schema.columns:
                fitting[schema.fqn] = held
        pairs = [(table, fitting[table.fqn]) for table in tracking.tables if table.fqn in fitting]
        self._tables = [
            (table, held) for table, held in pairs if _box(table, held).row_stop > table.box.row_start
        ]
        if faults and strict:
            raise CheckpointMismatch(
                "; ".join(faults),
                where="tables",
                remedy="build the tables as they were, or restore(strict=False) to take what fits (values are "
                "converted, other rows stay initial); renames={'new': 'stored'} maps names",
            )
        self.notes += faults
        # A differential refers to tables by name, so its baseline must have stored them under the same names.
        self._names_match = not faults and all(fqn == held.fqn for fqn, held in fitting.items())

    @property
    def boxes(self) -> list[Box]:
        return [_box(table, held) for table, held in self._tables]

    def allocate(self, mismatched_optimizers: Collection[int]) -> None:
        """Allocate memory for rows and their optimizer state.

        Optimizers in `mismatched_optimizers` differ from the stored ones and get no row state.
        """
        for table, held in self._tables:
            self.placed.append(self._allocate_table(table, held, frozenset(mismatched_optimizers)))

    def frame_consumer(self, applier: FrameApplier) -> Callable[[Frame, bool], None]:
        """Return a consumer of frames that decodes, scatters, and records which rows came from deltas."""
        by_target = {id(p.target): p for p in self.placed}
        first = True

        def take(frame: Frame, baseline: bool) -> None:
            nonlocal first
            for applied in applier.apply(frame):
                if not baseline:
                    placed = by_target[id(applied.target)]
                    placed.from_deltas[applied.rows - placed.target.box.row_start] = True
            if first:
                first = False
                crash_point("restore.first_applied")

        return take

    def take_newer(self, applier: FrameApplier, frame: memoryview, tail: memoryview | None) -> None:
        by_target = {id(p.target): p for p in self.placed}
        for applied in applier.apply(frame, tail, verify=True):
            placed = by_target[id(applied.target)]
            placed.newer[applied.rows - placed.target.box.row_start] = True

    def finish(self) -> None:
        with torch.no_grad():
            for placed in self.placed:
                for staging, live in placed.copies:
                    live.copy_(staging.view(live.shape))

    def mark(self) -> None:
        """Mark rows from deltas for the next snapshot over the baseline, and newer rows, which no commit contains."""
        for placed in self.placed:
            placed.table.reseed(torch.from_numpy(np.flatnonzero(placed.from_deltas)))
        for placed in self.placed:
            if len(ids := np.flatnonzero(placed.newer)):
                marks = placed.table.marks
                marks.mark(torch.from_numpy(ids).to(marks.flags.device))

    @property
    def is_complete(self) -> bool:
        """Whether every row and row field of the model is stored, so a differential can follow. Valid once applied."""
        return self._names_match and all(
            p.table.state_tensors().keys() <= p.target.fields.keys() for p in self.placed
        )

    def uncovered_shards(self, other: ModelTargets) -> list[str]:
        """Shards in which `other` may have written more rows than this restore overwrites."""
        mine = {table.key: _box(table, held).row_stop for table, held in self._tables}
        return [p.table.key for p in other.placed if mine.get(p.table.key, 0) < p.target.box.row_stop]

    def _allocate_table(
        self, table: TrackedTable, held: TableSchema, mismatched_optimizers: Collection[int]
    ) -> _TargetTable:
        box = _box(table, held)
        rows, width = box.row_stop - box.row_start, box.col_stop - box.col_start
        copies: list[tuple[Tensor, Tensor]] = []
        weights = self._memory(table.param, rows, copies)
        fields: dict[str, np.ndarray[Any, Any]] = {}
        specs: list[FieldSpec] = []
        for spec in () if self.weights_only else held.fields:
            if not table.views and not self.strict:
                self.notes.append(f"{table.fqn}: its stored state {spec.name} belongs to no optimizer")
                continue
            if (owner := table.owner_of(spec)) is not None and owner.index in mismatched_optimizers:
                continue
            live = table.allocate_state(spec)
            specs.append(spec)
            fields[spec.name] = self._memory(
                live.reshape(-1) if spec.kind == "rowwise" and live.is_contiguous() else live, rows, copies
            ).reshape((rows,) if spec.kind == "rowwise" else (rows, width))
        schema = TableSchema(
            fqn=table.fqn,
            rows=table.schema.rows,
            columns=held.columns,
            dtype=table.schema.dtype,
            fields=tuple(specs),
        )
        return _TargetTable(
            table=table,
            target=TableTarget(schema=schema, box=box, weights=weights, fields=fields),
            copies=copies,
            from_deltas=np.zeros(rows, np.bool_),
            newer=np.zeros(rows, np.bool_),
        )

    @staticmethod
    def _memory(live: Tensor, rows: int, copies: list[tuple[Tensor, Tensor]]) -> np.ndarray[Any, Any]:
        part = live.detach()[:rows]
        if _in_place(part):
            return array_of(part)
        staging = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        copies.append((staging, part))
        return array_of(staging)
