"""A third small run: one rank, then four with a layout, then two with another, then one again.

slot  what                                                  slot  what
   0  genesis                                                  6  attempt, the same layout, resumes from 5
   1  attempt of one rank                                      7  checkpoint: since 5, since 4, all, since 5
   2  checkpoint, all rows                                     8  attempt of two ranks and another layout
   3  attempt of four ranks, of which one holds nothing        9  checkpoint, all rows
   4  checkpoint, all rows                                    10  checkpoint since 9
   5  checkpoint: rank 0 since 4, rank 1 all its rows, ...    11  retire of 2 and 9's elders, but for what a pin keeps
                                                              12  attempt of one rank, without a layout
                                                              13  checkpoint, all rows
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.maintenance import garbage_collection
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement

from tests.golden.golden_run import ITEMS, USERS, Held, Share, Writer, blank, fixed_tokens, written
from tests.support.checkpoint.sample import box, whole

RUN_3 = "run-3"
BOTH = (ITEMS, USERS)
GRID = (
    (box(ITEMS, 0, 48, 0, 3), box(USERS, 0, 10, 0, 6)),
    (box(ITEMS, 0, 48, 3, 8), box(USERS, 10, 30, 0, 2)),
    (box(USERS, 10, 30, 2, 6),),
    (),
)
ROWS = ((box(ITEMS, 0, 24, 0, 8),), (box(ITEMS, 24, 48, 0, 8), box(USERS, 0, 30, 0, 6)))
ALONE = ((whole(ITEMS), whole(USERS)),)


def make_run_3(directory: Path) -> tuple[dict[str, bytes], dict[int, Held]]:
    """As `golden_run.make_run`."""
    with fixed_tokens() as chance:
        writer = Writer(directory, chance, run=RUN_3, tables=BOTH)
        _write(writer)
        return written(writer)


def layout_of(boxes: Sequence[Sequence[Box]]) -> Layout:
    """The layout of ranks that hold these."""
    return Layout.of(len(boxes), {t.fqn: (t.rows, t.columns) for t in BOTH}, dict(enumerate(boxes)))


def _write(w: Writer) -> None:
    w.open()
    w.live = blank(BOTH)
    _train(w, 1, {table.fqn: range(table.rows) for table in BOTH})
    _save(w, ALONE, [None])

    w.open(world_size=4, layout=layout_of(GRID))
    first = _save(w, GRID, [None] * 4)
    _train(w, 2, {ITEMS.fqn: (0, 7, 40), USERS.fqn: (3, 11, 29)})
    second = _save(w, GRID, [first, None, first, first])
    w.open(world_size=4, layout=layout_of(GRID))
    _train(w, 3, {ITEMS.fqn: (1, 7), USERS.fqn: (0, 12)})
    _save(w, GRID, [second, first, None, second], pins=("paper",))

    w.open(world_size=2, layout=layout_of(ROWS))
    third = _save(w, ROWS, [None] * 2)
    _train(w, 4, {ITEMS.fqn: (23, 24), USERS.fqn: (5,)})
    _save(w, ROWS, [third] * 2)
    w.pass_to("retention")
    append_retirement(w.log, Retention(keep_last=1))
    w.pass_to("collection")
    garbage_collection.collect(w.log, grace_s=0.0, forget_at=99)

    w.open()
    _train(w, 5, {ITEMS.fqn: (2,), USERS.fqn: (6, 7)})
    _save(w, ALONE, [None])


def _train(w: Writer, salt: int, rows: dict[str, Sequence[int]]) -> None:
    """New values, marked as new since every checkpoint that there is."""
    for table in BOTH:
        w.train(table, rows[table.fqn], 1000 * salt)


def _save(
    w: Writer, boxes: Sequence[Sequence[Box]], covers: Sequence[int | None], pins: tuple[str, ...] = ()
) -> int:
    """Commit, of each rank, the rows whose values are not those of the checkpoint that it covers."""
    schemas = {table.fqn: table for table in BOTH}
    shares = []
    for held, covered in zip(boxes, covers, strict=True):
        frames = []
        for each in held:
            table, live = schemas[each.table], w.live[each.table]
            old = None if covered is None else w.checkpoints[covered].tables[each.table].weights
            changed = np.ones(table.rows, bool) if old is None else (live.weights != old).any(axis=1)
            ids = np.flatnonzero(changed)
            ids = ids[(ids >= each.row_start) & (ids < each.row_stop)]
            frames += [w.frame(table, ids, "fp32", each)] if len(ids) else []
        shares.append(Share(held, frames, covered))
    return w.save(shares, pins=pins)
