"""Move the encoded rows of a chain into one synthetic baseline: the mover for `compaction.compact`.

Frames of the chain are read newest first, as in a restore. Rows that a newer frame has provided are dropped from older
frames. A frame that loses no row is copied verbatim; any other is rewritten with the surviving rows, still encoded. So
a restore of the compaction reads, row by row, the same codes, scales and state as before. Blobs are copied.

Provided rows are tracked per table and column range, one byte per row. A chain whose column shards changed is rejected
(`CompactionUnsupported`), because an encoded row cannot be split along columns without encoding it again; the next
baseline ends such a chain anyway. A chain with tombstones is rejected unless the target is a compaction: in no other
baseline do tombstones count as rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.format.frame import Frame, FrameKind
from deltashard_checkpoint.format.frame_encoder import EncodedFrame, raw_bytes_of, take_rows
from deltashard_checkpoint.format.index import Index
from deltashard_checkpoint.log.chain import ChainLink, parts_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Part
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance.compaction import MovedRows, Mover
from deltashard_checkpoint.restore.checkpoint_reader import load_indexes, whole_tables
from deltashard_checkpoint.restore.fetcher import FetchedFrame, Fetcher
from deltashard_checkpoint.restore.plan import restore_plan
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.write.part_writer import PartTarget, PartWriter

DEADLINE_S = 3600.0


class CompactionUnsupported(EnvironmentFault):
    """The rows of this chain cannot be moved; the chain still restores as before."""


@dataclass(slots=True)
class _ProvidedRows:
    """Rows of each table that newer frames have provided, per column range."""

    ranges: dict[str, dict[tuple[int, int], npt.NDArray[np.bool_]]] = field(default_factory=dict)

    def claim(self, frame: Frame) -> npt.NDArray[np.bool_]:
        """Return which rows of `frame` no newer frame has provided, bool [rows], and mark them as provided."""
        info, table = frame.info, frame.table
        assert table is not None
        columns = (info.col_start, info.col_stop)
        held, ids = self.ranges.setdefault(info.table, {}), frame.row_ids()
        for (first, end), others in held.items():
            overlaps = first < columns[1] and columns[0] < end and (first, end) != columns
            if overlaps and others[ids[ids < len(others)]].any():
                raise CompactionUnsupported(
                    f"column ranges of {info.table} changed within the chain",
                    remedy="the next baseline ends this chain",
                )
        rows = held.setdefault(columns, np.zeros(0, np.bool_))
        if len(rows) < table.rows:
            held[columns] = rows = np.concatenate([rows, np.zeros(table.rows - len(rows), np.bool_)])
        mine = ~rows[ids]
        rows[ids] = True
        return mine


def mover(cache: PackCache, *, throttle: Callable[[], None] = lambda: None) -> Mover:
    """Return a `Mover` that spools packs in `cache` and calls `throttle`, which may wait, before each frame."""
    return partial(move_rows, cache=cache, throttle=throttle)


def move_rows(
    log: RunLog,
    state: RunState,
    seq: int,
    links: tuple[ChainLink, ...],
    token: str,
    *,
    cache: PackCache,
    throttle: Callable[[], None] = lambda: None,
) -> MovedRows:
    """Write the synthetic baseline of checkpoint `seq` under `data/compact-{token}/`, as one part with all its boxes.

    Raises the errors of `move_checkpoint`.
    """
    entry = state.checkpoints[seq]
    target = PartTarget(
        run=log.run,
        attempt=entry.attempt,
        snapshot_id=entry.snapshot_id,
        step=entry.step,
        rank=0,
        token=token,
        tables=entry.tables,
        boxes=tuple(box for part in parts_of(state, seq) for box in part.boxes),
        covers=None,
        compaction=True,
    )
    part, index = move_checkpoint(log, state, seq, links, log.store, target, cache=cache, throttle=throttle)
    return MovedRows(
        parts=(part,), encodings=index.encodings, rows=index.rows, stored_bytes=part.stored_bytes
    )


def move_checkpoint(
    log: RunLog,
    state: RunState,
    seq: int,
    links: tuple[ChainLink, ...],
    store: Store,
    target: PartTarget,
    *,
    cache: PackCache,
    throttle: Callable[[], None] = lambda: None,
) -> tuple[Part, Index]:
    """Write all rows and blobs that checkpoint `seq` of `log` reads as one part of `target` on `store`.

    Raises `CompactionUnsupported`, `InvalidCheckpoint` (retired since, or corrupt), `UploadFailed`, `StoreUnavailable`.
    """
    entry, parts = state.checkpoints[seq], parts_of(state, seq)
    indexes = load_indexes(
        log.store, log.run, [*(link.part for link in links), *parts], deadline_s=DEADLINE_S
    )
    blobs = {name for part in parts for name in indexes[part.index_key].blobs}
    plan = restore_plan(links, indexes, whole_tables(entry.tables), seq=seq, blob_parts=parts, blobs=blobs)
    provided = _ProvidedRows()
    with PartWriter(store, target, cache, deadline_s=DEADLINE_S) as writer:
        for fetched in Fetcher(log.store, log.run, cache=cache, deadline_s=DEADLINE_S).fetch(plan):
            throttle()
            frame = fetched.frame
            moved: EncodedFrame | None
            if frame.info.kind is FrameKind.BLOB:
                moved = EncodedFrame(info=frame.info, data=fetched.data, raw_bytes=len(frame.chunk))
            else:
                moved = _survivors(fetched, provided.claim(frame))
                if moved is not None and frame.info.kind is FrameKind.TOMBSTONE and not target.compaction:
                    raise CompactionUnsupported(
                        f"rows of {frame.info.table} are tombstones within the chain",
                        remedy="the next baseline ends this chain",
                    )
            if moved is not None:
                writer.add(moved)
        crash_point("compact.after_packs")
        part = writer.finish()
        index = writer.index
    crash_point("compact.after_index")
    assert index is not None
    return part, index


def _survivors(fetched: FetchedFrame, mine: npt.NDArray[np.bool_]) -> EncodedFrame | None:
    frame = fetched.frame
    assert frame.table is not None
    if mine.all():
        return EncodedFrame(
            info=frame.info,
            data=fetched.data,
            tail=fetched.tail,
            raw_bytes=raw_bytes_of(frame.info, frame.table),
        )
    return take_rows(frame, mine) if mine.any() else None
