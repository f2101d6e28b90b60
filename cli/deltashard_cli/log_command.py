"""`deltashard log`: what the commit log of a run says, entry by entry."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import click
from deltashard_checkpoint.log.commit_log import LogGap, RunLog
from deltashard_checkpoint.log.replay import void_slots
from rich.text import Text

from deltashard_cli.log_line import LogLine, line_of
from deltashard_cli.option import run_options
from deltashard_cli.output import age, console, number, plural, print_json, show, size, warn
from deltashard_cli.target import POLICY, Target, find_run

_READERS = 16
_COLUMNS = (">seq", "kind", "when", ">step", ">attempt", ">ranks", ">bytes", "~pins", "~says", "~writer")


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
        line_of(seq, slots.get(seq), counts=seq not in void and (stopped is None or seq < stopped))
        for seq in wanted
    ], tip + 1


def _row(line: LogLine) -> tuple[object, ...]:
    def shown(value: int | None) -> str:
        return "" if value is None else number(value)

    says = line.says if line.counts else f"{line.says} (counts for nothing)"
    return (
        line.seq,
        line.kind if line.counts else Text(line.kind, style="red"),
        "-" if line.at_s is None else age(line.at_s),
        shown(line.step),
        "" if line.attempt is None else line.attempt if line.cut is None else f"{line.attempt}.{line.cut}",
        shown(line.ranks),
        "" if line.bytes is None else size(line.bytes),
        " ".join(line.pins),
        says,
        line.writer,
    )
