"""What the next cut holds: everything, what changed since the baseline, or what changed since the last commit. Pure.

- `full`: every cut is a baseline.
- `one-shot`: one baseline, then every cut holds what changed since it. Restore reads two checkpoints; cuts grow.
- `consecutive`: every cut holds what changed since the last commit. Smallest cuts; restore reads all of them.
- `intermittent` (default): one-shot, with a predictor that says when a new baseline pays (Check-N-Run, NSDI'22):
  with S_i the bytes of the i-th increment over those of all rows,

      Fc = 1 + S_1 + ... + S_i     the next i + 1 cuts, if a baseline is taken now and history repeats
      Ic = (i + 1) * S_i           at least the next i + 1 cuts, if not
      baseline when Fc <= Ic, and i = 0 after it

  The "1 +" is the baseline itself, and history is cleared by a baseline: without either, every increment
  would be followed by a baseline.

S_i counts at the encoding in force, not at those of the past: it is what an increment of these rows, and a baseline,
would be *now*. Counted as stored, a run that goes from 8 to 2 bits never takes a baseline again, for no increment of
2 bits comes near a baseline of 8. An entry says its rows and blobs as one sum of bytes before encoding, and not which
rows: blobs are taken to be as large as the baseline's, and all rows of an increment to shrink as all tables together
do. Where tables differ in that (few columns, raw dtypes, bits by table) S_i is off by as much as the increment's mix of
tables differs from the model's.

Retention lets go of increments that newer ones have made superfluous, and the predictor must not forget them: each says
in its metadata what came before it since its baseline (`INCREMENTS_KEY`).

A compacted checkpoint is a baseline, too, if the newest one is read through it: the base of its chain lies there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from deltashard_checkpoint.format.row_block import raw_row_bytes, stored_row_bytes
from deltashard_checkpoint.log.chain import closure, lineage
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import INCREMENTS_KEY, differential_named, encoding_named
from deltashard_checkpoint.write.precision import StoredPrecision

MAX_INCREMENTS = 64
MAX_INCREMENTS_TEXT = 2048
_INCREMENTS = re.compile(r"([0-9]{1,18}):((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)", re.ASCII)
Decision = Literal["full", "since_baseline", "since_commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the lineage of the running attempt has committed since its last baseline."""

    baseline: int | None = None
    """Seq of the newest baseline of the lineage, a compacted one included; None: none, or not live any more."""
    newest: int | None = None
    """Seq of the newest checkpoint of the lineage."""
    increments: tuple[float, ...] = ()
    """S_1 .. S_i: bytes of each checkpoint since then over those of all rows, at the encoding in force."""
    full_bytes: int = 0
    """What a baseline would store now, blobs included."""
    raw_bytes: int = 0
    """The same before encoding."""
    raw_increments: tuple[int, ...] = ()
    """Bytes of the same checkpoints before encoding."""


def decide(name: str, history: History, *, force_full: bool = False) -> Decision:
    """What the next cut must hold at least under the differential of that name; raises `UnknownName`.

    `force_full`: tracking cannot vouch for its marks, or the caller knows the covered checkpoint to be gone.
    """
    differential = differential_named(name)
    if force_full or differential == "full" or history.baseline is None:
        return "full"
    if differential == "consecutive":
        return "since_commit"
    if differential == "intermittent" and baseline_pays(history.increments):
        return "full"
    return "since_baseline"


def baseline_pays(increments: tuple[float, ...]) -> bool:
    """The predictor: whether a baseline now is predicted to cost no more than going on."""
    if not increments:
        return False
    full_cost = 1.0 + sum(increments)
    incremental_cost = (len(increments) + 1) * increments[-1]
    return full_cost <= incremental_cost


def history(state: RunState, attempt: int, precision: StoredPrecision) -> History:
    """The history of the lineage of `attempt`, newest commits included, as the log tells it; `precision` is in force.

    Raises `UnknownName` for an encoding that is none.
    """
    newest: int | None = None
    deltas: list[Checkpoint] = []
    reads: frozenset[int] = frozenset()
    for seq in lineage(state, attempt):
        entry = state.checkpoints[seq]
        if newest is None:
            newest, reads = seq, closure(state, (seq,))
        if entry.baseline or (seq in state.compactions and seq in reads):
            tables = _Tables.of(state.checkpoints[newest], precision)
            blobs = _blob_bytes(entry, tables)
            full = max(1, blobs + tables.stored_bytes)
            raw = [delta.raw_bytes for delta in reversed(deltas)]
            if deltas:
                raw = [*_before(deltas[-1], seq), *raw]
            return History(
                baseline=seq,
                newest=newest,
                increments=tuple((blobs + tables.stored(size - blobs)) / full for size in raw),
                raw_increments=tuple(raw),
                full_bytes=full,
                raw_bytes=blobs + tables.raw_bytes,
            )
        deltas.append(entry)
    return History(newest=newest)


def increments_text(found: History, covers: int) -> str:
    """What a cut that covers a baseline says of the increments before it, for its metadata: the newest 64.

    `covers` may be another checkpoint than the history's baseline: one that becomes a baseline. Nothing came since.
    """
    raw = found.raw_increments if covers == found.baseline else ()
    return f"{covers}:{','.join(map(str, raw[-MAX_INCREMENTS:]))}"


def _before(delta: Checkpoint, baseline: int) -> list[int]:
    """Bytes, before encoding, of the increments over `baseline` before this one; none where it does not say."""
    text = delta.metadata.get(INCREMENTS_KEY, "")
    found = _INCREMENTS.fullmatch(text[:MAX_INCREMENTS_TEXT])
    if found is None or int(found[1]) != baseline:
        return []
    return [int(size) for size in found[2].split(",") if size]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """All rows of all tables: how many, and their bytes before encoding and at the encoding in force."""

    rows: int
    raw_bytes: int
    stored_bytes: int

    @classmethod
    def of(cls, entry: Checkpoint, precision: StoredPrecision) -> _Tables:
        stored = sum(
            table.rows
            * stored_row_bytes(
                table, table.columns, encoding_named(precision.of_table(table.fqn)), precision.state
            )
            for table in entry.tables
        )
        raw = sum(table.rows * raw_row_bytes(table, table.columns) for table in entry.tables)
        return cls(rows=sum(table.rows for table in entry.tables), raw_bytes=raw, stored_bytes=stored)

    def stored(self, raw_bytes: int) -> float:
        """What some rows of so many bytes before encoding would be."""
        return max(0, raw_bytes) * self.stored_bytes / max(1, self.raw_bytes)


def _blob_bytes(base: Checkpoint, tables: _Tables) -> int:
    """Bytes of a cut that are no rows. Of a compacted delta, whose own rows are some: as if all were equally long."""
    rows = base.rows * tables.raw_bytes // max(1, tables.rows) if not base.baseline else tables.raw_bytes
    return max(0, base.raw_bytes - rows)
