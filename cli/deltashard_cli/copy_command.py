"""Commands on whole runs: cp (a run to another store, or a checkpoint to a new run) and rm."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import click
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.maintenance.holder import RunInUse, check_ended
from deltashard_checkpoint.whole_run import removal, run_copy
from deltashard_checkpoint.whole_run.incomplete_state import IncompleteState, incomplete_state

from deltashard_cli import verification
from deltashard_cli.checkpoint_choice import read_to_tip
from deltashard_cli.option import ended_option, run_options, spool_cache, spool_option
from deltashard_cli.output import console, note, number, plural, print_json, print_result, progress, size
from deltashard_cli.target import POLICY, IncompleteRun, Target, find_run, named_run, new_run, run_of_url


@click.command()
@run_options
@click.argument("to")
@click.option("--as", "name", metavar="NAME", help="With -c: the new run's name.")
@click.option(
    "--checkpoint",
    "-c",
    "which",
    metavar="WHICH",
    help="With --as: first checkpoint of the new run: latest, seq:N (or N), step:N or pin:NAME.",
)
@spool_option
def cp(
    url: str,
    to: str,
    run: str | None,
    name: str | None,
    which: str | None,
    spool: Path | None,
    *,
    as_json: bool,
) -> None:
    """Copy a run into the store TO under its own name, or start the new run NAME there from one of its checkpoints.

    A copy has the same bytes as the source, including its log; every object is checked by its hash in transit. Another
    call continues an interrupted copy, or updates the copy unless a trainer has continued it. A new run holds all rows
    of the checkpoint in their stored encodings. Readers do not accept an interrupted copy as a run.
    """
    if (name is None) is not (which is None):
        raise click.UsageError("-c WHICH and --as NAME must be given together, to start a new run")
    found = find_run(url, run)
    source = RunLog(found.store, found.run)
    place = new_run(to, name or found.run)
    target = RunLog(place.store, place.run)
    if which is None:
        with ExitStack() as bars:
            done = run_copy.copy_run(
                source,
                target,
                open_progress=lambda total: bars.enter_context(progress("copying", total)),
                deadline_s=POLICY.deadline_s,
            )
    else:
        with spool_cache(spool) as cache:
            done = run_copy.start_run(source, target, which, cache, deadline_s=POLICY.deadline_s)
    checked = verification.verify(place)
    if as_json:
        print_json({"copied": done, "verified": checked.ok, "problems": checked.problems})
    else:
        out = console()
        newest = (
            ""
            if done.step is None
            else f", the newest at step {number(done.step)} (checkpoint {done.seq} there)"
        )
        out.print(
            f"run {done.run} at {place.store.url} "
            f"{'is created' if done.entries else 'is up to date'}: {plural(done.checkpoints, 'checkpoint')}{newest}"
        )
        out.print(
            f"{plural(done.objects, 'object')} written ({size(done.bytes)}), {done.skipped} already there; source "
            f"as of log entry {done.through}; contents were hashed in transit, `deltashard verify --deep` reads "
            "the copy back",
            style="dim",
        )
        for problem in checked.problems:
            note(f"problem: {problem.object}: {problem.what}")
    if not checked.ok:
        click.get_current_context().exit(1)


@click.command()
@run_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@ended_option
def rm(url: str, run: str | None, *, yes: bool, ended: bool, as_json: bool) -> None:
    """Remove a run with all its checkpoints, irreversibly.

    Refused while a trainer may hold the run. After an interrupted removal nothing can be restored: call it again.
    """
    target = _removal_target(url, run)
    log = RunLog(target.store, target.run)
    held = removal.content(log)
    description, through = _check_removable(log, ended=ended)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise click.UsageError("cannot ask for confirmation (--json, or no terminal): use --yes")
        click.confirm(
            f"remove run {target.run} at {target.store.url}: {description}, {plural(held.objects, 'object')} "
            f"({size(held.bytes)})?",
            abort=True,
            err=True,
        )
    with progress("removing", held.bytes) as advance:
        gone = removal.remove(log, through=through, advance=advance)
    print_result(
        f"run {target.run} is removed: {plural(gone.objects, 'object')}, {size(gone.bytes)}",
        as_json=as_json,
        run=target.run,
        objects=gone.objects,
        bytes=gone.bytes,
        left=gone.left,
    )
    if gone.left:
        note(
            f"{plural(gone.left, 'object')} appeared during the removal and {'is' if gone.left == 1 else 'are'} left: "
            "a trainer of this run is still writing (end it, then call rm again), or a new run has this name"
        )
        click.get_current_context().exit(1)


def _removal_target(url: str, run: str | None) -> Target:
    try:
        return named_run(url, run)
    except IncompleteRun:
        return run_of_url(url, run)


def _check_removable(log: RunLog, *, ended: bool) -> tuple[str, int | None]:
    """Return (description of the run to remove, last log slot at which no trainer held it).

    The slot is None if that was not checked. Raises `RunInUse`.
    """
    left = incomplete_state(log.store, log.key(""))
    if left is IncompleteState.REMOVING:
        return "its removal had started", None
    if left is IncompleteState.COPYING:
        if log.listed().seqs and not ended:
            raise RunInUse(
                "this is an interrupted copy, and its partial log does not record whether a trainer holds the run",
                where="rm",
                remedy="end its trainers, if there are any, and use --ended",
            )
        return "an interrupted copy", None if ended else -1
    state, damage = read_to_tip(log)
    if state is None and ended:
        return f"its log is damaged ({damage})", None
    if state is None:
        raise RunInUse(
            f"its log is damaged and does not record whether a trainer holds the run: {damage}",
            where="rm",
            remedy="end its trainers, and use --ended",
        )
    check_ended(log, state, ended=ended, what="a removal")
    newest = state.newest()
    step = "" if newest is None else f", the newest at step {number(newest.step)}"
    return f"{plural(len(state.checkpoints), 'checkpoint')}{step}", None if ended else state.tip
