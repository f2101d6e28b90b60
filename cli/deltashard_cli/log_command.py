"""`deltashard log`: what the commit log of a run says, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import click
from deltashard_checkpoint.log.commit_log import RunLog
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
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.log.replay import void_slots
from deltashard_checkpoint.log.run_state import Slot, Unreadable
from rich.text import Text

from deltashard_cli.option import run_options
from deltashard_cli.output import age, console, number, plural, print_json, show, size, warn
from deltashard_cli.target import POLICY, Target, find_run

_READERS = 16
_NAMED = 12
"""Checkpoints that a sentence lists."""
_COLUMNS = (
    ">seq",
    "kind",
    "when",
    ">step",
    ">attempt",
    ">ranks",
    ">bytes",
    "~pins",
    "~description",
    "~writer",
)


@click.command()
@run_options
@click.option(
    "-n",
    "count",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    metavar="N",
    help="The newest N entries; 0: all.",
)
@click.option("--since", type=click.IntRange(0), metavar="SEQ", help="Only entries from slot SEQ on.")
def log(url: str, run: str | None, count: int, since: int | None, *, as_json: bool) -> None:
    """Show the entries of a run's log, newest last: attempts, checkpoints, what was pinned, retired, rewound.

    A damaged log is shown as far as there is anything to read.
    """
    target = find_run(url, run)
    lines, every = read_lines(target, count=count, since=since or 0)
    if as_json:
        print_json({"run": target.run, "entries": every, "lines": lines})
        return
    out = console()
    show(
        out,
        f"log of {target.run}  ({target.store.url})",
        _COLUMNS,
        [_row(line) for line in lines],
        droppable=("writer", "ranks", "pins", "bytes"),
    )
    if len(lines) < every:
        out.print(f"{len(lines)} of {plural(every, 'entry', 'entries')}: -n 0 shows all", style="dim")


def read_lines(target: Target, *, count: int, since: int) -> tuple[list[LogLine], int]:
    """(the newest `count` lines from slot `since` on, oldest first; how many slots there are). 0: all of them.

    Warns of what is wrong with the log. Raises `StoreUnavailable` and other store errors.
    """
    handle = RunLog(target.store, target.run)
    stopped: int | None = None
    try:
        state = handle.refresh(deadline_s=POLICY.deadline_s)
    except LogGap as gap:
        warn(gap.what)
        tip = handle.listed().tip
    else:
        tip = state.tip
        if state.stopped is not None:
            stopped = state.stopped.seq
            warn(state.damage() or "")
    first = max(since, 0 if count == 0 else tip + 1 - count)
    there = frozenset(seq for seq in handle.listed(first).seqs if seq <= tip)
    wanted = range(first, tip + 1)
    with ThreadPoolExecutor(_READERS) as pool:
        slots = dict(zip(sorted(there), pool.map(handle.read_slot, sorted(there)), strict=True))
    # What makes a slot void comes after it, so whatever is shown is known to count or not.
    void = void_slots([slots[seq] for seq in sorted(slots)])
    return [
        line_of(seq, slots.get(seq), valid=seq not in void and (stopped is None or seq < stopped))
        for seq in wanted
    ], tip + 1


def _row(line: LogLine) -> tuple[object, ...]:
    def shown(value: int | None) -> str:
        return "" if value is None else number(value)

    description = line.description if line.valid else f"{line.description} (counts for nothing)"
    return (
        line.seq,
        line.kind if line.valid else Text(line.kind, style="red"),
        "-" if line.at_s is None else age(line.at_s),
        shown(line.step),
        "" if line.attempt is None else line.attempt if line.cut is None else f"{line.attempt}.{line.cut}",
        shown(line.ranks),
        "" if line.bytes is None else size(line.bytes),
        " ".join(line.pins),
        description,
        line.writer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One slot of the log."""

    seq: int
    kind: str
    """Of the entry; `unreadable` or `missing` where there is none to read."""
    description: str
    """What the kind's own fields say, for people; of a slot that cannot be read what is wrong."""
    valid: bool = True
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


def line_of(seq: int, slot: Slot | None, *, valid: bool = True) -> LogLine:
    """The line of a slot; None: it is not there."""
    if slot is None:
        return LogLine(seq=seq, kind="missing", description="the entry is missing", valid=False)
    if isinstance(slot, Unreadable):
        return LogLine(seq=seq, kind="unreadable", description=slot.error.what, valid=False)
    entry = slot.entry
    line = LogLine(
        seq=seq, kind=_kind(entry), description="", valid=valid, at_s=entry.at_s, writer=entry.writer
    )
    match entry:
        case Genesis():
            return replace(
                line, description=f"the run is {entry.owner}'s" if entry.owner else "the run has no owner"
            )
        case AttemptOpened():
            return replace(line, description=_opened(entry), attempt=entry.seq, ranks=entry.world_size)
        case Checkpoint():
            rows = "all rows" if entry.baseline else f"rows since {_listed(entry.covered)}"
            return replace(
                line,
                description="; ".join(part for part in (rows, entry.directive) if part),
                attempt=entry.attempt,
                cut=entry.cut,
                step=entry.step,
                ranks=entry.world_size,
                bytes=entry.stored_bytes,
                covers=entry.covered,
                pins=entry.pins,
            )
        case Compacted():
            description = f"checkpoint {entry.replaces} restores from itself"
            return replace(line, description=description, ranks=len(entry.parts), bytes=entry.stored_bytes)
        case Retired():
            gone = f"retires {_listed(entry.checkpoints)}, " if entry.checkpoints else ""
            description = (
                f"{gone}lets {len(entry.prefixes)} {'prefix' if len(entry.prefixes) == 1 else 'prefixes'} go"
            )
            return replace(line, description=description)
        case Pinned():
            description = f"{entry.name} is " + (
                "nobody's" if entry.checkpoint is None else f"checkpoint {entry.checkpoint}"
            )
            return replace(line, description=description, pins=(entry.name,))
        case Rewound():
            return replace(line, description=f"the run goes on from checkpoint {entry.to}")
        case Reclaimed():
            return replace(line, description=f"what was retired up to {entry.through} is gone")
        case Repaired():
            return replace(line, description=f"gives up {_listed(entry.lost) or 'nothing'}")
        case _:
            return replace(line, description="of a version that this one does not know, and may pass over")


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
