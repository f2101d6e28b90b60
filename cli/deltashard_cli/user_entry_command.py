"""Commands by which a person speaks in a run's log: pin, unpin, retire, rewind."""

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
    """Give the pinned NAME to a checkpoint, which is then kept until another one has the name, or it is unpinned.

    Works beside a living trainer. A later commit under the same name takes it.
    """
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    before = log.refresh().pinned.get(name)
    entry = user_entry.pin(log, name, which)
    seq = log.state.pinned[name]
    print_result(
        f"checkpoint {seq} (step {number(log.state.checkpoints[seq].step)}) is pinned {name}"
        + (" already" if entry is None else "")
        + (f", and {before} no more" if before not in {None, seq} else ""),
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
    """Take the pinned NAME away: its checkpoint is kept only as long as anything else asks for it."""
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    before = log.refresh().pinned.get(name)
    entry = user_entry.pin(log, name, None)
    print_result(
        f"checkpoint {before} is not pinned {name} any more",
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
    help="seq:N (or N), step:N or pin:NAME; several times.",
)
def retire(url: str, run: str | None, every: tuple[str, ...], *, as_json: bool) -> None:
    """Retire these checkpoints: they are no more at once, and `gc` deletes their objects after its grace.

    Refused for the newest, for what is pinned, and for what any other checkpoint builds on, unless that is named, too.
    """
    target = named_run(url, run)
    log = RunLog(target.store, target.run)

    def choose(state: RunState) -> list[int]:
        return [user_entry.resolve_checkpoint(state, which).seq for which in every]

    entry = retire_selected(log, choose)
    gone = () if entry is None else entry.checkpoints
    print_result(
        f"{plural(len(gone), 'checkpoint')} retired: {', '.join(map(str, gone))}; `deltashard gc` deletes what "
        "only they needed",
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
    """Have the run go on from an older checkpoint: the next trainer's restore() takes it for the newest.

    What is newer is set aside, not deleted: another rewind brings it back until retention or `gc --keep-last` retires
    it (a pin keeps it). Refused while a trainer may hold the run: its last save must be one of a close or an eviction.
    To begin a new run with a checkpoint instead: `deltashard cp`.
    """
    target = named_run(url, run)
    open_checkpoint(target, which)  # whose indexes are there: nothing else would be left to fall back to
    log = RunLog(target.store, target.run)
    entry = user_entry.rewind(log, which, ended=ended)
    state = log.state
    newest = state.newest()
    assert newest is not None
    detached = sorted(state.detached)
    said = f"the run goes on from checkpoint {newest.seq} (step {number(newest.step)})"
    if entry is None:
        said += " already"
    if detached:
        said += f"; set aside: {', '.join(map(str, detached))}"
    print_result(
        said,
        as_json=as_json,
        run=target.run,
        checkpoint=newest.seq,
        step=newest.step,
        detached=detached,
        entry=None if entry is None else entry.seq,
    )
