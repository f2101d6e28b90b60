"""What is told of one entry of a run's log: from the slot to a plain record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Compacted,
    Entry,
    Genesis,
    Ignored,
    Pinned,
    Reclaimed,
    Repaired,
    Retired,
    Rewound,
)
from deltashard_checkpoint.log.entry_codec import KINDS
from deltashard_checkpoint.log.run_state import Slot, Unreadable

_NAMED = 12
"""Checkpoints that a sentence lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One slot of the log."""

    seq: int
    kind: str
    """Of the entry; `unreadable` or `missing` where there is none to read."""
    says: str
    """What the kind's own fields say, for people; of a slot that cannot be read what is wrong."""
    counts: bool = True
    """False: a later attempt made it void, or it lies behind the slot past which the log cannot be followed."""
    at_s: float | None = None
    """By the writer's clock; None where the entry cannot be read."""
    writer: str = ""
    attempt: int | None = None
    cut: int | None = None
    step: int | None = None
    ranks: int | None = None
    bytes: int | None = None
    """Stored, of a checkpoint or a compaction."""
    covers: tuple[int, ...] = ()
    pins: tuple[str, ...] = ()
    retired: tuple[int, ...] = ()
    """Checkpoints that the entry retires."""
    prefixes: int = 0
    """Prefixes whose objects it lets go."""


def line_of(seq: int, slot: Slot | None, *, counts: bool = True) -> LogLine:
    """The line of a slot; None: it is not there."""
    if slot is None:
        return LogLine(seq=seq, kind="missing", says="the entry is missing", counts=False)
    if isinstance(slot, Unreadable):
        return LogLine(seq=seq, kind="unreadable", says=slot.error.what, counts=False)
    entry = slot.entry
    said = LogLine(seq=seq, kind=_kind(entry), says="", counts=counts, at_s=entry.at_s, writer=entry.writer)
    match entry:
        case Genesis():
            return replace(
                said, says=f"the run is {entry.owner}'s" if entry.owner else "the run has no owner"
            )
        case AttemptOpened():
            return replace(said, says=_opened(entry), attempt=entry.seq, ranks=entry.world_size)
        case Checkpoint():
            rows = "all rows" if entry.baseline else f"rows since {_listed(entry.covered)}"
            return replace(
                said,
                says="; ".join(part for part in (rows, entry.directive) if part),
                attempt=entry.attempt,
                cut=entry.cut,
                step=entry.step,
                ranks=entry.world_size,
                bytes=entry.stored_bytes,
                covers=entry.covered,
                pins=entry.pins,
            )
        case Compacted():
            says = f"checkpoint {entry.replaces} restores from itself"
            return replace(said, says=says, ranks=len(entry.parts), bytes=entry.stored_bytes)
        case Retired():
            gone = f"retires {_listed(entry.checkpoints)}, " if entry.checkpoints else ""
            says = (
                f"{gone}lets {len(entry.prefixes)} {'prefix' if len(entry.prefixes) == 1 else 'prefixes'} go"
            )
            return replace(said, says=says, retired=entry.checkpoints, prefixes=len(entry.prefixes))
        case Pinned():
            says = f"{entry.name} is " + (
                "nobody's" if entry.checkpoint is None else f"checkpoint {entry.checkpoint}"
            )
            return replace(said, says=says, pins=(entry.name,))
        case Rewound():
            return replace(said, says=f"the run goes on from checkpoint {entry.to}")
        case Reclaimed():
            return replace(said, says=f"what was retired up to {entry.through} is gone")
        case Repaired():
            return replace(said, says=f"gives up {_listed(entry.lost) or 'nothing'}")
        case _:
            return replace(said, says="of a version that this one does not know, and may pass over")


def _kind(entry: Entry) -> str:
    if isinstance(entry, Ignored):
        return entry.kind
    return next(name for name, cls in KINDS.items() if type(entry) is cls)


def _opened(entry: AttemptOpened) -> str:
    parts = ["begins anew" if entry.resumes_from is None else f"resumes from {entry.resumes_from}"]
    if entry.takeover:
        parts.append(f"takes the run over for {entry.owner or 'nobody'}")
    if entry.voids is not None:
        parts.append(f"makes {entry.voids} to {entry.seq - 1} void")
    parts += [f"{name} {text}" for name, text in (("workload", entry.workload), ("pod", entry.pod)) if text]
    return "; ".join(parts)


def _listed(seqs: Sequence[int] | Iterable[int]) -> str:
    every = list(seqs)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(map(str, every[:_NAMED])) + more
