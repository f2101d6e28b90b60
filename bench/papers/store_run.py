"""A run of tables in memory, saved by the product's own write path, with every stored byte counted.

It does what a sidecar does with a snapshot: `differential.decide` chooses rows, frames are encoded, a `PartWriter`
puts packs and index, `commit_parts` the log's entry; then retention and garbage collection run. The store is in memory
and counts the bytes of puts. Marks are one bit a row, cleared when the log has their rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.codecs.quantizer import Search
from deltashard_checkpoint.format.frame_encoder import encode_row_frames
from deltashard_checkpoint.format.object_key import new_token
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.chain import closure, prefixes_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, prefix_of
from deltashard_checkpoint.maintenance.garbage_collection import collect
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from deltashard_checkpoint.stores.abc import Buffer
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.vocabulary import BITS_CHOICES, ENCODINGS, INCREMENTS_KEY
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.differential import decide, history, increments_text
from deltashard_checkpoint.write.part_writer import PartTarget, PartWriter
from deltashard_checkpoint.write.precision import StoredPrecision
from deltashard_checkpoint.write.report import PartReport

RUN = "papers"
POLICIES = ("full", "one-shot", "consecutive", "intermittent")
BITS = (32, 8, 4, 3, 2)
PACK_BYTES = 64 << 20
FRAME_BYTES = 8 << 20
"""Bytes of rows before encoding: a block of the arena, which a sidecar encodes into one frame."""


class ByteCountingStore(MemoryStore):
    """Counts the bytes of every successful put."""

    def __init__(self) -> None:
        super().__init__()
        self.put_bytes = 0

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        self.put_bytes += len(data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        super().put_if_absent(key, data)
        self.put_bytes += len(data)


@dataclass(slots=True, kw_only=True)
class LiveTable:
    """A table in a trainer's memory: weights [rows, columns], fields by name; float32."""

    schema: TableSchema
    weights: np.ndarray
    fields: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """One checkpoint."""

    baseline: bool
    rows: int
    written_bytes: int
    """Bytes put for the checkpoint: packs, index, log entries, including the entry that retires older ones."""
    chain_bytes: int
    """Bytes that its restore reads: its own objects and the earlier ones that it needs, and the whole log."""
    held_bytes: int


