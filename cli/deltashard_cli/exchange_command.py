"""Commands that exchange checkpoints with other tools: export and import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint

from deltashard_cli import verification
from deltashard_cli.checkpoint_choice import with_checkpoint
from deltashard_cli.directory import ExportResult
from deltashard_cli.export import export_safetensors, export_torch, require_torch
from deltashard_cli.option import json_option, run_options, spool_option, which_option
from deltashard_cli.output import console, note, number, plural, print_json, progress, size
from deltashard_cli.target import find_run, new_run
from deltashard_cli.write_command import bytes_of, report


@click.command()
@run_options
@which_option
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["torch", "safetensors", "dcp"]),
    help="Default: by FILE's suffix. dcp: write a new directory FILE for torch.distributed.checkpoint.",
)
@click.option(
    "--state",
    is_flag=True,
    help="Include optimizer state: of tables as TABLE.FIELD; dcp: of all optimizers as in get_optimizer_state_dict.",
)
@click.option("--force", is_flag=True, help="Replace an existing FILE; directories are never replaced.")
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

    torch.distributed.checkpoint.load reads the output of --format dcp in one process or sharded over many.
    """
    kind = kind or {".pt": "torch", ".pth": "torch", ".safetensors": "safetensors"}.get(file.suffix)
    if kind is None:
        raise click.UsageError(
            f"cannot infer the format from {file.name!r}: use .pt or .safetensors, or --format"
        )
    if file.is_dir() and kind != "dcp":
        raise click.UsageError(f"{str(file)!r} is a directory")
    if kind == "dcp":
        require_torch("export for DCP", "export to .safetensors, which needs no torch")

    def write(checkpoint: OpenCheckpoint) -> ExportResult:
        with progress("exporting", bytes_of(checkpoint, fields=state)) as advance:
            if kind == "dcp":
                from deltashard_cli.dcp.writer import export_dcp

                return export_dcp(checkpoint, file, state=state, advance=advance)
            made = export_torch if kind == "torch" else export_safetensors
            return made(checkpoint, file, state=state, force=force, advance=advance)

    report(with_checkpoint(find_run(url, run), which, write), as_json=as_json)


@click.command("import")
@click.argument("url")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--run", required=True, metavar="NAME", help="Name of the new run.")
@click.option("--tables", multiple=True, metavar="PATTERN", help="Names of tables (*, ?); default: guessed.")
@click.option("--without", multiple=True, metavar="PATTERN", help="Names to omit, for example tied weights.")
@click.option("--model", metavar="KEY", help="Path of the model's saved dict (a.b); '' is the top level.")
@click.option(
    "--optimizer",
    metavar="CLASS",
    help="Import the optimizer's state, too, for this class: Adagrad (of torch.optim) or module.Class.",
)
@click.option(
    "--step", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Training steps so far."
)
@click.option("--owner", default="", metavar="NAME", help="The run's owner, if its trainers have one.")
@spool_option
@json_option
def import_(url: str, directory: Path, run: str, spool: Path | None, *, as_json: bool, **wished: Any) -> None:
    """Start a run from a DIRECTORY written by torch.distributed.checkpoint.save.

    All values are stored bit for bit in one commit and read back. Trainers continue from it as from any checkpoint;
    without --optimizer by restore(weights_only=True).

    Import only trusted directories: torch unpickles DIRECTORY's .metadata, and a pickle can run arbitrary code.
    """
    require_torch("import", "run it in the trainer's environment")
    from deltashard_cli.dcp.importer import ImportRequest, check_new, draft, import_draft

    target = new_run(url, run)
    check_new(target)
    request = ImportRequest(**wished)
    made = draft(directory, request)
    with progress("importing", made.bytes) as advance:
        seq, stored_bytes = import_draft(made, target, request, spool=spool, advance=advance)
    found = verification.verify(target, deep=True)
    names = [table.fqn for table in made.tables]
    if as_json:
        done = {
            "run": target.run,
            "seq": seq,
            "step": request.step,
            "tables": names,
            "tables_guessed": made.guessed,
            "matrices": made.matrices,
            "dense": made.dense,
            "optimizer": made.optimizer,
            "stored_bytes": stored_bytes,
            "left_out": made.left_out,
        }
        print_json({"imported": done, "verified": found.ok, "problems": found.problems})
    else:
        console().print(
            f"run {target.run} starts at step {number(request.step)} (checkpoint {seq}): "
            f"{plural(len(names), 'table')}, {plural(made.dense, 'dense tensor')}, "
            f"{made.optimizer or 'no optimizer state'}, {size(stored_bytes)}"
        )
        how = "guessed, override by --tables" if made.guessed else "as given"
        console().print(f"tables ({how}): {', '.join(names) or 'none'}")
        if made.guessed and made.matrices:
            console().print(
                f"imported as dense although they have a table's shape: {', '.join(made.matrices)}"
            )
        for name in made.left_out:
            note(f"left out: {name}")
        for problem in found.problems:
            note(f"problem: {problem.object}: {problem.what}")
    if not found.ok:
        click.get_current_context().exit(1)
