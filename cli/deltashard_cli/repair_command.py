"""Commands for a run with a damaged log: scan (list the stored saves) and repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import click
from deltashard_checkpoint.errors import DeltashardError, FormatError
from deltashard_checkpoint.format.index import Index, decode_index, parse_index
from deltashard_checkpoint.format.object_key import is_index_key, run_key
from deltashard_checkpoint.log.chain import prefixes_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import prefix_of
from deltashard_checkpoint.log.repair import repair as repair_log
from deltashard_checkpoint.log.repair import salvage
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import Store, StoreUnavailable
from deltashard_checkpoint.whole_run.incomplete_state import IncompleteState, incomplete_state
from rich.text import Text

from deltashard_cli.option import run_options
from deltashard_cli.output import console, number, plural, print_json, show, size
from deltashard_cli.target import POLICY, IncompleteRun, Target, named_run, scanned_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The objects under one prefix of `data/`: the parts of one snapshot, or a compaction."""

    prefix: str
    attempt: int | None
    snapshot_id: int | None
    step: int | None
    """None if no index could be read."""
    seq: int | None
    """The live checkpoint that reads it; None if there is no log or no such checkpoint."""
    covers: tuple[int, ...]
    """Seqs of the checkpoints that hold the other rows; empty if it holds all rows."""
    parts: int
    tables: tuple[str, ...]
    rows: int
    bytes: int
    whole: bool
    """Every index is readable, and its packs exist with the right sizes; their contents were not read."""
    problems: tuple[str, ...]


@click.command()
@run_options
def scan(url: str, run: str | None, *, as_json: bool) -> None:
    """List the saves in the store by their indexes, even without a log. Writes nothing.

    Exit code 1 if a save is incomplete.
    """
    target = scanned_run(url, run)
    state, log = _live(target)
    found = list(saves(target.store, target.run, state))
    if as_json:
        print_json({"run": target.run, "log": log, "saves": found})
    else:
        out = console()
        rows = [
            (
                "compaction" if one.attempt is None else f"{one.attempt}.{one.snapshot_id}",
                "-" if one.step is None else number(one.step),
                "-" if one.seq is None else one.seq,
                "full" if not one.covers else f"delta on {', '.join(map(str, one.covers))}",
                one.parts,
                number(one.rows),
                size(one.bytes),
                Text("whole", style="green") if one.whole else Text("; ".join(one.problems), style="red"),
            )
            for one in found
        ]
        columns = ["attempt.snapshot", ">step", ">seq", "kind", ">parts", ">rows", ">bytes", "~state"]
        show(out, f"saves in {target.run} ({target.store.url})", columns, rows)
        whole = sum(one.whole for one in found)
        out.print(f"{plural(whole, 'whole save')} of {len(found)}; log: {log}", style="dim")
    if not all(one.whole for one in found):
        click.get_current_context().exit(1)


def _live(target: Target) -> tuple[RunState | None, str]:
    try:
        state = RunLog(target.store, target.run).refresh(deadline_s=POLICY.deadline_s)
    except StoreUnavailable:
        raise
    except DeltashardError as error:
        return None, error.what
    if state.tip < 0:
        return None, "missing"
    return state, state.damage() or "healthy"


def saves(store: Store, run: str, state: RunState | None) -> Iterator[Found]:
    """Yield every save under the run's `data/`, in key order."""
    sizes: dict[str, dict[str, int]] = {}
    for info in store.list(run_key(run, "data/")):
        key = info.key[len(run) + 1 :]
        try:
            sizes.setdefault(prefix_of(key), {})[key] = info.size_bytes
        except FormatError:
            continue
    live = {
        prefix: seq
        for seq, entry in (state.checkpoints if state else {}).items()
        for prefix in (*entry.prefixes, *(prefixes_of(state, seq) if state else ()))
    }
    for prefix, objects in sorted(sizes.items()):
        yield _save(store, run, prefix, objects, live.get(prefix))


def _save(store: Store, run: str, prefix: str, objects: Mapping[str, int], seq: int | None) -> Found:
    indexes: list[Index] = []
    problems = []
    for key in filter(is_index_key, sorted(objects)):
        try:
            data = store.get(run_key(run, key))
            index = decode_index(data, key=key, run=parse_index(data, where=key).run)
        except FormatError as error:
            problems.append(f"{key}: {error.what}")
            continue
        indexes.append(index)
        for pack in index.packs:
            if pack.key not in objects:
                problems.append(f"{pack.key} does not exist")
            elif objects[pack.key] != pack.bytes:
                problems.append(f"{pack.key} has {objects[pack.key]} bytes of {pack.bytes}")
    if not indexes and not problems:
        problems.append("no index: the save never finished")
    words = prefix.split("/")
    snapshot_id = None if words[1].startswith("compact-") else (int(words[1]), int(words[2]))
    return Found(
        prefix=prefix,
        attempt=None if snapshot_id is None else snapshot_id[0],
        snapshot_id=None if snapshot_id is None else snapshot_id[1],
        step=indexes[0].step if indexes else None,
        seq=seq,
        covers=tuple(sorted({index.covers for index in indexes if index.covers is not None})),
        parts=len(indexes),
        tables=tuple(sorted({table.fqn for index in indexes for table in index.tables})),
        rows=sum(index.rows for index in indexes),
        bytes=sum(objects.values()),
        whole=not problems,
        problems=tuple(problems),
    )


@click.command()
@run_options
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would be kept.")
@click.option(
    "--skip-unknown",
    is_flag=True,
    help="Also skip intact entries that this version does not know; use it only if no newer version wrote them.",
)
def repair(url: str, run: str | None, *, dry_run: bool, skip_unknown: bool, as_json: bool) -> None:
    """Repair the damaged log of a run, keeping every intact checkpoint. End its trainers first.

    Writes one entry and one folded state; changes and deletes nothing. A healthy log is not changed (exit code 2).
    """
    target = named_run(url, run)
    log = RunLog(target.store, target.run)
    # Repairing the rest of a copy or a removal would create a wrong run: older, without later pins and rewinds.
    if (left := incomplete_state(target.store, log.key(""))) in {
        IncompleteState.REMOVING,
        IncompleteState.COPYING,
    }:
        raise IncompleteRun(f"{target.run} is not a run: {left}", where=target.store.url, remedy=left.remedy)
    found = salvage(log, even_newer=skip_unknown, deadline_s=POLICY.deadline_s)
    seq = None if dry_run else repair_log(log, found)
    kept = sorted(found.state.checkpoints)
    if as_json:
        print_json(
            {
                "run": target.run,
                "damage": found.damage,
                "kept": kept,
                "lost": found.lost,
                "dropped": found.dropped,
                "entry": seq,
            }
        )
        return
    out = console()
    newest = found.state.newest()
    out.print(found.damage, style="dim")
    would = "would be " if dry_run else ""
    steps = "none" if newest is None else f"the newest is {newest.seq} (step {number(newest.step)})"
    out.print(f"{plural(len(kept), 'checkpoint')} {would}kept: {steps}")
    if found.lost:
        out.print(f"log entries {would}given up: {', '.join(map(str, found.lost))}")
    if found.dropped:
        out.print(
            f"checkpoints {would}dropped because their objects are missing: {', '.join(map(str, found.dropped))}"
        )
    if seq is not None:
        out.print(
            f"written as log entry {seq}; check the kept checkpoints by `deltashard verify`", style="dim"
        )
