"""Commands that write: restore to files, compact on the store."""

from __future__ import annotations

from pathlib import Path

import click
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.compaction import compact as compact_run
from deltashard_checkpoint.maintenance.row_mover import mover
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose

from deltashard_cli.checkpoint_choice import with_checkpoint
from deltashard_cli.directory import ExportResult, restore_directory
from deltashard_cli.option import run_options, spool_cache, spool_option, which_option
from deltashard_cli.output import console, note, number, plural, print_json, print_result, progress, size
from deltashard_cli.target import POLICY, find_run


@click.command()
@run_options
@which_option
@click.argument("directory", type=click.Path(path_type=Path))
def restore(url: str, directory: Path, run: str | None, which: str, *, as_json: bool) -> None:
    """Write a checkpoint's tables, optimizer state and blobs into a new DIRECTORY, with a manifest.json.

    To continue training from it, use `deltashard rewind` in the same run, or `deltashard cp --as NAME -c WHICH` for a
    new run.
    """

    def write(checkpoint: OpenCheckpoint) -> ExportResult:
        with progress("restoring", bytes_of(checkpoint)) as advance:
            return restore_directory(checkpoint, directory, advance=advance)

    report(with_checkpoint(find_run(url, run), which, write), as_json=as_json)


def bytes_of(checkpoint: OpenCheckpoint, *, fields: bool = True) -> int:
    """Return the bytes that reading a checkpoint fetches; `fields` includes optimizer state."""
    return checkpoint.plan(checkpoint.entry.tables, blobs=True, fields=fields).bytes


def report(written: ExportResult, *, as_json: bool) -> None:
    if as_json:
        print_json(written)
        return
    blobs = f", {plural(written.blobs, 'blob')}" if written.blobs else ""
    console().print(
        f"step {number(written.step)} (checkpoint {written.seq}): {plural(written.tables, 'table')}, "
        f"{plural(written.tensors, 'array')}{blobs}, {size(written.bytes)} -> {written.path}"
    )
    if written.skipped:
        note(f"left out, not plain tensors: {', '.join(written.skipped)}")
    for name in written.left_out:
        note(f"left out: {name}")


@click.command()
@run_options
@which_option
@spool_option
def compact(url: str, run: str | None, which: str, spool: Path | None, *, as_json: bool) -> None:
    """Turn the chain of a checkpoint into one full checkpoint at the same step, without re-quantizing a row.

    `deltashard inspect` shows the chain and the bytes that a restore reads.
    """
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    seq = choose(log.refresh(deadline_s=POLICY.deadline_s), which).seq
    with spool_cache(spool) as cache:
        entry = compact_run(log, seq, mover(cache))
    done = f"checkpoint {seq} is already full"
    if entry is not None:
        done = (
            f"checkpoint {seq} is now full: {number(entry.rows)} rows, {size(entry.stored_bytes)} "
            f"(log entry {entry.seq}); `deltashard gc` deletes the objects that only its old chain needed"
        )
    print_result(done, as_json=as_json, seq=seq, compacted=entry)
