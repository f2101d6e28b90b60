"""Synthetic baselines: decide when to compact a stored chain instead of saving all rows in a snapshot. Pure.

The module is in `maintenance` because it decides about compaction; `write.differential` decides what a snapshot holds,
without regard to caches and rates. A compaction moves encoded rows: it neither stalls the trainer nor encodes again.
Both costs are measured in seconds of lost training:

    full snapshot    stall + BUSY_SHARE * (encode + upload)
    compaction       BUSY_SHARE * (fetch what is not cached + move + upload)

The compacted checkpoint is the one on which the next snapshots build. During a snapshot (`at_snapshot`) that is the
newest commit: the snapshot becomes a delta over it, and the trainer counts from there. Between snapshots
(`between_snapshots`) the log shows it: for deltas on deltas the newest checkpoint, else the one it covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltashard_checkpoint.log.chain import chain, held_bytes
from deltashard_checkpoint.log.run_state import RunState

BUSY_SHARE = 0.05
"""Assumed share of training time lost while the sidecar encodes or moves bytes at low priority."""
READ_BYTES_PER_S, WRITE_BYTES_PER_S, MOVE_BYTES_PER_S = 200e6, 100e6, 1e9
ENCODE_S_PER_BYTE = 3e-9
"""Assumed, for rows before encoding; the rates above are assumed, too."""
MAX_SIZE_RATIO = 0.75
"""A baseline at the current encoding below this share of the compacted rows' size is worth its stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSnapshot:
    """A snapshot that holds all rows."""

    raw_bytes: int
    stored_bytes: int
    stall_s: float
    """Seconds for which it stalls training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionInputs:
    """Input and output sizes of compacting one checkpoint."""

    checkpoints: int
    chain_bytes: int
    fetch_bytes: int
    """Bytes of these that are not in the local cache."""
    base_bytes: int
    """Size of the chain's baseline, which approximates that of the compacted rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineVerdict:
    """Decision to compact, with its reason and figures for display."""

    why: Literal["cheaper", "length", "deferred"]
    text: str


def checkpoints_of(state: RunState, seq: int) -> tuple[int, ...]:
    """Return the seqs of the checkpoints that a restore of `seq` reads, newest first."""
    return tuple(dict.fromkeys(link.seq for link in chain(state, seq)))


def compaction_inputs(state: RunState, seq: int, cached_bytes: int) -> CompactionInputs:
    """Return the inputs of compacting `seq` if `cached_bytes` of its chain are in the local cache."""
    seqs = checkpoints_of(state, seq)
    total = sum(held_bytes(state, at) for at in seqs)
    return CompactionInputs(
        checkpoints=len(seqs),
        chain_bytes=total,
        fetch_bytes=max(0, total - cached_bytes),
        base_bytes=held_bytes(state, seqs[-1]),
    )


def full_snapshot_s(snapshot: FullSnapshot) -> float:
    return snapshot.stall_s + BUSY_SHARE * (
        snapshot.raw_bytes * ENCODE_S_PER_BYTE + snapshot.stored_bytes / WRITE_BYTES_PER_S
    )


def compaction_s(found: CompactionInputs) -> float:
    return BUSY_SHARE * (
        found.fetch_bytes / READ_BYTES_PER_S
        + found.chain_bytes / MOVE_BYTES_PER_S
        + found.base_bytes / WRITE_BYTES_PER_S
    )


def at_snapshot(found: CompactionInputs, full: FullSnapshot) -> BaselineVerdict | None:
    """Return a verdict if the next snapshot should be a delta on a compacted chain instead of a requested baseline."""
    compaction, snapshot_id = compaction_s(found), full_snapshot_s(full)
    if full.stored_bytes < MAX_SIZE_RATIO * found.base_bytes or compaction >= snapshot_id:
        return None
    return BaselineVerdict(
        why="cheaper", text=f"{compaction:.3f} s of training, a full snapshot {snapshot_id:.3f} s"
    )


def compaction_target(state: RunState, seq: int, *, consecutive: bool) -> int:
    """Return the checkpoint to compact while `seq` is the newest: the one on which the next snapshots build."""
    covered = state.checkpoints[seq].covered
    return seq if consecutive or not covered else max(covered)


def between_snapshots(checkpoints: int, *, deferred: bool, longest: int) -> BaselineVerdict | None:
    """Return a verdict if a `compaction_target` with so many checkpoints is compacted now; `longest` 0: no limit.

    `deferred`: deltas do not build on deltas, so a target that is a delta was chosen by `at_snapshot` and is still due.
    This follows from the log alone, so a restarted sidecar detects it, too.
    """
    if deferred:
        return BaselineVerdict(why="deferred", text=f"{checkpoints} checkpoints under the newest snapshot")
    if 0 < longest < checkpoints:
        return BaselineVerdict(why="length", text=f"{checkpoints} checkpoints, limit {longest}")
    return None
