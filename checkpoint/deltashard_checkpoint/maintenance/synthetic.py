"""Synthetic baselines: when a chain that lies there is compacted, instead of a cut that holds all rows. Pure.

It stands in `maintenance` because it decides about compaction; `write.differential` decides what a cut holds, and asks
nothing of caches and rates. A compaction moves rows as they are encoded: it costs the trainer no stall, and nothing is
encoded anew. What both cost is counted in seconds of training, for that is what they are taken from:

    full cut      stall + slowdown while its rows are copied ahead + BUSY_SHARE * (encode + upload)
    compaction    BUSY_SHARE * (fetch what is not cached + move + upload)

Compacted is the checkpoint that the next cuts build on. At a cut (`at_cut`) that is the newest commit: the cut covers
it and is a delta, and the trainer counts from there on. Between cuts (`at_rest`) it is what the log shows: for deltas
on deltas the newest itself, else what the newest one covers.

A time to restore is expected as bytes of the chain / rate of reading + `CHECKPOINT_S` for each checkpoint of it. A goal
nearer than `SLACK` times what one baseline alone takes is never reached: it would only ask for a compaction after every
cut, so it counts as that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deltashard_checkpoint.log.chain import chain, held_bytes
from deltashard_checkpoint.log.run_state import RunState

BUSY_SHARE = 0.05
"""Assumed: of a second in which the sidecar encodes or moves bytes, at low priority, so much is lost to training."""
CHECKPOINT_S = 0.2
"""Assumed: what reading one checkpoint more takes, apart from its bytes (index, first answers)."""
SLACK = 1.25
NARROWER = 0.75
"""A baseline at the encoding in force that is smaller than so much of the compacted rows is worth its stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRates:
    """What was measured here; the defaults are assumed until it is."""

    read_bytes_per_s: float = 200e6
    write_bytes_per_s: float = 100e6
    move_bytes_per_s: float = 1e9
    encode_s_per_byte: float = 3e-9
    """Of rows before encoding."""
    stall_s: float = 0.0
    """A cut that holds all rows stops training for so long; 0: not known, so nothing is saved by sparing it."""
    slowdown_s: float = 0.0
    """... and makes steps before it longer by so much in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCut:
    """A cut that holds all rows."""

    raw_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
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

    why: Literal["goal", "cheaper", "length", "owed"]
    text: str


def checkpoints_of(state: RunState, seq: int) -> tuple[int, ...]:
    """Seqs of the checkpoints that a restore of `seq` reads, newest first."""
    return tuple(dict.fromkeys(link.seq for link in chain(state, seq)))


def material(state: RunState, seq: int, cached_bytes: int) -> Material:
    """What compacting `seq` takes, if `cached_bytes` of its chain are in the local cache."""
    seqs = checkpoints_of(state, seq)
    total = sum(held_bytes(state, at) for at in seqs)
    return Material(
        checkpoints=len(seqs),
        chain_bytes=total,
        fetch_bytes=max(0, total - cached_bytes),
        base_bytes=held_bytes(state, seqs[-1]),
    )


def restore_s(chain_bytes: int, checkpoints: int, rates: ChainRates) -> float:
    """How long a restore of such a chain is expected to take."""
    return chain_bytes / rates.read_bytes_per_s + checkpoints * CHECKPOINT_S


def full_cut_s(cut: FullCut, rates: ChainRates) -> float:
    busy_s = cut.raw_bytes * rates.encode_s_per_byte + cut.stored_bytes / rates.write_bytes_per_s
    return rates.stall_s + rates.slowdown_s + BUSY_SHARE * busy_s


def compaction_s(found: Material, rates: ChainRates) -> float:
    busy_s = (
        found.fetch_bytes / rates.read_bytes_per_s
        + found.chain_bytes / rates.move_bytes_per_s
        + found.base_bytes / rates.write_bytes_per_s
    )
    return BUSY_SHARE * busy_s


def too_long(found: Material, rates: ChainRates, goal_s: float) -> BaselineVerdict | None:
    """Whether a restore of this chain would miss the goal, and one of its compaction would not; `goal_s` 0: none."""
    alone_s = restore_s(found.base_bytes, 1, rates)
    now_s = restore_s(found.chain_bytes, found.checkpoints, rates)
    if goal_s <= 0 or now_s <= max(goal_s, SLACK * alone_s):
        return None
    return BaselineVerdict(
        why="goal",
        text=f"a restore would take {now_s:.1f} s, the goal is {goal_s:g} s, compacted {alone_s:.1f} s",
    )


def at_cut(
    found: Material, full: FullCut, rates: ChainRates, *, pays: bool, goal_s: float
) -> BaselineVerdict | None:
    """Whether the next cut covers what is compacted then, instead of holding all rows or ever more of them.

    `pays`: the predictor is about to ask for a baseline.
    """
    if full.stored_bytes < NARROWER * found.base_bytes:
        return None
    compaction, cut = compaction_s(found, rates), full_cut_s(full, rates)
    if pays:
        figures = f"{compaction:.3f} s of training, a full cut {cut:.3f} s"
        return BaselineVerdict(why="cheaper", text=figures) if compaction < cut else None
    return too_long(found, rates, goal_s)


def target(state: RunState, seq: int, *, consecutive: bool) -> int:
    """Which checkpoint would be compacted while `seq` is the newest: what the next cuts build on."""
    covered = state.checkpoints[seq].covered
    return seq if consecutive or not covered else max(covered)


def at_rest(
    found: Material, rates: ChainRates, *, owes: bool, longest: int, goal_s: float
) -> BaselineVerdict | None:
    """Whether the `target` of the newest checkpoint is compacted now; `longest` 0: no chain is too long by itself.

    `owes`: deltas do not build on deltas, so a target that is one was made so at a cut, by `at_cut`, and is owed. The
    log alone says it, and a sidecar that starts anew sees it there.
    """
    if owes:
        return BaselineVerdict(why="owed", text=f"{found.checkpoints} checkpoints under the newest cut")
    if longest and found.checkpoints > longest:
        return BaselineVerdict(
            why="length", text=f"{found.checkpoints} checkpoints, at most {longest} are wanted"
        )
    return too_long(found, rates, goal_s)
