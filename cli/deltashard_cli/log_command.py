"""`deltashard log`: the commit log of a run, entry by entry."""

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
    help="Show the newest N entries; 0: all.",
)
@click.option("--since", type=click.IntRange(0), metavar="SEQ", help="Show only entries from slot SEQ.")
def log(url: str, run: str | None, count: int, since: int | None, *, as_json: bool) -> None:
    """Show the entries of a run's log, newest last: attempts, checkpoints, pins, retirements, rewinds.

    If the log is damaged, all readable entries are shown.
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
    """Return (the newest `count` lines from slot `since`, oldest first, number of slots); `count` 0 means all.

    Warns about a damaged log. Raises `StoreUnavailable` and other store errors.
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
    # A slot is voided by a later entry only, so the validity of all shown slots is known.
    void = void_slots([slots[seq] for seq in sorted(slots)])
    return [
        line_of(seq, slots.get(seq), valid=seq not in void and (stopped is None or seq < stopped))
        for seq in wanted
    ], tip + 1


def _row(line: LogLine) -> tuple[object, ...]:
    def shown(value: int | None) -> str:
        return "" if value is None else number(value)

    description = line.description if line.valid else f"{line.description} (void)"
    return (
        line.seq,
        line.kind if line.valid else Text(line.kind, style="red"),
        "-" if line.at_s is None else age(line.at_s),
        shown(line.step),
        ""
        if line.attempt is None
        else line.attempt
        if line.snapshot_id is None
        else f"{line.attempt}.{line.snapshot_id}",
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
    """Kind of the entry; `unreadable` or `missing` if it cannot be read."""
    description: str
    """Human-readable summary of the entry's fields, or the fault of an unreadable slot."""
    valid: bool = True
    """False if a later attempt made it void, or if it follows the slot at which the log becomes unreadable."""
    at_s: float | None = None
    """Unix seconds by the writer's clock; None if the entry cannot be read."""
    writer: str = ""
    attempt: int | None = None
    snapshot_id: int | None = None
    step: int | None = None
    ranks: int | None = None
    bytes: int | None = None
    covers: tuple[int, ...] = ()
    pins: tuple[str, ...] = ()


def line_of(seq: int, slot: Slot | None, *, valid: bool = True) -> LogLine:
    """Describe one slot; `slot` None means that it is missing."""
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
                line,
                description=f"the run's owner is {entry.owner}" if entry.owner else "the run has no owner",
            )
        case AttemptOpened():
            return replace(line, description=_opened(entry), attempt=entry.seq, ranks=entry.world_size)
        case Checkpoint():
            rows = "all rows" if entry.baseline else f"rows since {_listed(entry.covered)}"
            return replace(
                line,
                description="; ".join(part for part in (rows, entry.directive) if part),
                attempt=entry.attempt,
                snapshot_id=entry.snapshot_id,
                step=entry.step,
                ranks=entry.world_size,
                bytes=entry.stored_bytes,
                covers=entry.covered,
                pins=entry.pins,
            )
        case Compacted():
            description = f"checkpoint {entry.replaces} restores from its compaction"
            return replace(line, description=description, ranks=len(entry.parts), bytes=entry.stored_bytes)
        case Retired():
            gone = f"retires {_listed(entry.checkpoints)}, " if entry.checkpoints else ""
            description = (
                f"{gone}releases {len(entry.prefixes)} {'prefix' if len(entry.prefixes) == 1 else 'prefixes'}"
            )
            return replace(line, description=description)
        case Pinned():
            description = f"{entry.name} is " + (
                "unpinned" if entry.checkpoint is None else f"checkpoint {entry.checkpoint}"
            )
            return replace(line, description=description, pins=(entry.name,))
        case Rewound():
            return replace(line, description=f"the run continues from checkpoint {entry.to}")
        case Reclaimed():
            return replace(line, description=f"the objects retired up to {entry.through} are deleted")
        case Repaired():
            return replace(line, description=f"gives up {_listed(entry.lost) or 'nothing'}")
        case _:
            return replace(line, description="optional entry of an unknown version, skipped")


def _kind(entry: Entry) -> str:
    if isinstance(entry, Ignored):
        return entry.kind
    return next(name for name, cls in KINDS.items() if type(entry) is cls)


def _opened(entry: AttemptOpened) -> str:
    parts = ["starts from scratch" if entry.resumes_from is None else f"resumes from {entry.resumes_from}"]
    if entry.takeover:
        parts.append(f"takes the run over for {entry.owner or 'no owner'}")
    if entry.voids is not None:
        parts.append(f"voids {entry.voids} to {entry.seq - 1}")
    parts += [f"{name} {text}" for name, text in (("workload", entry.workload), ("pod", entry.pod)) if text]
    return "; ".join(parts)


def _listed(seqs: Sequence[int] | Iterable[int]) -> str:
    every = list(seqs)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(map(str, every[:_NAMED])) + more
