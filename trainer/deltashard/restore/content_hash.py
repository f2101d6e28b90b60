"""Content hashes: the expected content of a restore, recorded by the snapshot, compared afterwards. Off by default.

For every table shard one 64-bit hash per row is kept: of decode(encode(row)) under the save's encoding, together with
the row's optimizer state. A snapshot updates the hashes of the rows it sends. Their sum, each weighted with an odd
number derived from its row id (so that swapped rows are detected), is saved in the metadata as `content/<shard>` and in
the `meta` blob. After a restore the same sum is computed from the model; sums of other shards are not comparable.

The hash is the checkpoint package's row hash. The round trip uses the sidecar's codec, batch by batch as sent, since
the frame's exponent depends on the batch. It costs one encode and decode of the sent rows, within the stall, and 8
bytes of memory per row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from deltashard_checkpoint.codecs import row_kernel
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.frame_encoder import encode_row_frames
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.vocabulary import encoding_named
from torch import Tensor

from deltashard.state.discovery import shard_key
from deltashard.state.value import array_of
from deltashard.tracking.tracking import Tracking

Array = npt.NDArray[Any]
SEED = 0xC0_17E_17


def _hashes(weights: Array, fields: Sequence[Array]) -> npt.NDArray[np.uint64]:
    return row_kernel.row_hashes([np.ascontiguousarray(s) for s in (weights, *fields)], SEED)


def _sum(hashes: npt.NDArray[np.uint64]) -> str:
    odd = 2 * np.arange(len(hashes), dtype=np.uint64) + np.uint64(1)
    return f"{int(np.sum(hashes * odd, dtype=np.uint64)):016x}"


class ContentHashes:
    """Expected hashes of every table's rows."""

    def __init__(self) -> None:
        self._expected: dict[str, npt.NDArray[np.uint64]] = {}
        self._staged: list[tuple[str, int, npt.NDArray[np.int64] | slice, npt.NDArray[np.uint64]]] = []

    def add_batch(
        self,
        schema: TableSchema,
        box: Box,
        ids: npt.NDArray[np.int64] | range,
        sections: Sequence[Array],
        *,
        encoding: str,
        state_encoding: str,
    ) -> None:
        """Stage the hashes of a batch: rows `ids` of the shard `box`, both in coordinates of the whole table.

        `sections` are weights [n, C] and fields [n] or [n, C], in schema order.
        """
        # Rows are renumbered within the batch: their encoding is the same, and the scratch target stays small.
        n = len(ids)
        local = replace(schema, rows=n, columns=box.col_stop - box.col_start)
        applier = FrameApplier([target := _scratch(local)])
        fields = {spec.name: values for spec, values in zip(schema.fields, sections[1:], strict=True)}
        frames = encode_row_frames(
            RowBlock.of_whole_rows(local, range(n), sections[0], fields),
            EncodeOptions(encoding=encoding_named(encoding), state_encoding=state_encoding),
            step=0,
        )
        for frame in frames:
            applier.apply(frame.data, frame.tail)
        hashes = _hashes(target.weights, [target.fields[spec.name] for spec in schema.fields])
        where: npt.NDArray[np.int64] | slice = (
            slice(ids.start - box.row_start, ids.stop - box.row_start)
            if isinstance(ids, range)
            else ids - np.int64(box.row_start)
        )
        key = shard_key(box, schema.rows, schema.columns)
        self._staged.append((key, box.row_stop - box.row_start, where, hashes))

    def finish_snapshot(self) -> dict[str, str]:
        """Commit the staged hashes of a complete snapshot; returns the sums by shard."""
        for key, rows, where, hashes in self._staged:
            held = self._expected.get(key)
            if held is None or len(held) != rows:
                held = self._expected[key] = np.zeros(rows, np.uint64)
            held[where] = hashes
        self._staged.clear()
        return {key: _sum(hashes) for key, hashes in sorted(self._expected.items())}

    def discard_staged(self) -> None:
        self._staged.clear()

    def reset_from_model(self, tracking: Tracking) -> dict[str, str]:
        """Compute all hashes from the model; returns the sums by shard."""
        self._expected = {}
        for table in tracking.tables:
            fields = [_column(t) for t in table.state_tensors().values()]
            self._expected[table.key] = _hashes(array_of(table.param.detach().cpu().contiguous()), fields)
        return {key: _sum(hashes) for key, hashes in sorted(self._expected.items())}


def differing_shards(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return sorted(key for key, value in recorded.items() if found.get(key) != value)


def resharded(recorded: Mapping[str, str], found: Mapping[str, str], tables: Collection[str]) -> set[str]:
    """Recorded shards without a comparable sum: tables of the model in `tables` that are sharded differently now."""
    return {key for key in recorded.keys() - found.keys() if key.endswith("]") or key in tables}


def _column(state: Tensor) -> Array:
    state = state.detach().cpu().contiguous()
    return array_of(state.reshape(-1) if state.dim() == 2 and state.shape[1] == 1 else state)


def _scratch(schema: TableSchema) -> TableTarget:
    def room(dtype: str, kind: str) -> Array:
        shape = (schema.rows,) if kind == "rowwise" else (schema.rows, schema.columns)
        return np.zeros(shape, element_type.by_name(dtype).carrier)

    return TableTarget(
        schema=schema,
        box=Box(table=schema.fqn, row_start=0, row_stop=schema.rows, col_start=0, col_stop=schema.columns),
        weights=room(schema.dtype, "pointwise"),
        fields={spec.name: room(spec.dtype, spec.kind) for spec in schema.fields},
    )
