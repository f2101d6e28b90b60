"""A second small run, of what the first one does not tell apart: two ranks, one table of 7 columns cut at column 3.

    slot  what                                             slot  what
       0  genesis                                             5  repair: 3 is lost
       1  attempt of two ranks                                6  ignorable, of a kind that nobody knows
       2  checkpoint, all rows                                7  attempt, resumes from 4
       3  rot, where a checkpoint was                         8  checkpoint since 4, q8 rows that are rounded once
       4  checkpoint since 2; row 6 of rank 1 only            9  an entry of a newer version, which no attempt may void

Its fields are one value a row: `sum` is float64, so that (w / W) * m is not w * m / W, and `count` is an integer, which
the shards do not agree on.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from deltashard_checkpoint.format.canonical_json import canonical
from deltashard_checkpoint.format.schema import Box, FieldSpec, TableSchema
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.log.folded_state import fold_key
from deltashard_checkpoint.log.repair import repair, salvage

from tests.golden.golden_run import Held, Share, Writer, blank, fixed_tokens, written
from tests.support.checkpoint.sample import box

RUN_2 = "run-2"
WIDE = TableSchema(
    fqn="wide", rows=9, columns=7, dtype="float32",
    fields=(FieldSpec(name="sum", kind="rowwise", dtype="float64"), FieldSpec(name="count", kind="rowwise", dtype="int64")),
)  # fmt: skip
CUT = 3
BOXES = (box(WIDE, 0, 9, 0, CUT), box(WIDE, 0, 9, CUT, 7))
ONCE = ((2.0**-70, 1 + 8 / 512), (-(2.0**-70), 1 + 1 / 512))
"""Ranges of q8 rows in which code 3 is a tie of float32, but for the bias: too small to be seen in float64."""


def make_run_2(directory: Path) -> tuple[dict[str, bytes], dict[int, Held]]:
    """As `golden_run.make_run`."""
    with fixed_tokens() as chance:
        writer = Writer(directory, chance, run=RUN_2, tables=(WIDE,))
        _write(writer)
        return written(writer)


def _write(w: Writer) -> None:
    w.open(world_size=2)
    w.live = blank((WIDE,))
    first = _save(w, None, (_train(w, range(9), 1),) * 2)
    rotten = _save(w, first, (_train(w, (0, 3), 2),) * 2)
    live = w.live[WIDE.fqn]
    both = _train(w, (1, 4), 3)
    alone = {name: values[6, :CUT].copy() for name, values in (("", live.weights), *live.fields.items())}
    more = np.union1d(both, _train(w, (6,), 4))
    for name, values in (("", live.weights), *live.fields.items()):
        values[6, :CUT] = alone[name]
    second = _save(w, first, (both, more), newest=(6,))
    w.rot(rotten)
    covering = [name for name in w.log.listed().folds if name.seq >= rotten]
    w.store.delete([w.log.key(fold_key(name)) for name in covering])
    w.pass_to("repair")
    log = RunLog(w.store, w.run, clocks=w.clocks, readers=1)
    repair(log, salvage(log))
    w.pass_to("ignorable")
    _put(w, {"kind": "golden", "ignorable": True, "anything": [1, {"else": None}]})
    w.open(world_size=2)
    assert w.log.state.attempts[w.attempt].resumes_from == second
    ids = _train(w, (0, 5), 5)
    for row, (low, high) in zip(ids, ONCE, strict=True):
        w.live[WIDE.fqn].weights[row, :CUT] = low, 3 * high / 255, high
    last = _save(w, second, (ids, ids), encoding="q8", newest=(6,))
    w.pass_to("newer")
    document = json.loads(w.store.get(f"{RUN_2}/{entry_key(last)}"))
    _put(w, {**document, "format": 2, "cut": document["cut"] + 1, "shape": "unheard of"})


def _train(w: Writer, rows: range | tuple[int, ...], salt: int) -> np.ndarray:
    """New values, with a row-wise value of its own in each shard."""
    ids = w.train(WIDE, rows, 100 * salt)
    fields = w.live[WIDE.fqn].fields
    fields["sum"][ids, CUT:] += 0.1 * salt
    fields["count"][ids, CUT:] += 7
    return ids


def _save(
    w: Writer, covers: int | None, ids: tuple[np.ndarray, np.ndarray], *, encoding: str = "fp32", newest: tuple[int, ...] = ()
) -> int:  # fmt: skip
    """Commit these rows of the two shards; `newest`: rows of which rank 1 has written last."""

    def share(held: Box, rows: np.ndarray) -> Share:
        return Share([held], [w.frame(WIDE, rows, encoding, held)], covers)

    seq = w.save(
        [share(held, rows) for held, rows in zip(BOXES, ids, strict=True)], blobs={"note": b"golden"}
    )
    counts = w.checkpoints[seq].tables[WIDE.fqn].fields["count"]
    told = counts[:, 0].copy()
    told[list(newest)] = counts[list(newest), -1]
    w.checkpoints[seq].told["wide.count"] = told
    return seq


def _put(w: Writer, says: dict[str, object]) -> None:
    """An entry that no writer of today puts."""
    log = RunLog(w.store, w.run, clocks=w.clocks, readers=1)
    state = log.refresh()
    place = {"seq": state.tip + 1, "previous": state.tip_hash, "writer": "feedfeedfeedfeed", "at_s": w.now_s}
    document = {"format": 1} | says | place
    document.pop("hash", None)
    sealed = {**document, "hash": hashlib.sha256(canonical(document)).hexdigest()}
    w.store.put(f"{RUN_2}/{entry_key(state.tip + 1)}", canonical(sealed))
