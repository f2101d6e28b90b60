"""Commands about whole runs: cp (to another name or store) and rm."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from deltashard_checkpoint.errors import FormatError, UserError
from deltashard_checkpoint.format.object_key import validate_new_run
from deltashard_checkpoint.log.commit_log import LogGap, RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance.holder import RunHeld, check_ended
from deltashard_checkpoint.maintenance.word import chosen
from deltashard_checkpoint.whole_run import removal, run_copy
from deltashard_checkpoint.whole_run.copy_draft import Draft
from deltashard_checkpoint.whole_run.remains import Remains, remains

from deltashard_cli import verification
from deltashard_cli.option import ended_option, run_options
from deltashard_cli.output import console, note, number, plural, print_json, progress, size
from deltashard_cli.target import POLICY, Target, Unfinished, find_run, names, new_run, run_of_url


@click.command()
@run_options
@click.argument("to")
@click.option("--to-run", metavar="NAME", help="Name of the copy; default: the run's own.")
@click.option(
    "--checkpoint",
    "-c",
    "which",
    metavar="WHICH",
    help="Only this checkpoint, with all it builds on: latest, seq:N (or N), step:N or pin:NAME.",
)
def cp(url: str, to: str, run: str | None, to_run: str | None, which: str | None, *, as_json: bool) -> None:
    """Copy a run, or one of its checkpoints, into the store TO: the same store under another name, or another store.

    The copy is a run of its own, of one moment of the source, and byte for byte what the source restores; trainers go
    on from it. Every object is checked by its hash on its way. A copy that was cut short is no run for anybody: call it
    again, it goes on. A run that is there and is no such copy is refused.
    """
    found = find_run(url, run)
    source = RunLog(found.store, found.run)
    name = to_run or found.run
    place = new_run(to, name)
    target = RunLog(place.store, validate_new_run(place.run))

    def work(made: Draft) -> run_copy.Copied:
        with progress("copying", made.bytes) as advance:
            return run_copy.copy(made, advance=advance)

    done = run_copy.copied(source, target, which, work, deadline_s=POLICY.deadline_s)
    checked = verification.verify(place)
    # What the source has committed since, also before this very call where the copy is an older one.
    newer = _newer(source.state, which, done)
    if as_json:
        print_json(
            {
                "copied": done,
                "newer_at_source": len(newer),
                "verified": checked.ok,
                "problems": checked.problems,
            }
        )
    else:
        out = console()
        what = "is made" if done.entries else "is there already" + (", whole" if checked.ok else "")
        said = f"checkpoint {done.seq}" + (
            f" there, {done.source_seq} here" if done.seq != done.source_seq else ""
        )
        out.print(
            f"run {done.run} at {place.store.url} {what}: {plural(done.checkpoints, 'checkpoint')}, the newest of step "
            f"{number(done.step)} ({said})"
        )
        if done.entries:
            out.print(
                f"{plural(done.objects, 'object')} put ({size(done.bytes)}), {done.passed_over} there already; the "
                f"source as of its log entry {done.through}; contents were hashed on the way, `deltashard verify "
                "--deep` reads the copy back",
                style="dim",
            )
        if newer:
            note(f"{_said_newer(newer, which, done)}: copy to another name, or remove this one first")
        for problem in checked.problems:
            note(f"problem: {problem.object}: {problem.what}")
        if not checked.ok and not done.entries:
            note("a finished copy is not mended: remove it (`deltashard rm`) and copy anew")
    if not checked.ok or (newer and not done.entries):
        click.get_current_context().exit(1)


def _newer(state: RunState, which: str | None, done: run_copy.Copied) -> list[Checkpoint]:
    """What is meant now and not in the copy: checkpoints behind its moment, or the one that `which` has become."""
    if which is None:
        return [entry for seq, entry in state.checkpoints.items() if seq > done.through]
    meant = chosen(state, which)
    return [] if meant.seq == done.source_seq else [meant]


def _said_newer(newer: Sequence[Checkpoint], which: str | None, done: run_copy.Copied) -> str:
    if which is not None:
        return (
            f"the copy that was begun there is of checkpoint {done.source_seq}, and {which} is {newer[0].seq} (step "
            f"{number(newer[0].step)}) by now"
        )
    return (
        f"the copy is of the source's log up to entry {done.through}: not in it are "
        f"{plural(len(newer), 'newer checkpoint')}, up to step {number(max(each.step for each in newer))}. A copy is "
        "not brought up to date"
    )


@click.command()
@run_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@ended_option
def rm(url: str, run: str | None, *, yes: bool, ended: bool, as_json: bool) -> None:
    """Remove a whole run, with all its checkpoints. There is no way back.

    Refused while a trainer may hold the run. A removal that was cut short leaves nothing that restores: call it again.
    """
    target = _removable(url, run)
    log = RunLog(target.store, target.run)
    held = removal.content(log)
    said, through = _look(log, ended=ended)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked here (--json, or no terminal): say --yes")
        click.confirm(
            f"remove run {target.run} at {target.store.url}: {said}, {plural(held.objects, 'object')} "
            f"({size(held.bytes)})?",
            abort=True,
            err=True,
        )
    with progress("removing", held.bytes) as advance:
        gone = removal.remove(log, through=through, advance=advance)
    if as_json:
        print_json({"run": target.run, "objects": gone.objects, "bytes": gone.bytes, "left": gone.left})
    else:
        console().print(f"run {target.run} is removed: {plural(gone.objects, 'object')}, {size(gone.bytes)}")
    if gone.left:
        note(
            f"{plural(gone.left, 'object')} came meanwhile, and {'is' if gone.left == 1 else 'are'} left: a trainer of "
            "this run still wrote (end it, and call rm again), or somebody has begun a run of this name since"
        )
        click.get_current_context().exit(1)


def _removable(url: str, run: str | None) -> Target:
    """The run that `url` or `--run` names, or what is left of it; never the only one of a store.

    Raises `NoSuchRun`, and `UserError` for a store.
    """
    try:
        found = find_run(url, run)
    except Unfinished:
        return run_of_url(url, run)
    if run is None and not names(url, found.run):
        raise UserError(
            "this is a store and not a run",
            where=found.store.url,
            remedy=f"say --run {found.run}, if you mean it; a store goes run by run",
        )
    return found


def _look(log: RunLog, *, ended: bool) -> tuple[str, int | None]:
    """What is about to be removed, for people, and up to which slot it was seen that nobody holds it.

    None: it was not looked at for that. Raises `RunHeld`.
    """
    left = remains(log.store, log.key(""))
    if left is Remains.REMOVING:
        return "its removal was begun", None
    if left is Remains.COPYING:
        return "a copy that was cut short", None
    try:
        state = log.refresh(deadline_s=POLICY.deadline_s)
    except LogGap as gap:
        return _damaged(gap.what, ended=ended), None
    except FormatError as error:
        return _damaged(error.what, ended=ended), None
    if state.stopped is not None:
        return _damaged(state.damage() or "", ended=ended), None
    check_ended(log, state, ended=ended, what="a removal")
    newest = state.newest()
    step = "" if newest is None else f", the newest of step {number(newest.step)}"
    return f"{plural(len(state.checkpoints), 'checkpoint')}{step}", None if ended else state.tip


def _damaged(what: str, *, ended: bool) -> str:
    """What is told of a run whose log says no more who trains it. Raises `RunHeld` unless a person knows."""
    if not ended:
        raise RunHeld(
            f"its log is damaged, and does not say whether a trainer holds the run: {what}",
            where="rm",
            remedy="end its trainers, and say --ended",
        )
    return f"its log is damaged ({what})"
