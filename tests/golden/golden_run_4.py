"""A fourth small run, in which people pin and rewind.

slot  what                                                  slot  what
   0  genesis                                                  8  attempt, resumes from 3
   1  attempt                                                  9  checkpoint since 3
   2  checkpoint, all rows, pinned best                       10  pin: best is nobody's
   3  checkpoint since 2                                      11  rewind to 6: 9 is set aside, 6 is not any more
   4  pin: paper is 2                                         12  attempt, resumes from 6
   5  pin: best is 3                                          13  checkpoint since 6
   6  checkpoint since 3, pinned best                         14  retire of 9
   7  rewind to 3: 6 is set aside
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance import word
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement

from tests.golden.golden_run import ITEMS, Held, Share, Writer, blank, fixed_tokens, written
from tests.support.checkpoint.sample import whole

RUN_4 = "run-4"


def make_run_4(directory: Path) -> tuple[dict[str, bytes], dict[int, Held]]:
    """As `golden_run.make_run`."""
    with fixed_tokens() as chance:
        writer = Writer(directory, chance, run=RUN_4, tables=(ITEMS,))
        _write(writer)
        return written(writer)


def _write(w: Writer) -> None:
    w.open()
    w.live = blank((ITEMS,))
    first = _save(w, range(ITEMS.rows), 1, None, pins=("best",))
    second = _save(w, (0, 7, 40), 2, first)
    word.pin(_tool(w, "pin paper"), "paper", f"seq:{first}")
    word.pin(_tool(w, "pin best"), "best", f"seq:{second}")
    third = _save(w, (1, 2), 3, second, pins=("best",))
    word.rewind(_tool(w, "rewind"), f"seq:{second}", ended=True)
    w.open()
    _save(w, (3, 4), 4, second)
    word.pin(_tool(w, "unpin best"), "best", None)
    word.rewind(_tool(w, "rewind again"), f"seq:{third}", ended=True)
    w.open()
    _save(w, (5,), 5, third)
    append_retirement(_tool(w, "retention"), Retention(keep_last=1))


def _tool(w: Writer, doing: str) -> RunLog:
    """The log, as a person's tool finds it."""
    w.pass_to(doing)
    return RunLog(w.store, w.run, clocks=w.clocks, readers=1)


def _save(
    w: Writer, rows: Sequence[int], salt: int, covers: int | None, *, pins: tuple[str, ...] = ()
) -> int:
    ids = w.train(ITEMS, rows, 1000 * salt)
    if covers is None:
        ids = np.arange(ITEMS.rows)
    return w.save([Share([whole(ITEMS)], [w.frame(ITEMS, ids, "fp32")], covers)], pins=pins)
