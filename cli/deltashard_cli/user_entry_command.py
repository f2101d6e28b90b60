"""Commands that append a user's entry to a run's log: pin, unpin, retire, rewind."""

from __future__ import annotations

import click
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance import user_entry
from deltashard_checkpoint.maintenance.retention import retire_selected

from deltashard_cli.checkpoint_choice import open_checkpoint
from deltashard_cli.option import ended_option, named_option, run_options, which_option
from deltashard_cli.output import number, plural, print_result
from deltashard_cli.target import find_run, named_run


@click.command()
@run_options
@click.argument("name")
@which_option
def pin(url: str, name: str, run: str | None, which: str, *, as_json: bool) -> None:
    """Pin a checkpoint under NAME: it is kept until the name is moved to another checkpoint or unpinned.

    Works while a trainer runs. A later commit with the same pin name moves it.
    """
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    before = log.refresh().pinned.get(name)
    entry = user_entry.pin(log, name, which)
    seq = log.state.pinned[name]
    print_result(
        f"checkpoint {seq} (step {number(log.state.checkpoints[seq].step)}) is pinned {name}"
        + (" already" if entry is None else "")
        + (f", {before} no longer" if before not in {None, seq} else ""),
        as_json=as_json,
        run=target.run,
        name=name,
        checkpoint=seq,
        before=before,
        entry=entry and entry.seq,
    )


@click.command()
@run_options
@click.argument("name")
def unpin(url: str, name: str, run: str | None, *, as_json: bool) -> None:
    """Remove the pin NAME: its checkpoint is then kept only while something else requires it."""
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    before = log.refresh().pinned.get(name)
    entry = user_entry.pin(log, name, None)
    print_result(
        f"checkpoint {before} is no longer pinned {name}",
        as_json=as_json,
        run=target.run,
        name=name,
        checkpoint=None,
        before=before,
        entry=entry and entry.seq,
    )


@click.command()
@run_options
@click.option(
    "--checkpoint",
    "-c",
    "every",
    multiple=True,
    required=True,
    metavar="WHICH",
    help="seq:N (or N), step:N or pin:NAME; repeatable.",
)
def retire(url: str, run: str | None, every: tuple[str, ...], *, as_json: bool) -> None:
    """Retire checkpoints: they are no longer restorable, and `gc` deletes their objects after its grace.

    Refused for the newest and for pinned checkpoints, and for bases of checkpoints that are not retired, too.
    """
    target = named_run(url, run)
    log = RunLog(target.store, target.run)

    def choose(state: RunState) -> list[int]:
        return [user_entry.resolve_checkpoint(state, which).seq for which in every]

    entry = retire_selected(log, choose)
    gone = () if entry is None else entry.checkpoints
    print_result(
        f"{plural(len(gone), 'checkpoint')} retired: {', '.join(map(str, gone))}; `deltashard gc` deletes "
        "the objects that only they needed",
        as_json=as_json,
        run=target.run,
        retired=gone,
        prefixes=() if entry is None else entry.prefixes,
        entry=None if entry is None else entry.seq,
    )


@click.command()
@run_options
@named_option
@ended_option
def rewind(url: str, run: str | None, which: str, *, ended: bool, as_json: bool) -> None:
    """Rewind a run to an older checkpoint: the next trainer's restore() treats it as the newest.

    Newer checkpoints are detached, not deleted: another rewind restores them until retention or `gc --keep-last`
    retires them (a pin keeps them). Refused while a trainer may hold the run: the last save must be that of a close or
    an eviction. To start a new run from a checkpoint instead, use `deltashard cp`.
    """
    target = named_run(url, run)
    open_checkpoint(
        target, which
    )  # its indexes must be readable: there is no checkpoint to fall back to afterwards
    log = RunLog(target.store, target.run)
    entry = user_entry.rewind(log, which, ended=ended)
    state = log.state
    newest = state.newest()
    assert newest is not None
    detached = sorted(state.detached)
    result = f"the run continues from checkpoint {newest.seq} (step {number(newest.step)})"
    if entry is None:
        result += " already"
    if detached:
        result += f"; detached: {', '.join(map(str, detached))}"
    print_result(
        result,
        as_json=as_json,
        run=target.run,
        checkpoint=newest.seq,
        step=newest.step,
        detached=detached,
        entry=None if entry is None else entry.seq,
    )
