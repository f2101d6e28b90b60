"""Decide what the next snapshot holds: all rows, rows changed since the baseline, or since the last commit. Pure.

- `full`: every snapshot is a baseline.
- `one-shot`: one baseline, then every snapshot holds the changes since it. Restore reads two checkpoints; snapshots
grow.
- `consecutive`: every snapshot holds the changes since the last commit. Smallest snapshots; restore reads all of them.
- `intermittent` (default): one-shot, with a predictor for new baselines (Check-N-Run, NSDI'22). With S_i the bytes of
the i-th increment relative to those of all rows:

      Fc = 1 + S_1 + ... + S_i     cost of the next i + 1 snapshots after a baseline, if history repeats
      Ic = (i + 1) * S_i           lower bound of the cost of the next i + 1 snapshots without a baseline
      baseline when Fc <= Ic, and i = 0 after it

  The "1 +" is the baseline itself, and a baseline clears the history. Both prevent a baseline after every increment.

S_i is computed at the current encoding: what the increment and a baseline would cost *now*. With stored sizes, a run
that changes from 8 to 2 bits would never write another baseline, because no 2-bit increment comes near the size of an
8-bit baseline. An entry records rows and blobs as one sum of bytes before encoding, and does not record which rows. So
blobs are assumed to be as large as the baseline's, and all rows to shrink like the average row of the model. If tables
differ in that (few columns, raw dtypes, bits by table), S_i is off by the difference in the mix of tables.

Retention removes superseded increments, but the predictor needs them. So each increment's metadata lists the sizes of
the increments since its baseline (`INCREMENTS_KEY`).

A compacted checkpoint counts as a baseline if the newest checkpoint is read through it: it is the base of the chain.
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
    """Commits of the running attempt's lineage since its last baseline."""

    baseline: int | None = None
    """Seq of the lineage's newest baseline, compacted ones included; None if there is none or it is no longer live."""
    newest: int | None = None
    """Seq of the lineage's newest checkpoint."""
    increments: tuple[float, ...] = ()
    """S_1 .. S_i: bytes of each later checkpoint relative to those of all rows, at the current encoding."""
    full_bytes: int = 0
    """Stored bytes of a baseline written now, blobs included."""
    raw_bytes: int = 0
    """Bytes of a baseline before encoding."""
    raw_increments: tuple[int, ...] = ()
    """Bytes of the later checkpoints before encoding."""


def decide(name: str, history: History, *, force_full: bool = False) -> Decision:
    """Return the minimum content of the next snapshot under the named differential; raises `UnknownName`.

    `force_full`: tracking cannot guarantee its marks, or the covered checkpoint is known to be gone.
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
    """Return whether the predictor expects a baseline now to cost no more than further increments."""
    if not increments:
        return False
    full_cost = 1.0 + sum(increments)
    incremental_cost = (len(increments) + 1) * increments[-1]
    return full_cost <= incremental_cost


def history(state: RunState, attempt: int, precision: StoredPrecision) -> History:
    """Return the lineage of `attempt` since its last baseline, measured at the encodings of `precision`.

    Raises `UnknownName` for an unknown encoding.
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
    """Return the metadata text of a snapshot over baseline `covers`: the sizes of the newest 64 increments before it.

    `covers` may differ from the history's baseline if a checkpoint becomes the baseline; no increments follow it yet.
    """
    raw = found.raw_increments if covers == found.baseline else ()
    return f"{covers}:{','.join(map(str, raw[-MAX_INCREMENTS:]))}"


def _before(delta: Checkpoint, baseline: int) -> list[int]:
    """Return the bytes before encoding of earlier increments over `baseline`; empty if not in the metadata."""
    text = delta.metadata.get(INCREMENTS_KEY, "")
    found = _INCREMENTS.fullmatch(text[:MAX_INCREMENTS_TEXT])
    if found is None or int(found[1]) != baseline:
        return []
    return [int(size) for size in found[2].split(",") if size]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Total rows of all tables, with their bytes before encoding and at the current encoding."""

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
        """Return the encoded size of rows that have `raw_bytes` bytes before encoding."""
        return max(0, raw_bytes) * self.stored_bytes / max(1, self.raw_bytes)


def _blob_bytes(base: Checkpoint, tables: _Tables) -> int:
    """Return the bytes that are not rows. For a compacted delta, rows are assumed to have equal length."""
    rows = base.rows * tables.raw_bytes // max(1, tables.rows) if not base.baseline else tables.raw_bytes
    return max(0, base.raw_bytes - rows)
