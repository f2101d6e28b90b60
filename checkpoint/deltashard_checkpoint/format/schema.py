"""Logical coordinates of an embedding table: (table FQN, global row, column range), never rank and offset.

A `TableSchema` has a table's name, global shape and per-row optimizer-state fields; a `Box` is a rectangle of it.
Stored data refers to boxes only, so a checkpoint can be restored to any other sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal["rowwise", "pointwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One optimizer-state field of a table: `rowwise` has one value per row [R], `pointwise` one per weight [R, D]."""

    name: str
    """Canonical key, equal in every sharding: e.g. `sum` (Adagrad), `exp_avg`, `exp_avg_sq`, `momentum_buffer`."""
    kind: FieldKind
    dtype: str
    """numpy-style dtype name: float32, float64, float16, bfloat16, int64, ..."""

    def values(self, columns: int) -> int:
        """Return the number of values per row of `columns` columns."""
        return columns if self.kind == "pointwise" else 1

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the field's array: [rows], or [rows, columns] if point-wise."""
        return (rows, columns) if self.kind == "pointwise" else (rows,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """A table's name, global shape [rows, columns], weight dtype and fields."""

    fqn: str
    """Fully qualified parameter name without wrapper prefixes, e.g. `embeddings.items.weight`."""
    rows: int
    columns: int
    dtype: str
    """float32, float16, bfloat16 or float64."""
    fields: tuple[FieldSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of one table: rows [row_start, row_stop) x columns [col_start, col_stop), global coordinates."""

    table: str
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
