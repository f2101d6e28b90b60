"""`deltashard gc`: delete unneeded objects, and report why every other object is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Retired
from deltashard_checkpoint.maintenance.garbage_collection import (
    DEFAULT_GRACE_S,
    CollectResult,
    collect,
    orphaned_prefixes,
)
from deltashard_checkpoint.maintenance.inventory import GcStatus, Item, inventory
from deltashard_checkpoint.maintenance.retention import (
    KEEP_ALL,
    Retention,
    Retirement,
    append_retirement,
    retire,
)
from deltashard_checkpoint.stores.abc import StoreFull

from deltashard_cli.option import Finite, run_options
from deltashard_cli.output import console, number, plural, print_json, show, size
from deltashard_cli.target import POLICY, find_run

_ORDER = (GcStatus.DELETABLE, GcStatus.IN_GRACE, GcStatus.KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonGroup:
    """Objects with the same status for the same reason."""

    status: GcStatus
    reason: str
    objects: int
    bytes: int


def by_reason(items: Iterable[Item]) -> list[ReasonGroup]:
    """Group items by status (deletable, in grace, kept) and reason, the largest group first."""
    sums: dict[tuple[GcStatus, str], tuple[int, int]] = {}
    for item in items:
        objects, count = sums.get((item.status, item.reason), (0, 0))
        sums[item.status, item.reason] = (objects + 1, count + item.bytes)
    found = [
        ReasonGroup(status=status, reason=reason, objects=objects, bytes=count)
        for (status, reason), (objects, count) in sums.items()
    ]
    return sorted(found, key=lambda one: (_ORDER.index(one.status), -one.bytes, one.reason))


def _show_reasons(items: Sequence[Item], *, verbose: bool) -> None:
    out = console()
    out.print()
    if verbose:
        rows = [(item.status, size(item.bytes), item.key, item.reason) for item in items]
        show(out, "objects and reasons", ["status", ">bytes", "~object", "~reason"], rows)
        out.print()
    groups = by_reason(items)
    rows = [(one.status, number(one.objects), size(one.bytes), one.reason) for one in groups]
    show(out, "objects by reason", ["status", ">objects", ">bytes", "~reason"], rows)
    for status in _ORDER:
        held = [one for one in groups if one.status is status]
        total = sum(one.bytes for one in held)
        out.print(
            f"{status}: {plural(sum(one.objects for one in held), 'object')}, {size(total)}", style="dim"
        )


@click.command()
@run_options
@click.option(
    "--dry-run", is_flag=True, help="Change nothing; print what would be done, and why each object is kept."
)
@click.option("-v", "--verbose", is_flag=True, help="With --dry-run: list each object, not only each reason.")
@click.option(
    "--keep-last", type=click.IntRange(1), metavar="N", help="Retire all but the newest N checkpoints first."
)
@click.option(
    "--every-steps", type=click.IntRange(1), metavar="N", help="With --keep-last: also keep one per N steps."
)
@click.option(
    "--every-hours",
    type=Finite(0, min_open=True),
    metavar="H",
    help="With --keep-last: also keep one per H hours.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Finite(0),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="Delete only objects that were retired longer ago, so that readers can finish.",
)
def gc(  # noqa: C901, PLR0913
    url: str,
    run: str | None,
    keep_last: int | None,
    every_steps: int | None,
    every_hours: float | None,
    grace_s: float,
    *,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Delete unneeded objects: retired checkpoints after their grace, and the rest of failed saves.

    Live checkpoints are retired only with --keep-last. Bases of other checkpoints, pins, a second independent chain
    and the resume point of a starting trainer are always kept.
    """
    if keep_last is None and (every_steps or every_hours):
        raise click.UsageError("--every-steps and --every-hours need --keep-last")
    if verbose and not dry_run:
        raise click.UsageError("-v lists the objects of a dry run: use --dry-run, too")
    target = find_run(url, run)
    log = RunLog(target.store, target.run)
    retention = Retention(
        keep_last=keep_last or KEEP_ALL,
        every_steps=every_steps,
        every_s=None if every_hours is None else every_hours * 3600,
    )
    state = log.refresh(deadline_s=POLICY.deadline_s)
    dead = orphaned_prefixes(log, state, read_only=dry_run)
    freed: CollectResult | None = None
    entry: Retirement | Retired | None
    if dry_run:
        entry = retire(state, retention, dead)
    else:
        try:
            entry = append_retirement(log, retention, orphaned_prefixes=dead)
        except StoreFull:
            # Deleting objects that need no retire entry makes room for the entry.
            freed = collect(log, grace_s=grace_s, unretired=dead)
            entry = append_retirement(log, retention, orphaned_prefixes=dead)
    retired, prefixes = ((), ()) if entry is None else (entry.checkpoints, entry.prefixes)
    # Orphaned prefixes of snapshots that were never committed are the rest of failed saves.
    given_up = sorted(set(prefixes) & set(dead) - state.superseded.keys())
    found = collect(log, grace_s=grace_s, dry_run=dry_run)
    found = found if freed is None else freed.merged_with(found)
    items = list(inventory(log, state, retention, dead, grace_s=grace_s)) if dry_run else []
    if as_json:
        document = {
            "retired": retired,
            "retired_prefixes": prefixes,
            "given_up": given_up,
            "collected": found,
        }
        if dry_run:
            document["reasons"] = by_reason(items)
            document |= {"objects": items} if verbose else {}
        print_json(document)
        return
    out = console()
    would = "would be " if dry_run else ""
    if retired:
        out.print(f"checkpoints {would}retired: {', '.join(map(str, retired))}")
    if superseded := sorted(set(prefixes) & state.superseded.keys()):
        out.print(f"{plural(len(superseded), 'part')} {would}retired, replaced by compactions")
    if given_up:
        out.print(f"{plural(len(given_up), 'failed save')} {would}given up")
    out.print(f"{plural(found.objects, 'object')} ({size(found.bytes)}) {would}deleted")
    if found.unfinished:
        out.print(f"{plural(found.unfinished, 'file')} deleted, left incomplete by writers that died")
    if found.waiting:
        out.print(
            f"{plural(len(found.waiting), 'prefix', 'prefixes')} kept until the grace of {grace_s:.0f} s ends",
            style="dim",
        )
    if dry_run:
        _show_reasons(items, verbose=verbose)
