"""Commands that write: restore and export to files, gc and compact on the store."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.compaction import compact as compact_run
from deltashard_checkpoint.maintenance.garbage_collection import DEFAULT_GRACE_S, collect, debris
from deltashard_checkpoint.maintenance.retention import Retention, append_retirement, retire
from deltashard_checkpoint.maintenance.row_mover import mover
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose

from deltashard_cli.checkpoint_choice import open_checkpoint, using
from deltashard_cli.export import Written, export_safetensors, export_torch, restore_directory
from deltashard_cli.option import Finite, run_options, which_option
from deltashard_cli.output import console, number, plural, print_json, progress, size
from deltashard_cli.target import POLICY, find_run

_EVERYTHING = 1 << 62
_SPOOL_BYTES = 1 << 30


@click.command()
@run_options
@which_option
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--raw", is_flag=True, help="Bare little-endian bytes (.bin) instead of .npy.")
def restore(url: str, directory: Path, run: str | None, which: str, *, raw: bool, as_json: bool) -> None:
    """Write a checkpoint's tables, optimizer state and blobs into a new DIRECTORY, with a manifest.json."""

    def write(checkpoint: OpenCheckpoint) -> Written:
        with progress("restoring", _bytes(checkpoint)) as advance:
            return restore_directory(checkpoint, directory, raw=raw, advance=advance)

    _report(using(find_run(url, run), which, write), as_json=as_json)


@click.command()
@run_options
@which_option
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--format", "kind", type=click.Choice(["torch", "safetensors"]), help="Default: by FILE's suffix."
)
@click.option("--state", is_flag=True, help="Also the tables' optimizer state, as TABLE.FIELD.")
@click.option("--force", is_flag=True, help="Replace FILE.")
def export(
    url: str,
    file: Path,
    run: str | None,
    which: str,
    kind: str | None,
    *,
    state: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint's weights as a torch state_dict (FILE.pt) or a safetensors file (FILE.safetensors)."""
    kind = kind or {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors"}.get(file.suffix)
    if kind is None:
        raise click.UsageError(
            f"cannot tell the format from {file.name!r}: use .pt or .safetensors, or say --format"
        )
    made = export_torch if kind == "torch" else export_safetensors

    def write(checkpoint: OpenCheckpoint) -> Written:
        with progress("exporting", _bytes(checkpoint)) as advance:
            return made(checkpoint, file, state=state, force=force, advance=advance)

    _report(using(find_run(url, run), which, write), as_json=as_json)


def _bytes(checkpoint: OpenCheckpoint) -> int:
    return checkpoint.plan(checkpoint.entry.tables, blobs=True).bytes


def _report(written: Written, *, as_json: bool) -> None:
    if as_json:
        print_json(written)
        return
    blobs = f", {plural(written.blobs, 'blob')}" if written.blobs else ""
    console().print(
        f"step {number(written.step)} (checkpoint {written.seq}): {plural(written.tables, 'table')}, "
        f"{plural(written.tensors, 'array')}{blobs}, {size(written.bytes)} -> {written.path}"
    )
    if written.skipped:
        click.echo(f"left out, not plain tensors: {', '.join(written.skipped)}", err=True)


@click.command()
@run_options
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be done.")
@click.option(
    "--keep-last", type=click.IntRange(1), metavar="N", help="Retire all but the newest N checkpoints first."
)
@click.option(
    "--every-steps", type=click.IntRange(1), metavar="N", help="With --keep-last: also one per N steps."
)
@click.option(
    "--every-hours",
    type=Finite(0, min_open=True),
    metavar="H",
    help="With --keep-last: also one per H hours.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Finite(0),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Delete only what was retired longer ago, so that readers can finish.",
)
def gc(
    url: str,
    run: str | None,
    keep_last: int | None,
    every_steps: int | None,
    every_hours: float | None,
    grace_s: float,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete what nothing needs any more: retired checkpoints after their grace, and remains of failed saves.

    Live checkpoints are only retired with --keep-last; what others build on, pins, a second independent
    chain and the resume point of a starting trainer are kept in any case.
    """
    if keep_last is None and (every_steps or every_hours):
        raise click.UsageError("--every-steps and --every-hours say what to keep besides --keep-last")
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    retention = Retention(
        keep_last=keep_last or _EVERYTHING,
        every_steps=every_steps,
        every_s=None if every_hours is None else every_hours * 3600,
    )
    state = log.refresh(deadline_s=POLICY.deadline_s)
    dead = debris(log, state, read_only=dry_run)
    if dry_run:
        planned = retire(state, retention, dead)
        retired = () if planned is None else planned.checkpoints
        prefixes = () if planned is None else planned.prefixes
    else:
        entry = append_retirement(log, retention, debris=dead)
        retired = () if entry is None else entry.checkpoints
        prefixes = () if entry is None else entry.prefixes
    # Of what is retired, debris of cuts that were never committed is the rest of a failed save; all else was whole.
    given_up = sorted(set(prefixes) & set(dead) - state.superseded.keys())
    found = collect(log, grace_s=grace_s, dry_run=dry_run)
    if as_json:
        print_json(
            {"retired": retired, "retired_prefixes": prefixes, "given_up": given_up, "collected": found}
        )
        return
    out = console()
    would = "would be " if dry_run else ""
    if retired:
        out.print(f"checkpoints {would}retired: {', '.join(map(str, retired))}")
    if superseded := sorted(set(prefixes) & state.superseded.keys()):
        out.print(f"{plural(len(superseded), 'part')} {would}retired that a compaction replaced")
    if given_up:
        out.print(f"{plural(len(given_up), 'failed save')} {would}given up")
    out.print(f"{plural(found.objects, 'object')} ({size(found.bytes)}) {would}deleted")
    if found.waiting:
        out.print(
            f"{plural(len(found.waiting), 'prefix', 'prefixes')} wait for the grace of {grace_s:.0f} s to end",
            style="dim",
        )


@click.command()
@run_options
@which_option
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be read.")
@click.option(
    "--spool",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help=f"Directory for packs on their way, up to {size(_SPOOL_BYTES)}; default: the system's for temporary files.",
)
def compact(
    url: str, run: str | None, which: str, spool: Path | None, *, dry_run: bool, as_json: bool
) -> None:
    """Turn the chain of a checkpoint into one full checkpoint at the same step, without re-quantizing a row."""
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    if dry_run:
        checkpoint = open_checkpoint(target, which)
        made = checkpoint.plan(checkpoint.entry.tables, blobs=True)
        if as_json:
            print_json({"seq": checkpoint.entry.seq, "chain": made.chain, "bytes": made.bytes})
            return
        console().print(
            f"checkpoint {checkpoint.entry.seq} reads {plural(len(made.chain), 'checkpoint')}, {size(made.bytes)}"
        )
        return
    seq = choose(log.refresh(deadline_s=POLICY.deadline_s), which).seq
    with (
        tempfile.TemporaryDirectory(prefix="deltashard-", dir=spool) as directory,
        PackCache(Path(directory), budget_bytes=_SPOOL_BYTES) as cache,
    ):
        entry = compact_run(log, seq, mover(cache))
    if as_json:
        print_json({"seq": seq, "compacted": entry})
        return
    if entry is None:
        console().print(f"checkpoint {seq} is a full one already")
        return
    console().print(
        f"checkpoint {seq} restores from itself now: {number(entry.rows)} rows, {size(entry.stored_bytes)} "
        f"(log entry {entry.seq}); `deltashard gc` clears away what only its old chain needed"
    )
