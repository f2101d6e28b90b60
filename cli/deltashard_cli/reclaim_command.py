"""`reclaim`: remove the runs of a finished workload; the command of the workload's cleanup Job.

The Job runs unattended, so the command removes only runs whose newest attempt the workload opened. It keeps runs that
were opened, rewound or copied since, runs with a pin, and runs with an unreadable log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from deltashard_checkpoint.errors import FormatError, UserError
from deltashard_checkpoint.format.object_key import validate_run
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.maintenance.holder import not_last_trained_by
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.whole_run import removal
from deltashard_checkpoint.whole_run.incomplete_state import IncompleteState, incomplete_state

from deltashard_cli.checkpoint_choice import read_to_tip
from deltashard_cli.option import json_option
from deltashard_cli.output import console, plural, print_json, size
from deltashard_cli.target import POLICY, open_root

_NUMBER = re.compile(r"-([a-z0-9.-]+-)?[0-9]+", re.ASCII)
"""Suffix of the run name of a numbered pod: its number, after the name of its replicated job or component."""
MAX_REASON_CHARS = 300
MAX_RESULT_BYTES = 4000
"""Maximum size of the result file; the kubelet truncates a termination message to 4,096 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run that is kept, and the reason."""

    run: str
    why: str


@click.command()
@click.argument("url")
@click.option("--run", required=True, metavar="NAME", help="The workload's run.")
@click.option("--workload", required=True, metavar="UID", help="Its UID; runs of other workloads are kept.")
@click.option(
    "--result-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the result to FILE, as JSON of at most 4,000 bytes (a container's termination message).",
)
@json_option
def reclaim(url: str, run: str, workload: str, *, result_file: Path | None, as_json: bool) -> None:
    """Remove the run of a workload that has ended, if no other workload or user has opened it since.

    The runs of its numbered pods (NAME-0, NAME-1, ...) are removed, too. Runs with a pin are kept. A missing run is not
    an error. Call it again after an interruption.
    """
    if not workload:
        raise click.UsageError("--workload is empty: give the UID of the run's workload")
    store = open_root(url)
    removed: list[str] = []
    kept: list[KeptRun] = []
    objects = size_bytes = 0
    for name in _runs(store, validate_run(run)):
        log = RunLog(store, name)
        try:
            gone = removal.remove(log, through=_removable_through(log, workload))
        except (NotRemovable, removal.RunAdvanced) as why:
            if name == run or _ever_opened_by(log, workload):
                kept.append(KeptRun(run=name, why=why.what))
            continue
        removed.append(name)
        objects, size_bytes = objects + gone.objects, size_bytes + gone.bytes
        if gone.left:
            kept.append(KeptRun(run=name, why=f"{plural(gone.left, 'object')} appeared during the removal"))
    found = {"removed": removed, "kept": kept, "objects": objects, "bytes": size_bytes}
    if result_file is not None:
        counts = {"runs": len(removed), "retained": len(kept), "objects": objects, "bytes": size_bytes}
        result_file.write_text(_result_json(counts, kept), encoding="utf-8")
    if as_json:
        print_json(found)
        return
    out = console()
    for each in kept:
        out.print(f"run {each.run} is kept: {each.why}")
    text = f"{plural(objects, 'object')}, {size(size_bytes)}"
    out.print(f"removed: {', '.join(removed)} ({text})" if removed else "nothing was removed")


def _result_json(counts: Mapping[str, int], kept: Sequence[KeptRun]) -> str:
    """Return the result as JSON of at most `MAX_RESULT_BYTES`, with as many kept runs as fit."""
    text = json.dumps({**counts, "kept": []})
    for n in range(1, len(kept) + 1):
        longer = json.dumps(
            {**counts, "kept": [{"run": each.run, "why": each.why[:MAX_REASON_CHARS]} for each in kept[:n]]},
            ensure_ascii=False,
        )
        if len(longer.encode()) > MAX_RESULT_BYTES:
            break
        text = longer
    return text


def _runs(store: Store, run: str) -> Iterator[str]:
    """Yield the names of the run and of its numbered pods' runs that have objects, at one or two requests per run."""
    if next(iter(store.list(f"{run}/")), None) is not None:
        yield run
    after = ""
    while (found := next(iter(store.list(f"{run}-", start_after=after)), None)) is not None:
        name = found.key[: found.key.find("/", len(run))] if "/" in found.key[len(run) :] else found.key
        if _NUMBER.fullmatch(name[len(run) :]):
            yield name
        after = f"{name}/~"  # sorts after every key of it


class NotRemovable(UserError):
    """The workload must not remove the run."""


def _removable_through(log: RunLog, workload: str) -> int | None:
    """Return the log tip at which the run was the workload's; None if its removal had started.

    Raises `NotRemovable`.
    """
    left = incomplete_state(log.store, log.key(""))
    if left is IncompleteState.REMOVING:
        return None  # an earlier call checked the run before it started the removal
    if left is not None:
        raise NotRemovable(f"{left}: see `deltashard ls`")
    state, damage = read_to_tip(log)
    if state is None:
        raise NotRemovable(f"its log is damaged: {damage}")
    if (why := not_last_trained_by(log, state, workload)) is not None:
        raise NotRemovable(why)
    if state.pinned:
        raise NotRemovable(f"it has a pin, {next(iter(state.pinned))!r}: `deltashard rm` removes it")
    return state.tip


def _ever_opened_by(log: RunLog, workload: str) -> bool:
    """Whether the workload ever opened the run; True if its log cannot be read."""
    try:
        attempts = log.refresh(deadline_s=POLICY.deadline_s).attempts
    except (LogGap, FormatError):
        return True
    return any(each.workload == workload for each in attempts.values())