@dataclass(kw_only=True)
class StoreRun:
    """A context manager. Call `save` once an interval; the caller owns the tables and changes them in between."""

    tables: Sequence[LiveTable]
    policy: str
    bits: int
    keep_last: int = 1
    search: Search | None = None
    saved: list[SavedCheckpoint] = field(default_factory=list)
    store: ByteCountingStore = field(default_factory=ByteCountingStore)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="deltashard-papers-")))
        self._cache = self._stack.enter_context(PackCache(folder, budget_bytes=2 * PACK_BYTES))
        self.log = RunLog(self.store, RUN)
        self.attempt = open_attempt(self.log, owner="papers").attempt
        self._since_commit = [np.zeros(len(t.weights), np.bool_) for t in self.tables]
        self._since_baseline = [np.zeros(len(t.weights), np.bool_) for t in self.tables]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def save(self, changed: Sequence[np.ndarray]) -> SavedCheckpoint:
        """Commit a checkpoint; `changed` are the rows (int64, ascending) of each table that changed since the last."""
        for marks, ids in zip(
            (*self._since_commit, *self._since_baseline), (*changed, *changed), strict=True
        ):
            marks[ids] = True
        known = history(self.log.state, self.attempt, StoredPrecision.of(BITS_CHOICES[self.bits]))
        what = decide(self.policy, known)
        rows: list[np.ndarray | range]
        if what == "full":
            covers, rows = None, [range(len(t.weights)) for t in self.tables]
        elif what == "since_baseline":
            covers, rows = known.baseline, [np.flatnonzero(marks) for marks in self._since_baseline]
        else:
            covers, rows = known.newest, [np.flatnonzero(marks) for marks in self._since_commit]
        before = self.store.put_bytes
        metadata = {}
        if covers is not None and self.policy != "consecutive":
            metadata[INCREMENTS_KEY] = increments_text(known, covers)
        entry = self._commit(rows, covers, metadata)
        for marks in (*self._since_commit, *(self._since_baseline if covers is None else ())):
            marks[:] = False
        append_retirement(self.log, Retention(keep_last=self.keep_last))
        collect(self.log, grace_s=0)
        self.saved.append(
            SavedCheckpoint(
                baseline=covers is None,
                rows=entry.rows,
                written_bytes=self.store.put_bytes - before,
                chain_bytes=self._chain_bytes(),
                held_bytes=sum(info.size_bytes for info in self.store.list("")),
            )
        )
        return self.saved[-1]

    def restored(self) -> list[tuple[np.ndarray, Mapping[str, np.ndarray]]]:
        state = self.log.refresh()
        newest = state.newest()
        assert newest is not None
        opened = OpenCheckpoint.of(self.store, state, newest)
        found = {table.schema.fqn: (table.weights, table.fields) for table in opened.tables()}
        return [found[table.schema.fqn] for table in self.tables]

    def _commit(
        self, rows: Sequence[np.ndarray | range], covers: int | None, metadata: Mapping[str, str]
    ) -> Checkpoint:
        number = len(self.saved) + 1
        schemas = tuple(table.schema for table in self.tables)
        boxes = tuple(
            Box(table=s.fqn, row_start=0, row_stop=s.rows, col_start=0, col_stop=s.columns) for s in schemas
        )
        target = PartTarget(
            run=RUN, attempt=self.attempt, snapshot_id=number, step=number, rank=0, token=new_token(), tables=schemas,
            boxes=boxes, covers=covers,
        )  # fmt: skip
        options = EncodeOptions(encoding=ENCODINGS[BITS_CHOICES[self.bits]], search=self.search)
        with PartWriter(self.store, target, self._cache, pack_bytes=PACK_BYTES) as writer:
            for table, ids in zip(self.tables, rows, strict=True):
                at_once = max(1, FRAME_BYTES // (table.weights.nbytes // len(table.weights)))
                for at in range(0, len(ids), at_once):
                    some = ids[at : at + at_once]
                    where = slice(some.start, some.stop) if isinstance(some, range) else some
                    block = RowBlock.of_whole_rows(
                        table.schema,
                        some,
                        table.weights[where],
                        {name: values[where] for name, values in table.fields.items()},
                    )
                    for frame in encode_row_frames(block, options, step=number):
                        writer.add(frame)
            part = writer.finish()
        index = writer.index
        assert index is not None
        report = PartReport(
            part=part, tables=schemas, encodings=index.encodings, rows=index.rows,
            raw_bytes=index.raw_bytes, stall_s=0.0, metadata=metadata,
        )  # fmt: skip
        return commit_parts(
            self.log, attempt=self.attempt, snapshot_id=number, step=number, world_size=1, reports=[report]
        ).entry

    def _chain_bytes(self) -> int:
        state = self.log.state
        newest = state.newest()
        assert newest is not None
        prefixes = {prefix for seq in closure(state, (newest.seq,)) for prefix in prefixes_of(state, seq)}
        size = 0
        for info in self.store.list(""):
            key = info.key.removeprefix(f"{RUN}/")
            if not key.startswith("data/") or prefix_of(key) in prefixes:
                size += info.size_bytes
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCost:
    """The cost of a run's checkpoints against full fp32 ones of the same tables, as means."""

    write: float
    """Bytes of as many full fp32 checkpoints over all bytes written."""
    capacity: float
    """Bytes of one full fp32 checkpoint over the mean that restoring the newest one reads (`chain_bytes`)."""
    held: float
    """Bytes of one full fp32 checkpoint over the mean of `held_bytes`."""


def cost(saved: Sequence[SavedCheckpoint], full_bytes: float) -> StoreCost:
    """Return a run's cost against a full fp32 checkpoint of `full_bytes`. Pure."""
    count = len(saved)
    return StoreCost(
        write=full_bytes * count / sum(each.written_bytes for each in saved),
        capacity=full_bytes * count / sum(each.chain_bytes for each in saved),
        held=full_bytes * count / sum(each.held_bytes for each in saved),
    )
