"""Read-only access to one checkpoint: whole tables one by one, selected rows of a table, and blobs.

Memory is bounded by the request, not by the checkpoint, and progress is reported. The command line and the trainer
library use this; a restore into a living model uses the sidecar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.chain import CheckpointNotFound, chain, closure, parts_of
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.log_error import stopped
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.log.selection import select
from deltashard_checkpoint.restore.checkpoint_reader import (
    TableArrays,
    load_indexes,
    plan_restore,
    target_of,
    whole_tables,
)
from deltashard_checkpoint.restore.fetcher import Fetcher
from deltashard_checkpoint.restore.frame_applier import FrameApplier, TableTarget
from deltashard_checkpoint.restore.plan import Plan, Want
from deltashard_checkpoint.stores.abc import Store

Rows = npt.NDArray[np.int64]
Advance = Callable[[int], None]
"""Callback with the number of bytes read since the last call."""

_NEAR_ROWS = 64
"""Rows no farther apart than this are read as one range."""
_MAX_RANGES = 64
"""Bound of the ranges that are read at once: every frame is checked against each range."""


def _no_progress(_bytes: int) -> None:
    pass


def choose(state: RunState, which: str) -> Checkpoint:
    """Return the live checkpoint selected by `which`: latest, seq:N (or just N), step:N or pin:NAME.

    Raises `CheckpointNotFound`, `LogStopped` if it may be in an unreadable slot, and `UserError` for other selectors.
    """
    try:
        found = None if which == "none" else select(state, f"seq:{which}" if which.isdecimal() else which)
    except CheckpointNotFound:
        if state.stopped is None:
            raise
        raise stopped(state) from None
    if found is None and state.stopped is not None and which != "none":
        raise stopped(state)
    if found is None:
        raise CheckpointNotFound("nothing has been committed yet", where=f"run {state.run}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A chosen checkpoint with the indexes of its chain."""

    store: Store
    state: RunState
    entry: Checkpoint
    indexes: Mapping[str, Index]

    @classmethod
    def of(cls, store: Store, state: RunState, entry: Checkpoint) -> OpenCheckpoint:
        """Open `entry` of the run.

        Raises:
            InvalidCheckpoint: a manifest or index is wrong, or confirmed missing.
            StoreUnavailable: the store does not answer.
        """
        state = Manifests(store, state.run).listing(state, closure(state, (entry.seq,)))
        links = chain(state, entry.seq)
        parts = [*(link.part for link in links), *parts_of(state, entry.seq)]
        return cls(store=store, state=state, entry=entry, indexes=load_indexes(store, state.run, parts))

    @property
    def where(self) -> str:
        return f"run {self.state.run}, checkpoint {self.entry.seq} (step {self.entry.step})"

    @property
    def blob_names(self) -> tuple[str, ...]:
        """All blob names, including blobs of single ranks, sorted."""
        parts = parts_of(self.state, self.entry.seq)
        return tuple(sorted({name for part in parts for name in self.indexes[part.index_key].blobs}))

    def plan(
        self, tables: Collection[TableSchema], *, blobs: bool | Collection[str], fields: bool = True
    ) -> Plan:
        """Return the plan of a restore of whole tables; `blobs`: those for all ranks, none, or these."""
        return self._plan(whole_tables(tables), blobs=blobs, fields=fields)

    def tables(
        self,
        schemas: Collection[TableSchema] | None = None,
        *,
        fields: bool = True,
        advance: Advance = _no_progress,
    ) -> Iterator[TableArrays]:
        """Yield whole tables, one at a time."""
        for schema in self.entry.tables if schemas is None else schemas:
            yield self.span(schema, 0, schema.rows, fields=fields, advance=advance)

    def span(
        self,
        schema: TableSchema,
        start: int,
        stop: int,
        *,
        fields: bool = True,
        advance: Advance = _no_progress,
    ) -> TableArrays:
        """Return rows [start, stop) of one table, in order; the range must be within the table."""
        (target,) = self._targets(schema, [(start, stop)], fields=fields, advance=advance)
        return TableArrays(schema=schema, weights=target.weights, fields=target.fields)

    def _targets(
        self, schema: TableSchema, spans: Sequence[tuple[int, int]], *, fields: bool, advance: Advance
    ) -> list[TableTarget]:
        """Return rows [start, stop) of one table, for each of `spans`."""
        boxes = tuple(_rows_of(schema, *span) for span in spans)
        # Plan before allocating memory, because planning validates the request.
        plan = self._plan((Want(schema=schema, boxes=boxes),), blobs=False, fields=fields)
        targets = [target_of(schema, box, fields=fields) for box in boxes]
        self._apply(FrameApplier(targets), plan, advance)
        return targets

    def rows(self, schema: TableSchema, ids: npt.ArrayLike, *, fields: bool = True) -> TableArrays:
        """Return rows `ids` (integers [n], any order, repeats allowed) of one table, in that order.

        Raises:
            UserError: ids are not integers, or are outside the table.
        """
        wanted = np.asarray(ids)
        wanted = wanted.astype(np.int64) if wanted.size == 0 else wanted
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise UserError(
                f"row ids are integers [n], not {wanted.dtype} {list(wanted.shape)}", where=schema.fqn
            )
        if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < schema.rows:
            raise UserError(
                f"rows {int(wanted.min())} to {int(wanted.max())} are asked for",
                where=schema.fqn,
                remedy=f"the table has rows 0 to {schema.rows - 1}",
            )
        spans = _ranges(np.unique(wanted).astype(np.int64))
        targets = self._targets(schema, spans, fields=fields, advance=_no_progress) if spans else []
        held = target_of(schema, _rows_of(schema, 0, len(wanted)), fields=fields)
        for target in targets:
            box = target.box
            inside = (wanted >= box.row_start) & (wanted < box.row_stop)
            at = wanted[inside] - box.row_start
            held.weights[inside] = target.weights[at]
            for name, values in target.fields.items():
                held.fields[name][inside] = values[at]
        return TableArrays(schema=schema, weights=held.weights, fields=held.fields)

    def blobs(
        self, names: Collection[str] | None = None, *, advance: Advance = _no_progress
    ) -> Mapping[str, memoryview]:
        """Return the blobs for all ranks, or the named ones, by name."""
        applier = FrameApplier([])
        wanted = True if names is None else names
        self._apply(applier, self._plan((), blobs=wanted, fields=True), advance)
        return applier.blobs

    def _plan(self, wants: Collection[Want], *, blobs: bool | Collection[str], fields: bool) -> Plan:
        return plan_restore(
            self.store,
            self.state,
            self.entry.seq,
            wants,
            blobs=blobs,
            weights_only=not fields,
            indexes=self.indexes,
        )

    def _apply(self, applier: FrameApplier, plan: Plan, advance: Advance) -> None:
        for fetched in Fetcher(self.store, self.state.run).fetch(plan):
            applier.apply(fetched.frame)
            advance(len(fetched.data) + len(fetched.tail or b""))
        applier.finish(blobs=plan.blobs)


def _rows_of(schema: TableSchema, start: int, stop: int) -> Box:
    return Box(table=schema.fqn, row_start=start, row_stop=stop, col_start=0, col_stop=schema.columns)


def _ranges(ids: Rows) -> list[tuple[int, int]]:
    """Return a few ranges [start, stop) that hold `ids` (ascending, unique), split at the widest gaps."""
    if not len(ids):
        return []
    gaps = np.diff(ids)
    splits = np.flatnonzero(gaps > _NEAR_ROWS)
    if len(splits) >= _MAX_RANGES:
        splits = np.sort(splits[np.argsort(gaps[splits], kind="stable")[-(_MAX_RANGES - 1) :]])
    starts: list[Any] = [ids[0], *ids[splits + 1]]
    stops: list[Any] = [*ids[splits], ids[-1]]
    return [(int(a), int(b) + 1) for a, b in zip(starts, stops, strict=True)]
