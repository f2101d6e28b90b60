"""Build a read plan for a checkpoint of the log from its manifests, chain and indexes; allocate whole tables.

This is the I/O layer around `plan`, for the sidecar, which hands frames to its trainer, and for `open_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.errors import FormatError, InvalidCheckpoint, UnsupportedVersion
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.blob_name import parse_blob_name, ranks_read_by
from deltashard_checkpoint.format.index import Index, decode_index
from deltashard_checkpoint.format.object_key import run_key
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.chain import blob_parts_of, chain, closure
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.frame_applier import TableTarget
from deltashard_checkpoint.restore.plan import Plan, Want, restore_plan
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store
from deltashard_checkpoint.stores.deadline import deadline

Array = npt.NDArray[np.generic]
T = TypeVar("T")
_MAX_READS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TableArrays:
    """Arrays of a whole table."""

    schema: TableSchema
    weights: Array
    """[rows, columns]; bfloat16 as uint16."""
    fields: Mapping[str, Array]


def load_indexes(
    store: Store,
    run: str,
    parts: Iterable[Part],
    *,
    workers: int = 8,
    deadline_s: float = 600.0,
    shared: SharedReads | None = None,
) -> dict[str, Index]:
    """Fetch the indexes of parts in parallel, check them against their names and return them by index key.

    `shared` holds bytes that other readers of this process have read. A mismatch is fetched once more. Raises
    `InvalidCheckpoint` for an index that is missing or mismatches twice, and `StoreUnavailable`.
    """
    wanted = list(dict.fromkeys(part.index_key for part in parts))
    with deadline(deadline_s), ThreadPoolExecutor(workers, thread_name_prefix="index") as pool:
        found = [pool.submit(copy_context().run, _load_index, store, run, key, shared) for key in wanted]
        return {key: each.result() for key, each in zip(wanted, found, strict=True)}


def _load_index(store: Store, run: str, key: str, shared: SharedReads | None) -> Index:
    where = run_key(run, key)
    for last in (False, True):
        try:
            data = store.get(where) if shared is None else shared.read(where, lambda: store.get(where))
            return decode_index(bytes(data), key=key, run=run)
        except UnsupportedVersion:
            raise
        except ObjectNotFound as error:
            raise InvalidCheckpoint("an index of the checkpoint does not exist", where=where) from error
        except FormatError as error:
            if last:
                raise InvalidCheckpoint(f"an index cannot be read: {error}", where=where) from error
            if shared is not None:
                shared.forget(where)
    raise AssertionError


def plan_restore(  # noqa: PLR0913
    store: Store,
    state: RunState,
    seq: int,
    wants: Iterable[Want],
    *,
    blobs: bool | Collection[str] = True,
    rank: int | None = None,
    world_size: int | None = None,
    strict: bool = True,
    mapping: Mapping[str, str] | None = None,
    weights_only: bool = False,
    indexes: Mapping[str, Index] | None = None,
    manifests: Manifests | None = None,
    shared: SharedReads | None = None,
    deadline_s: float = 600.0,
) -> Plan:
    """Return the plan that fills `wants` from `seq`; `blobs`: all that `rank` of `world_size` reads, none, or these.

    Indexes that are not given are fetched, and so are manifests. `manifests` caches those of its run; `shared` caches
    index bytes for other ranks of this process. Raises the errors of `Manifests`, `chain`, `load_indexes` and
    `restore_plan`.
    """
    wants = tuple(wants)
    state = (manifests or Manifests(store, state.run)).listing(state, closure(state, (seq,)))
    names = mapping or {}
    boxes = [replace(box, table=names.get(box.table, box.table)) for want in wants for box in want.boxes]
    links = chain(state, seq, boxes, strict=False)
    named = () if isinstance(blobs, bool) else blobs
    owners = {owner for owner in (parse_blob_name(name)[0] for name in named) if owner is not None}
    if rank is not None:
        owners.update(ranks_read_by(rank, world_size, state.checkpoints[seq].world_size))
    blob_parts = blob_parts_of(state, seq, owners) if blobs is not False else ()
    held = dict(indexes or {})
    parts = [part for part in (*(link.part for link in links), *blob_parts) if part.index_key not in held]
    held |= load_indexes(store, state.run, parts, deadline_s=deadline_s, shared=shared)
    return restore_plan(
        links,
        held,
        wants,
        seq=seq,
        blob_parts=blob_parts,
        blobs=None if isinstance(blobs, bool) else blobs,
        rank=rank,
        world_size=world_size,
        strict=strict,
        mapping=mapping,
        weights_only=weights_only,
    )


def read_consistent(log: RunLog, read: Callable[[RunState], T], *, deadline_s: float) -> T:
    """Call `read` with the run at the tip of its log, and again if the run advanced in the meantime.

    Without an attempt a reader does not protect what it reads from retention, compaction and garbage collection. So an
    invalid checkpoint counts as such only if the log has not advanced, or in the last of `_MAX_READS` tries. Raises the
    errors of `read` and of the log.
    """
    reads = 1
    while True:
        state = log.refresh(deadline_s=deadline_s)
        try:
            return read(state)
        except InvalidCheckpoint:
            if reads == _MAX_READS or not has_advanced(log, state, deadline_s=deadline_s):
                raise
        reads += 1


def has_advanced(log: RunLog, state: RunState, *, deadline_s: float) -> bool:
    """Return whether the log has entries after those of `state`; raises the errors of reading the log."""
    tip = state.tip
    return log.refresh(deadline_s=deadline_s).tip != tip


def whole_tables(tables: Iterable[TableSchema]) -> tuple[Want, ...]:
    return tuple(
        Want(
            schema=t,
            boxes=(Box(table=t.fqn, row_start=0, row_stop=t.rows, col_start=0, col_stop=t.columns),),
        )
        for t in tables
    )


def target_of(schema: TableSchema, box: Box, *, fields: bool) -> TableTarget:
    """Allocate zeroed arrays for one box of a table, with or without its optimizer state."""
    rows, columns = box.row_stop - box.row_start, box.col_stop - box.col_start
    shapes = {
        spec.name: ((rows, columns) if spec.kind == "pointwise" else (rows,), spec.dtype)
        for spec in (schema.fields if fields else ())
    }
    return TableTarget(
        schema=schema,
        box=box,
        weights=np.zeros((rows, columns), element_type.by_name(schema.dtype).carrier),
        fields={
            name: np.zeros(shape, element_type.by_name(dtype).carrier)
            for name, (shape, dtype) in shapes.items()
        },
    )
