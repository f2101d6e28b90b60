"""The model's tables as targets of a restore: every frame is scattered straight into parameter and optimizer state.

Views of their memory are written in place; tables on an accelerator go through a staging copy, which is copied when all
rows are there. A table the checkpoint does not know, grown, shrunk or missing tables are refused unless `strict=False`,
which says what it did.
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
    """One table under restore."""

    table: TrackedTable
    target: TableTarget
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(staging, live): what to copy when all rows are there."""
    from_deltas: np.ndarray[Any, np.dtype[np.bool_]]
    """Rows of the shard, counted from 0, that came from delta frames."""
    newer: np.ndarray[Any, np.dtype[np.bool_]]
    """Rows of the shard, counted from 0, that are newer than the checkpoint."""


def _differences(live: TableSchema, held: TableSchema, *, strict: bool) -> list[str]:
    """How table `live` differs from what is stored; unless `strict`, with what becomes of it.

    Raises:
        CheckpointMismatch: with `strict`, rows of another width, which cannot be taken at all.
    """
    rows, columns = live.rows, live.columns
    was = f"[{held.rows}, {held.columns}]"
    now = f"[{rows}, {columns}]"
    if held.columns != columns and not strict:
        return [f"table {live.fqn} has other columns: {was} is stored, the model has {now}; it stays initial"]
    if held.columns != columns:
        raise CheckpointMismatch(
            f"table {live.fqn} has other columns: {was} is stored, the model has {now}",
            where="tables",
            remedy=f"build it with {held.columns} columns as it was, or restore(strict=False), which leaves it initial",
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
    """The rows of the shard that both the model and the checkpoint have; none where the stored table ends before it."""
    stop = max(table.box.row_start, min(held.rows, table.box.row_stop))
    return replace(table.box, row_stop=stop)


class ModelTargets:
    """The model's tables as targets of a restore, after they were compared with what is stored."""

    def __init__(
        self,
        tracking: Tracking,
        stored: Sequence[TableSchema],
        *,
        strict: bool,
        weights_only: bool,
        renames: Mapping[str, str],
    ) -> None:
        """`renames` gives the stored name of a table by the model's name for it.

        Raises:
            CheckpointMismatch: tables differ in a way that is not allowed.
        """
        self.notes: list[str] = []
        self.placed: list[_TargetTable] = []
        """Nothing before `allocate`."""
        self.renames = dict(renames)
        self.strict = strict
        self.weights_only = weights_only
        by_name = {schema.fqn: schema for schema in stored}
        live = tracking.inventory.elsewhere | {table.fqn: table.schema for table in tracking.tables}
        named = {renames.get(fqn, fqn): schema for fqn, schema in live.items()}
        faults = [f"table {fqn} is stored, the model has none" for fqn in by_name.keys() - named.keys()]
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
        # A delta says its tables' names: what it covers must have stored them under the same.
        self._names_match = not faults and all(fqn == held.fqn for fqn, held in fitting.items())

    @property
    def boxes(self) -> list[Box]:
        return [_box(table, held) for table, held in self._tables]

    def allocate(self, mismatched_optimizers: Collection[int]) -> None:
        """Make room for rows and their optimizer state.

        `mismatched_optimizers` are the optimizers that were others when this was stored: they get no row state of those.
        """
        for table, held in self._tables:
            self.placed.append(self._allocate_table(table, held, frozenset(mismatched_optimizers)))

    def frame_consumer(self, applier: FrameApplier) -> Callable[[Frame, bool], None]:
        """The consumer of frames: decode, scatter, note what came from deltas."""
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
        """Mark rows that came from deltas, for the next cut's baseline, and newer ones, which no commit holds."""
        for placed in self.placed:
            placed.table.reseed(torch.from_numpy(np.flatnonzero(placed.from_deltas)))
        for placed in self.placed:
            if len(ids := np.flatnonzero(placed.newer)):
                marks = placed.table.marks
                marks.mark(torch.from_numpy(ids).to(marks.flags.device))

    @property
    def is_complete(self) -> bool:
        """Whether every row and row field of the model is stored: a delta may follow. Ask when all is applied."""
        return self._names_match and all(
            p.table.state_tensors().keys() <= p.target.fields.keys() for p in self.placed
        )

    def uncovered_shards(self, other: ModelTargets) -> list[str]:
        """Shards of which `other` may have written more than this one will."""
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
                self.notes.append(f"{table.fqn}: no optimizer owns its stored state {spec.name}")
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
