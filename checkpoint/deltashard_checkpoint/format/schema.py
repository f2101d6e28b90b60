"""Logical coordinates of an embedding table: (table FQN, global row, column range), never rank and offset.

A `TableSchema` names a table, its global shape and the optimizer-state fields that travel with each row;
a `Box` is a rectangle of it. Restore may go to any other sharding because nothing stored knows more than boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal["rowwise", "pointwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One optimizer-state field of a table: `rowwise` is one value a row [R], `pointwise` one a weight [R, D]."""

    name: str
    """Canonical key, the same in every sharding: e.g. `sum` (Adagrad), `exp_avg`, `exp_avg_sq`, `momentum_buffer`."""
    kind: FieldKind
    dtype: str
    """numpy-style name of the values' type: float32, float64, float16, bfloat16, int64, ..."""

    def values(self, columns: int) -> int:
        """Values of one row that is `columns` columns wide."""
        return columns if self.kind == "pointwise" else 1

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the field's array: [rows], or [rows, columns] when point-wise."""
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
