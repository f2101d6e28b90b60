"""Read-only commands: ls, inspect, verify, diff."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import click
from deltashard_checkpoint.format.blob_name import common_blobs, parse_blob_name
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from deltashard_checkpoint.whole_run.incomplete_state import incomplete_state
from rich.text import Text

from deltashard_cli import verification
from deltashard_cli.checkpoint_choice import compaction_indexes, open_checkpoint, read_state, with_checkpoint
from deltashard_cli.diff import Difference, compare
from deltashard_cli.option import json_option, run_option, run_options, which_option
from deltashard_cli.output import (
    age,
    console,
    key_value_table,
    number,
    plural,
    print_json,
    progress,
    show,
    size,
    warn,
    when,
)
from deltashard_cli.summary import (
    CheckpointSummary,
    RunSummary,
    inspection_of,
    summarize_checkpoint,
    summarize_run,
)
from deltashard_cli.target import (
    IncompleteRun,
    NoSuchRun,
    Target,
    find_run,
    must_exist,
    open_root,
    runs_of,
    url_names_run,
)

_SHOWN_BLOBS = 12
_LS_COLUMNS = (
    *(">seq", ">step", "saved", ">attempt", "kind", ">chain", ">rows", ">raw", ">stored", ">ratio", ">stall"),
    *("encoding", "~pins"),
)


@click.command()
@run_options
def ls(url: str, run: str | None, *, as_json: bool) -> None:
    """List the runs of a store, or the checkpoints of a run."""
    target = _run_or_none(url, run)
    if target is None:
        _list_runs(url, as_json=as_json)
        return
    state = read_state(target)
    if (damage := state.damage()) is not None:
        warn(damage)
    moved = compaction_indexes(target.store, state)
    found = [summarize_checkpoint(state, entry, moved) for entry in state.checkpoints.values()]
    summary = summarize_run(state)
    if as_json:
        print_json({"run": summary, "checkpoints": found})
        return
    out = console()
    show(
        out,
        f"{summary.run}  ({target.store.url})",
        _LS_COLUMNS,
        [_checkpoint_row(one) for one in found],
        droppable=("raw", "attempt", "stall", "ratio", "encoding", "chain"),
    )
    out.print(
        f"{plural(summary.checkpoints, 'live checkpoint')} of {number(summary.committed)} committed in "
        f"{plural(summary.attempts, 'attempt')}, {size(summary.live_stored_bytes)} stored",
        style="dim",
    )


def _run_or_none(url: str, run: str | None) -> Target | None:
    """Return the run that URL or --run names; None for a store, whose runs are then listed."""
    if run is not None:
        return find_run(url, run)
    try:
        target = find_run(url, None)
    except IncompleteRun:
        raise
    except NoSuchRun:
        return None
    # A store with a single run also resolves to that run; list it unless the URL contains the run's name.
    return target if url_names_run(url, target.run) else None


def _list_runs(url: str, *, as_json: bool) -> None:
    store = open_root(url)
    found = [_summarize(Target(store=store, run=run)) for run in runs_of(store, unfinished=True)]
    if not found:
        must_exist(store)
    if as_json:
        print_json({"runs": found})
        return
    out = console()
    if not found:
        out.print(f"no runs at {store.url}")
        return
    rows = [
        (
            one.run,
            "-" if one.newest_step is None else number(one.newest_step),
            "-" if one.newest_at_s is None else age(one.newest_at_s),
            one.checkpoints,
            one.committed,
            one.attempts,
            size(one.live_stored_bytes),
            one.state if one.state == "ok" else Text(one.state, style="red"),
        )
        for one in found
    ]
    columns = ["run", ">newest step", "saved", ">live", ">committed", ">attempts", ">stored", "log"]
    show(out, f"runs at {store.url}", columns, rows, droppable=("attempts", "committed"))


def _summarize(target: Target) -> RunSummary:
    """Summarize one run of a store.

    A run with a gap in its log, and the rest of an interrupted copy or removal, are included with a warning.
    """
    empty = RunState(run=target.run)
    what, state = "", empty
    try:
        state = read_state(target)
    except LogGap as gap:
        what = gap.what
    if state.tip < 0 and (left := incomplete_state(target.store, f"{target.run}/")) is not None:
        what = what or "there is no log entry"
        warn(f"{target.run}: {left}: {left.remedy}")
        return replace(summarize_run(empty), stopped=what, state=left.value)
    if what:
        warn(f"{target.run}: {what}")
        return replace(summarize_run(empty), stopped=what, state="damaged")
    if (damage := state.damage()) is not None:
        warn(f"{target.run}: {damage}")
    return summarize_run(state)


def _checkpoint_row(one: CheckpointSummary) -> tuple[object, ...]:
    kind = one.kind if not one.covers else f"{one.kind} on {', '.join(map(str, one.covers))}"
    return (
        one.seq,
        number(one.step),
        age(one.at_s),
        f"{one.attempt}.{one.snapshot_id}",
        kind + (", compacted" if one.compacted else "") + (", detached" if one.detached else ""),
        len(one.chain) or Text("broken", style="red"),
        number(one.rows),
        "-" if one.raw_bytes is None else size(one.raw_bytes),
        size(one.stored_bytes),
        f"{one.raw_bytes / one.stored_bytes:.1f}x" if one.raw_bytes is not None and one.stored_bytes else "-",
        f"{one.stall_s * 1e3:.0f} ms",
        _encodings(one) or "-",
        " ".join(one.pins),
    )


def _encodings(one: CheckpointSummary) -> str:
    return " ".join(sorted({name for names in one.encodings.values() for name in names}))


@click.command()
@run_options
@which_option
@click.option("--all", "every_blob", is_flag=True, help="Show all blobs and parts, not only the first.")
def inspect(url: str, run: str | None, which: str, *, every_blob: bool, as_json: bool) -> None:
    """Show one checkpoint: its parts, tables, blobs and the chain it restores from."""
    target = find_run(url, run)
    checkpoint = open_checkpoint(target, which)
    found = inspection_of(checkpoint.state, checkpoint.entry, checkpoint.indexes)
    if as_json:
        print_json(found)
        return
    one, out = found.summary, console()
    out.print(Text(f"{found.run}  checkpoint {one.seq}", style="bold"))
    chain = " <- ".join(str(seq) for seq in one.chain)
    out.print(
        key_value_table(
            [
                ("step", number(one.step)),
                ("saved", f"{when(one.at_s)} ({age(one.at_s)})"),
                *([] if one.snapshot_at_s is None else [("snapshot", when(one.snapshot_at_s))]),
                ("attempt, snapshot", f"{one.attempt}, {one.snapshot_id} ({plural(one.ranks, 'rank')})"),
                ("kind", one.kind),
                *([("compacted", when(found.compacted_at_s))] if found.compacted_at_s is not None else []),
                ("restores from", chain or Text("a broken chain", style="red")),
                ("restore reads", f"at most {size(one.restore_bytes)}"),
                ("rows", number(one.rows)),
                ("raw", "-" if one.raw_bytes is None else size(one.raw_bytes)),
                ("stored", f"{size(one.stored_bytes)} in {_encodings(one) or 'no rows'}"),
                ("stall", f"{one.stall_s * 1e3:.1f} ms"),
                *([("pins", " ".join(one.pins))] if one.pins else []),
                *([("detached", "by a rewind to an older checkpoint")] if one.detached else []),
                *(
                    [
                        (
                            "inconsistent",
                            f"its trainer found wrong rows: see checkpoint {found.inconsistent_by}",
                        )
                    ]
                    if found.inconsistent_by is not None
                    else []
                ),
                *([("directive", one.directive)] if one.directive else []),
                *((f"meta {key}", value) for key, value in sorted(found.metadata.items())),
                *((f"writer {key}", value) for key, value in sorted(found.fingerprint.items())),
            ]
        )
    )
    out.print()
    shown = found.parts if every_blob else found.parts[:_SHOWN_BLOBS]
    parts = [
        (
            p.rank,
            "all rows" if p.covers is None else f"since {p.covers}",
            p.packs,
            number(p.frames),
            number(p.rows),
            size(p.stored_bytes),
            p.index_key,
        )
        for p in shown
    ]
    columns = [">rank", "covers", ">packs", ">frames", ">rows", ">stored", "~index"]
    show(out, "parts", columns, parts, caption=_more(len(found.parts) - len(shown)), droppable=("index",))
    out.print()
    tables = [
        (
            t.table,
            f"{number(t.rows)} x {t.columns}",
            t.dtype,
            number(t.held_rows),
            f"{100 * t.held_rows / max(1, t.rows):.1f}%",
            number(t.frames),
            size(t.stored_bytes),
            " ".join(t.encodings) or "-",
            ", ".join(field.partition(":")[0] for field in t.fields) or "-",
        )
        for t in found.tables
    ]
    columns = [
        "table",
        ">shape",
        "dtype",
        ">rows held",
        ">share",
        ">frames",
        ">stored",
        "encoding",
        "~fields",
    ]
    title = "tables (in this checkpoint's own parts)"
    show(out, title, columns, tables, droppable=("frames", "dtype", "rows held", "fields"))
    common = common_blobs(found.blobs)
    blobs = sorted(common.items(), key=lambda item: (-item[1], item[0]))
    listed = blobs if every_blob else blobs[:_SHOWN_BLOBS]
    out.print()
    title = f"blobs ({number(len(blobs))}, {size(sum(common.values()))}; largest first)"
    rows = [(name, size(count)) for name, count in listed]
    show(out, title, ["blob", ">bytes"], rows, caption=_more(len(blobs) - len(listed)))
    if len(common) < len(found.blobs):
        out.print()
        _show_own(found.blobs, each=every_blob)


def _show_own(blobs: Mapping[str, int], *, each: bool) -> None:
    """List blobs of single ranks: grouped by name, or with `each` one by one under their stored names."""
    held: dict[str, list[int]] = {}
    for stored, count in blobs.items():
        rank, name = parse_blob_name(stored)
        if rank is not None:
            held.setdefault(stored if each else name, []).append(count)
    rows = [(name, len(counts), size(sum(counts))) for name, counts in sorted(held.items())]
    title = "blobs of single ranks (the blobs above include rank 0's)"
    show(console(), title, ["blob", ">ranks", ">bytes"], rows, caption="" if each else "each one: --all")


def _more(count: int) -> str:
    return f"and {number(count)} more: --all" if count > 0 else ""


@click.command()
@run_options
@click.option(
    "--deep", is_flag=True, help="Read and hash every frame, and restore every checkpoint into memory."
)
@click.option(
    "--checkpoint", "-c", "which", metavar="WHICH", help="Check only latest, seq:N, step:N or pin:NAME."
)
def verify(url: str, run: str | None, which: str | None, *, deep: bool, as_json: bool) -> None:
    """Check that all live checkpoints are complete and intact. Exit code 1 if there are problems."""
    found = verification.verify(find_run(url, run), which=which, deep=deep)
    if as_json:
        print_json({"ok": found.ok, **{name: getattr(found, name) for name in found.__slots__}})
    else:
        out = console()
        if found.problems:
            rows = [
                (problem.object, problem.what, ", ".join(map(str, problem.checkpoints)) or "-")
                for problem in found.problems
            ]
            show(out, f"problems in {found.run}", ["~object", "~what", "~needed by"], rows)
            out.print()
        checked = (
            f"{plural(found.entries, 'log entry', 'log entries')}, "
            f"{plural(len(found.checkpoints), 'live checkpoint')}, {plural(found.indexes, 'index', 'indexes')}, "
            f"{plural(found.packs, 'pack')} ({size(found.bytes)})"
        )
        if deep:
            checked += f", {plural(found.frames, 'frame')} hashed, {len(found.restored)} checkpoints restored"
        verdict = Text("ok", style="bold green")
        if found.problems:
            verdict = Text(plural(len(found.problems), "problem"), style="bold red")
        out.print(Text.assemble(verdict, f": {checked}"))
        if not deep and found.ok:
            out.print("contents were not read: use --deep", style="dim")
        if found.garbage_prefixes:
            out.print(
                f"{plural(found.garbage_prefixes, 'orphaned save')} to remove: `deltashard gc`", style="dim"
            )
    if not found.ok:
        click.get_current_context().exit(1)


@click.command()
@click.argument("url")
@click.argument("a")
@click.argument("b")
@run_option
@json_option
def diff(url: str, a: str, b: str, run: str | None, *, as_json: bool) -> None:
    """Compare checkpoints A and B (seq:N or N, step:N, pin:NAME, latest). Exit code 1 if they differ."""
    target = find_run(url, run)

    def compared(left: OpenCheckpoint) -> Difference:
        right = open_checkpoint(target, b, state=left.state)
        total = sum(one.plan(one.entry.tables, blobs=one.blob_names).bytes for one in (left, right))
        with progress("comparing", total) as advance:
            return compare(left, right, advance=advance)

    found = with_checkpoint(target, a, compared)
    if as_json:
        print_json({"equal": found.equal, **{name: getattr(found, name) for name in found.__slots__}})
    else:
        out = console()
        title = (
            f"{found.run}: checkpoint {found.seq_a} (step {number(found.step_a)}) and "
            f"{found.seq_b} (step {number(found.step_b)})"
        )
        rows = [
            (
                one.table,
                one.field or "weight",
                number(one.rows),
                "-" if one.rows_differing is None else number(one.rows_differing),
                "-" if one.rows_differing is None else f"{100 * one.rows_differing / max(1, one.rows):.2f}%",
                "-" if one.largest is None else f"{one.largest:.4g}",
                one.note,
            )
            for one in found.tables
        ]
        columns = ["table", "values", ">rows", ">differ", ">share", ">largest", "~note"]
        show(out, title, columns, rows)
        if found.blobs:
            out.print()
            blob_rows = [
                (
                    one.name,
                    "-" if one.bytes_a is None else size(one.bytes_a),
                    "-" if one.bytes_b is None else size(one.bytes_b),
                    "-" if one.largest is None else f"{one.largest:.4g}",
                    one.note,
                )
                for one in found.blobs
            ]
            names = ["blob", f">in {found.seq_a}", f">in {found.seq_b}", ">largest", "~note"]
            show(out, "blobs that differ", names, blob_rows)
        equal = "all bits are equal" if found.equal else f"{plural(found.blobs_equal, 'blob')} equal"
        out.print(equal, style="dim")
    if not found.equal:
        click.get_current_context().exit(1)
