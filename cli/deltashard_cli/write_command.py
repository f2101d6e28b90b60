"""Commands that write: restore and export to files, import and compact on the store."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.compaction import compact as compact_run
from deltashard_checkpoint.maintenance.row_mover import mover
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint, choose

from deltashard_cli import verification
from deltashard_cli.checkpoint_choice import open_checkpoint, using
from deltashard_cli.export import (
    Written,
    export_safetensors,
    export_torch,
    require_torch,
    restore_directory,
)
from deltashard_cli.option import run_options, which_option
from deltashard_cli.output import console, note, number, plural, print_json, progress, size
from deltashard_cli.target import POLICY, find_run, new_run

_SPOOL_BYTES = 1 << 30


@click.command()
@run_options
@which_option
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--raw", is_flag=True, help="Bare little-endian bytes (.bin) instead of .npy.")
def restore(url: str, directory: Path, run: str | None, which: str, *, raw: bool, as_json: bool) -> None:
    """Write a checkpoint's tables, optimizer state and blobs into a new DIRECTORY, with a manifest.json.

    To train on from it: `deltashard rewind` in the same run, `deltashard cp --to-run NAME -c WHICH` in a new one.
    """

    def write(checkpoint: OpenCheckpoint) -> Written:
        with progress("restoring", _bytes(checkpoint)) as advance:
            return restore_directory(checkpoint, directory, raw=raw, advance=advance)

    _report(using(find_run(url, run), which, write), as_json=as_json)


@click.command()
@run_options
@which_option
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["torch", "safetensors", "dcp"]),
    help="Default: by FILE's suffix. dcp: a new directory FILE that torch.distributed.checkpoint loads.",
)
@click.option(
    "--state",
    is_flag=True,
    help="Also the tables' optimizer state, as TABLE.FIELD; dcp: all optimizers', as get_optimizer_state_dict has it.",
)
@click.option("--force", is_flag=True, help="Replace FILE; never a directory.")
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
    """Write a checkpoint's weights as a torch state_dict (FILE.pt), a safetensors file (FILE.safetensors) or for DCP.

    With --format dcp, plain torch.distributed.checkpoint.load reads the directory, in one process or sharded over many.
    """
    kind = kind or {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors"}.get(file.suffix)
    if kind is None:
        raise click.UsageError(
            f"cannot tell the format from {file.name!r}: use .pt or .safetensors, or say --format"
        )
    if file.is_dir() and kind != "dcp":
        raise click.UsageError(f"{str(file)!r} is a directory")
    if kind == "dcp":
        require_torch("export for DCP", "export to .safetensors, which needs nothing")

    def write(checkpoint: OpenCheckpoint) -> Written:
        with progress("exporting", _bytes(checkpoint)) as advance:
            if kind == "dcp":
                from deltashard_cli.dcp.writer import export_dcp

                return export_dcp(checkpoint, file, state=state, advance=advance)
            made = export_torch if kind == "torch" else export_safetensors
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
        note(f"left out, not plain tensors: {', '.join(written.skipped)}")
    _tell_left_out(written.left_out)


def _tell_left_out(names: Sequence[str]) -> None:
    for name in names:
        note(f"left out: {name}")


@click.command("import")
@click.argument("url")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--run", required=True, metavar="NAME", help="Name of the run that begins with it.")
@click.option(
    "--tables", multiple=True, metavar="PATTERN", help="Names of tables (*, ?); default: guessed, and said."
)
@click.option(
    "--without", multiple=True, metavar="PATTERN", help="Names to leave out, such as of tied weights."
)
@click.option(
    "--model", metavar="KEY", help="Where the model's dict stands in what was saved (a.b); '' outermost."
)
@click.option(
    "--optimizer",
    metavar="CLASS",
    help="Also the optimizer's state; its class is not stored there: Adagrad (of torch.optim), or module.Class.",
)
@click.option(
    "--step", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Steps it was trained."
)
@click.option("--owner", default="", metavar="NAME", help="The run's owner, where trainers have one.")
@click.option(
    "--spool",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help=f"Directory for packs on their way, up to {size(_SPOOL_BYTES)}; default: the system's for temporary files.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs.")
def import_(
    url: str,
    directory: Path,
    run: str,
    tables: tuple[str, ...],
    without: tuple[str, ...],
    model: str | None,
    optimizer: str | None,
    step: int,
    owner: str,
    spool: Path | None,
    *,
    as_json: bool,
) -> None:
    """Begin a run with what torch.distributed.checkpoint.save wrote into DIRECTORY.

    Everything is stored as it is, bit for bit, committed at once and read back. Trainers go on from it as from any
    checkpoint; without --optimizer by restore(weights_only=True).

    Only directories that you trust: torch unpickles DIRECTORY's .metadata, and a pickle runs what it names.
    """
    require_torch("import", "run it where the trainer runs")
    from deltashard_cli.dcp.importer import Wish, check_new, draft, import_draft

    target = new_run(url, run)
    check_new(target)
    wish = Wish(tables=tables, without=without, model=model, optimizer=optimizer, step=step, owner=owner)
    made = draft(directory, wish)
    with progress("importing", made.bytes) as advance:
        done = import_draft(made, target, wish, spool=spool, advance=advance)
    found = verification.verify(target, deep=True)
    if as_json:
        print_json({"imported": done, "verified": found.ok, "problems": found.problems})
    else:
        console().print(
            f"run {done.run} begins at step {number(done.step)} (checkpoint {done.seq}): "
            f"{plural(len(done.tables), 'table')}, {plural(done.dense, 'dense tensor')}, "
            f"{done.optimizer or 'no optimizer state'}, {size(done.stored_bytes)}"
        )
        how = "guessed, --tables says them" if done.tables_guessed else "as said"
        console().print(f"tables ({how}): {', '.join(done.tables) or 'none'}")
        if done.tables_guessed and done.matrices:
            console().print(f"taken for dense, though of a table's shape: {', '.join(done.matrices)}")
        _tell_left_out(done.left_out)
        for problem in found.problems:
            note(f"problem: {problem.object}: {problem.what}")
    if not found.ok:
        click.get_current_context().exit(1)


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
