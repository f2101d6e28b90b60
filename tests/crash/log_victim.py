"""A process that is killed at DELTASHARD_CRASH_AT: `python -m tests.crash.log_victim DIRECTORY ACTION`.

`prepare` builds the run in DIRECTORY: two chains, the older one retired and waiting for gc, one delta on top.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.format import frame_encoder
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import new_token, pack_key
from deltashard_checkpoint.format.row_block import EncodeOptions, RowBlock
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance import compaction, garbage_collection, retention, row_mover, user_entry
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import ENCODINGS
from deltashard_checkpoint.write import attempt as attempts
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.part_writer import PartTarget
from deltashard_checkpoint.write.report import PartReport

from tests.support.checkpoint.sample import write_part

ROWS, COLUMNS = 64, 8
TABLE = TableSchema(fqn="items", rows=ROWS, columns=COLUMNS, dtype="float32")
BOX = Box(table="items", row_start=0, row_stop=ROWS, col_start=0, col_stop=COLUMNS)


def log_of(directory: Path) -> RunLog:
    return RunLog(open_store(f"file://{directory}/store"), "job")


def values(step: int, rows: np.ndarray) -> np.ndarray:
    """Return the values of the rows at a step."""
    return np.repeat(rows[:, None] + 1000.0 * step, COLUMNS, axis=1).astype(np.float32)


def save(
    directory: Path,
    log: RunLog,
    attempt: int,
    snapshot_id: int,
    step: int,
    rows: np.ndarray,
    covers: int | None,
) -> int:
    report = written(directory, log, attempt, snapshot_id, step, rows, covers)
    return commit_parts(
        log, attempt=attempt, snapshot_id=snapshot_id, step=step, world_size=1, reports=[report]
    ).seq


def written(
    directory: Path, log: RunLog, attempt: int, snapshot_id: int, step: int, rows: np.ndarray, covers: int | None, *,
    rank: int = 0, box: Box = BOX,
) -> PartReport:  # fmt: skip
    token = new_token()
    target = PartTarget(
        run=log.run, attempt=attempt, snapshot_id=snapshot_id, step=step, rank=rank, token=token, tables=(TABLE,), boxes=(box,), covers=covers
    )  # fmt: skip
    block = RowBlock.of_whole_rows(TABLE, rows, values(step, rows), {})
    frames = frame_encoder.encode_row_frames(block, EncodeOptions(encoding=ENCODINGS["fp32"]), step=step)
    with PackCache(directory / f"cache-{token}", budget_bytes=64 << 20) as cache:
        return write_part(log.store, cache, target, frames)


HALVES = (replace(BOX, row_stop=ROWS // 2), replace(BOX, row_start=ROWS // 2))


def layout_of_two() -> Layout:
    """Return the layout of two ranks, with half of the table each."""
    return Layout.of(2, {TABLE.fqn: (ROWS, COLUMNS)}, {rank: [half] for rank, half in enumerate(HALVES)})


def save_two_ranks(directory: Path, log: RunLog, step: int = 5) -> int:
    """Open a new attempt of two ranks and commit their first checkpoint of all rows; return its seq."""
    layout = layout_of_two()
    attempt = attempts.open_attempt(log, owner="me", world_size=2, layout=layout.data).attempt
    rows = [np.arange(half.row_start, half.row_stop) for half in HALVES]
    reports = [
        written(directory, log, attempt, 1, step, rows[rank], None, rank=rank, box=half)
        for rank, half in enumerate(HALVES)
    ]
    return commit_parts(
        log, attempt=attempt, snapshot_id=1, step=step, world_size=2, reports=reports, layout=layout.digest
    ).seq  # fmt: skip


def prepare(directory: Path) -> None:
    """Write baselines at steps 1, 2, 3 and a delta at step 4, retire the first, and leave an uncommitted object."""
    log = log_of(directory)
    attempt = attempts.open_attempt(log, owner="me").attempt
    everything = np.arange(ROWS)
    for snapshot_id in (1, 2, 3):
        base = save(directory, log, attempt, snapshot_id, snapshot_id, everything, None)
    save(directory, log, attempt, 4, 4, np.arange(8), base)
    retention.append_retirement(log, retention.Retention(keep_last=2))
    # The object of an older process' snapshot that was never committed: the next retirement names it.
    log.store.put(
        log.key(pack_key(attempt=attempt, snapshot_id=0, rank=0, token=new_token(), n=0)), b"litter"
    )


def act(directory: Path, action: str) -> None:
    log = log_of(directory)
    state = log.refresh()
    newest = state.newest()
    assert newest is not None
    match action:
        case "save":
            assert state.attempt is not None
            save(directory, log, state.attempt, newest.snapshot_id + 1, 5, np.arange(8, 16), newest.seq)
        case "open":
            attempts.open_attempt(log, owner="me")
        case "retire":
            retention.append_retirement(
                log,
                retention.Retention(keep_last=1),
                orphaned_prefixes=garbage_collection.orphaned_prefixes(log, state),
            )
        case "retire these":
            oldest = min(state.checkpoints)
            retention.retire_selected(log, lambda _state: [oldest])
        case "pin":
            user_entry.pin(log, "paper", "step:3")
        case "rewind":
            user_entry.rewind(log, "step:3", ended=True)
        case "gc":
            garbage_collection.collect(log, grace_s=0.0, min_reclaim_prefixes=1)
        case "ranks":
            save_two_ranks(directory, log)
        case "compact":
            with PackCache(directory / "compaction", budget_bytes=64 << 20) as cache:
                compaction.compact(log, newest.seq, row_mover.mover(cache))


if __name__ == "__main__":
    act(Path(sys.argv[1]), sys.argv[2])
