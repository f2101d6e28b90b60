"""Synthetic baselines: when a chain that lies there is compacted, instead of a cut that holds all rows. Pure.

It stands in `maintenance` because it decides about compaction; `write.differential` decides what a cut holds, and asks
nothing of caches and rates. A compaction moves rows as they are encoded: it costs the trainer no stall, and nothing is
encoded anew. What both cost is counted in seconds of training, for that is what they are taken from:

    full cut      stall + BUSY_SHARE * (encode + upload)
    compaction    BUSY_SHARE * (fetch what is not cached + move + upload)

Compacted is the checkpoint that the next cuts build on. At a cut (`at_snapshot`) that is the newest commit: the cut covers
it and is a delta, and the trainer counts from there on. Between cuts (`between_snapshots`) it is what the log shows: for deltas
on deltas the newest itself, else what the newest one covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltashard_checkpoint.log.chain import chain, held_bytes
from deltashard_checkpoint.log.run_state import RunState

BUSY_SHARE = 0.05
"""Assumed: of a second in which the sidecar encodes or moves bytes, at low priority, so much is lost to training."""
READ_BYTES_PER_S, WRITE_BYTES_PER_S, MOVE_BYTES_PER_S = 200e6, 100e6, 1e9
ENCODE_S_PER_BYTE = 3e-9
"""Assumed, of rows before encoding; the rates above are, too."""
MAX_SIZE_RATIO = 0.75
"""A baseline at the encoding in force that is smaller than so much of the compacted rows is worth its stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSnapshot:
    """A cut that holds all rows."""

    raw_bytes: int
    stored_bytes: int
    stall_s: float
    """For so long it stops training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionInputs:
    """What a compaction of one checkpoint would read, and make."""

    checkpoints: int
    chain_bytes: int
    fetch_bytes: int
    """Of these, bytes that are not in the local cache."""
    base_bytes: int
    """Of the baseline at the chain's end: about what the compacted rows will have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineVerdict:
    """Compact, and why; the figures are for people."""

    why: Literal["cheaper", "length", "deferred"]
    text: str


def checkpoints_of(state: RunState, seq: int) -> tuple[int, ...]:
    """Seqs of the checkpoints that a restore of `seq` reads, newest first."""
    return tuple(dict.fromkeys(link.seq for link in chain(state, seq)))


def compaction_inputs(state: RunState, seq: int, cached_bytes: int) -> CompactionInputs:
    """What compacting `seq` takes, if `cached_bytes` of its chain are in the local cache."""
    seqs = checkpoints_of(state, seq)
    total = sum(held_bytes(state, at) for at in seqs)
    return CompactionInputs(
        checkpoints=len(seqs),
        chain_bytes=total,
        fetch_bytes=max(0, total - cached_bytes),
        base_bytes=held_bytes(state, seqs[-1]),
    )


def full_snapshot_s(cut: FullSnapshot) -> float:
    return cut.stall_s + BUSY_SHARE * (
        cut.raw_bytes * ENCODE_S_PER_BYTE + cut.stored_bytes / WRITE_BYTES_PER_S
    )


def compaction_s(found: CompactionInputs) -> float:
    return BUSY_SHARE * (
        found.fetch_bytes / READ_BYTES_PER_S
        + found.chain_bytes / MOVE_BYTES_PER_S
        + found.base_bytes / WRITE_BYTES_PER_S
    )


def at_snapshot(found: CompactionInputs, full: FullSnapshot) -> BaselineVerdict | None:
    """Whether the next cut, of which a baseline is asked for, covers what is compacted then, and is none."""
    compaction, cut = compaction_s(found), full_snapshot_s(full)
    if full.stored_bytes < MAX_SIZE_RATIO * found.base_bytes or compaction >= cut:
        return None
    return BaselineVerdict(why="cheaper", text=f"{compaction:.3f} s of training, a full cut {cut:.3f} s")


def compaction_target(state: RunState, seq: int, *, consecutive: bool) -> int:
    """Which checkpoint would be compacted while `seq` is the newest: what the next cuts build on."""
    covered = state.checkpoints[seq].covered
    return seq if consecutive or not covered else max(covered)


def between_snapshots(checkpoints: int, *, deferred: bool, longest: int) -> BaselineVerdict | None:
    """Whether a `compaction_target` of so many checkpoints is compacted now; `longest` 0: no chain is too long.

    `deferred`: deltas do not build on deltas, so a target that is one was made so at a cut, by `at_snapshot`, and is owed. The
    log alone says it, and a sidecar that starts anew sees it there.
    """
    if deferred:
        return BaselineVerdict(why="deferred", text=f"{checkpoints} checkpoints under the newest cut")
    if 0 < longest < checkpoints:
        return BaselineVerdict(why="length", text=f"{checkpoints} checkpoints, at most {longest} are wanted")
    return None
