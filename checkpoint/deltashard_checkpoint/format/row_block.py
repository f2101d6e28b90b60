"""Rows of a table shard in memory, and their storage options: the input of frame encoding.

A `RowBlock` is checked against its schema when it is created, so encoders need no further checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs.encoding import effective_encoding, section_bytes
from deltashard_checkpoint.codecs.quantizer import Search
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.schema import TableSchema
from deltashard_checkpoint.vocabulary import DEFAULT_STATE_ENCODING, Encoding, stored_state_dtype

Array = npt.NDArray[np.generic]


class FrameEncodeError(UserError):
    """Rows, fields or a buffer cannot be encoded as a frame."""


def weight_row_bytes(table: TableSchema, columns: int) -> int:
    """Return the bytes of one row's weights for `columns` columns, in the training dtype."""
    return columns * element_type.by_name(table.dtype).itemsize_bytes


def raw_row_bytes(table: TableSchema, columns: int) -> int:
    """Return the bytes of one row of `columns` columns with its fields, in the training dtypes, without its id."""
    return weight_row_bytes(table, columns) + sum(
        spec.values(columns) * element_type.by_name(spec.dtype).itemsize_bytes for spec in table.fields
    )


def stored_row_bytes(table: TableSchema, columns: int, encoding: Encoding, state_encoding: str) -> int:
    """Return the stored bytes of one row of `columns` columns with its fields, without its id and exceptions."""
    weights = sum(section_bytes(effective_encoding(encoding, table.dtype, columns), 1, columns))
    return weights + sum(
        spec.values(columns)
        * element_type.by_name(
            stored_state_dtype(state_encoding, pointwise=spec.kind == "pointwise", dtype=spec.dtype)
        ).itemsize_bytes
        for spec in table.fields
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBlock:
    """Rows of one table shard. Raises `FrameEncodeError` if the arrays do not match the schema.

    Its arrays are views of the caller's; nothing is copied.
    """

    schema: TableSchema
    """Schema of the whole table; `fields` has exactly one array for each of its fields."""
    ids: npt.NDArray[np.int64] | range
    """Global rows, int64 [n] strictly ascending, or a range of step 1; n is at least 1."""
    weights: Array
    """[n, D] of the table's dtype (bfloat16 as uint16), D = len(columns)."""
    fields: Mapping[str, Array]
    """Optimizer state by field name: row-wise [n], point-wise [n, D], of the field's dtype."""
    columns: range
    """Global columns of these rows, of step 1."""

    def __post_init__(self) -> None:
        table, columns = self.schema, self.columns
        n, width = len(self.ids), len(columns)
        if not 0 <= columns.start < columns.stop <= table.columns or columns.step != 1:
            raise FrameEncodeError(
                f"columns {columns.start}:{columns.stop} of {table.columns}", where=table.fqn
            )
        if n == 0 or self.weights.shape != (n, width) or self.weights.dtype != _carrier(table.dtype):
            raise FrameEncodeError(
                f"weights {self.weights.dtype}{list(self.weights.shape)} for {n} rows of {width} {table.dtype}",
                where=table.fqn,
            )
        row_min, row_max = self.row_span
        if row_min < 0 or row_max >= table.rows:
            raise FrameEncodeError(f"rows {row_min} to {row_max} of {table.rows}", where=table.fqn)
        if set(self.fields) != {spec.name for spec in table.fields}:
            raise FrameEncodeError(
                f"fields {sorted(self.fields)} given, the schema has {sorted(s.name for s in table.fields)}",
                where=table.fqn,
            )
        for spec in table.fields:
            values, shape = self.fields[spec.name], spec.shape(n, width)
            if values.shape != shape or values.dtype != _carrier(spec.dtype):
                raise FrameEncodeError(
                    f"field {values.dtype}{list(values.shape)}, {spec.dtype}{list(shape)} expected",
                    where=f"{table.fqn}.{spec.name}",
                )

    @classmethod
    def of_whole_rows(
        cls,
        schema: TableSchema,
        ids: npt.NDArray[np.int64] | range,
        weights: Array,
        fields: Mapping[str, Array],
    ) -> Self:
        return cls(schema=schema, ids=ids, weights=weights, fields=fields, columns=range(schema.columns))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: slice) -> RowBlock:
        return replace(
            self,
            ids=self.ids[rows],
            weights=self.weights[rows],
            fields={name: values[rows] for name, values in self.fields.items()},
        )

    @property
    def row_span(self) -> tuple[int, int]:
        """Smallest and largest global row, both inclusive."""
        return int(self.ids[0]), int(self.ids[-1])

    @property
    def raw_bytes(self) -> int:
        """Bytes of the rows and their fields before encoding, without ids."""
        return len(self) * raw_row_bytes(self.schema, len(self.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """Storage options of rows."""

    encoding: Encoding
    """Requested encoding of weights; a frame's `info.encoding` is the one in effect."""
    state_encoding: str = DEFAULT_STATE_ENCODING
    """Encoding of optimizer state, one of `vocabulary.STATE_ENCODINGS`."""
    search: Search | None = None
    """Range search of quantized encodings; None: the codecs' default for the encoding."""


def _carrier(dtype: str) -> np.dtype[np.generic]:
    return element_type.by_name(dtype).carrier
