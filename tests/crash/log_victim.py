"""A process that dies where it is told: `python -m tests.crash.log_victim DIRECTORY ACTION` with DELTASHARD_CRASH_AT.

The run in DIRECTORY is built by `prepare`: two chains, the older one retired and waiting for gc, one delta on top.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from deltashard_checkpoint import attempts, commits, compactions, framings, gcs, moves, retentions
from deltashard_checkpoint.caches import PackCache
from deltashard_checkpoint.keys import new_token, pack_key
from deltashard_checkpoint.logs import RunLog
from deltashard_checkpoint.parts import PartTarget, PartWriter
from deltashard_checkpoint.stores.urls import open_store
from deltashard_checkpoint.tables import Box, TableSchema

ROWS, COLUMNS = 64, 8
TABLE = TableSchema(fqn="items", rows=ROWS, columns=COLUMNS, dtype="float32")
BOX = Box(table="items", row_start=0, row_stop=ROWS, col_start=0, col_stop=COLUMNS)


def log_of(directory: Path) -> RunLog:
    """The run's log on a file store."""
    return RunLog(open_store(f"file://{directory}/store"), "job")


def values(step: int, rows: np.ndarray) -> np.ndarray:
    """What the rows hold at a step."""
    return np.repeat(rows[:, None] + 1000.0 * step, COLUMNS, axis=1).astype(np.float32)


def save(
    directory: Path, log: RunLog, attempt: int, cut: int, step: int, rows: np.ndarray, covers: int | None
) -> int:
    """One whole save of one rank, as a sidecar does it."""
    token = new_token()
    target = PartTarget(
        run="job",
        attempt=attempt,
        cut=cut,
        step=step,
        rank=0,
        token=token,
        tables=(TABLE,),
        boxes=(BOX,),
        covers=covers,
    )
    with (
        PackCache(directory / f"cache-{token}", budget_bytes=64 << 20) as cache,
        PartWriter(log.store, target, cache) as writer,
    ):
        for frame in framings.encode_row_frames(
            table=TABLE, ids=rows, weights=values(step, rows), fields={}, encoding="fp32", step=step
        ):
            writer.add(frame)
        part, stats = writer.finish(), writer.stats
    assert stats is not None
    report = commits.PartReport(
        part=part,
        tables=(TABLE,),
        encodings=stats.encodings,
        rows=stats.rows,
        raw_bytes=stats.raw_bytes,
        stall_s=0.0,
    )
    return commits.commit_part(
        log, attempt=attempt, cut=cut, step=step, world_size=1, token=token, report=report
    ).seq


def prepare(directory: Path) -> None:
    """Baselines at steps 1, 2 and 3, a delta at step 4; the first is retired; an uncommitted cut has left litter."""
    log = log_of(directory)
    attempt = attempts.open_attempt(log, owner="me").attempt
    everything = np.arange(ROWS)
    for cut in (1, 2, 3):
        base = save(directory, log, attempt, cut, cut, everything, None)
    save(directory, log, attempt, 4, 4, np.arange(8), base)
    retentions.append_retirement(log, retentions.Retention(keep_last=2))
    # What an older process left of a cut that was never committed: the next retirement names it.
    log.store.put(log.key(pack_key(attempt=attempt, cut=0, rank=0, token=new_token(), n=0)), b"litter")


def act(directory: Path, action: str) -> None:
    """Do one thing; the crash point ends it."""
    log = log_of(directory)
    state = log.refresh()
    newest = state.newest()
    assert newest is not None
    match action:
        case "save":
            assert state.attempt is not None
            save(directory, log, state.attempt, newest.cut + 1, 5, np.arange(8, 16), newest.seq)
        case "open":
            attempts.open_attempt(log, owner="me")
        case "retire":
            retentions.append_retirement(
                log, retentions.Retention(keep_last=1), debris=gcs.debris(log, state)
            )
        case "gc":
            gcs.collect(log, grace_s=0.0, forget_at=1)
        case "compact":
            with PackCache(directory / "compaction", budget_bytes=64 << 20) as cache:
                compactions.compact(log, newest.seq, moves.mover(cache))


if __name__ == "__main__":
    act(Path(sys.argv[1]), sys.argv[2])
