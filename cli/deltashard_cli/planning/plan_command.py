"""The command `plan`: how often a run should save, with how many bits, and what that costs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
from deltashard_checkpoint.deciding.evidence import MAX_RESTORE_COUNT
from deltashard_checkpoint.deciding.goal import BadGoal, duration, duration_s
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Sealed
from rich.text import Text

from deltashard_cli.option import Finite, json_option, run_option
from deltashard_cli.output import console, key_value_table, print_json, size
from deltashard_cli.planning.plan import PlanInputs, SavePlan
from deltashard_cli.planning.plan import plan as made_plan
from deltashard_cli.planning.recorded_run import RecordedRun, recorded_run
from deltashard_cli.target import Target, find_run

_READERS = 8
_MAX_ENTRIES = 5000
"""Maximum number of log entries to read, newest first; it covers months of training."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kMGTP])(i?))?B?(?:/s)?", re.ASCII)
_POWERS = "kMGTP"
_MAX_DURATION_S = 3650 * 86400

_EXAMPLE = """
\b
Example: 400 GiB on 16 pods, a failure in 20 hours, for a week:
  deltashard plan --bytes 400GiB --pods 16 --mtbf 20h --hours 168
For an existing run, to compare with its current interval:
  deltashard plan s3://bucket/prefix --run dlrm --pods 16
"""


def _size(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Parse a size (400GiB, 2TB) or a bandwidth (500MB/s) into bytes."""
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text[:40]!r} is not a size such as 400GiB, 2TB or 500MB/s")
    power = 1 + _POWERS.index(found[2]) if found[2] else 0
    count = float(found[1]) * (1024.0 if found[3] else 1000.0) ** power
    if not 0 < count <= 1e18:
        raise click.BadParameter(f"{text[:40]!r} must be greater than 0 and at most an exabyte")
    return count


def _seconds(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = duration_s(text, where="")
    except BadGoal as error:
        raise click.BadParameter(f"{error.what}; {error.remedy}") from None
    if not 0 < found <= _MAX_DURATION_S:
        raise click.BadParameter(f"{text[:40]!r} must be greater than 0 and at most ten years")
    return found


@click.command(epilog=_EXAMPLE)
@click.argument("url", required=False)
@run_option
@click.option(
    "--bytes",
    "raw_bytes",
    metavar="SIZE",
    callback=_size,
    help="Size of the tables and their state in memory: 400GiB.",
)
@click.option("--pods", type=click.IntRange(1, 1_000_000), default=1, show_default=True)
@click.option(
    "--mtbf",
    "mtbf_s",
    metavar="TIME",
    callback=_seconds,
    help="Mean time between failures of the whole run. Default: by pods.",
)
@click.option(
    "--save-cost",
    "save_s",
    metavar="TIME",
    callback=_seconds,
    help="Training time that a save costs. Default: by size.",
)
@click.option(
    "--bandwidth", metavar="SIZE", callback=_size, help="From one pod to the store. Default: 400MB/s."
)
@click.option("--step", "step_s", metavar="TIME", callback=_seconds, help="Duration of a training step.")
@click.option("--hours", type=Finite(0.1, 1e6), default=168.0, show_default=True, help="Training time.")
@json_option
def plan(url: str | None, run: str | None, hours: float, *, as_json: bool, **given: Any) -> None:
    """Show how often to save, with how many bits, and the cost, as a run with the goal `auto` would choose.

    The inputs are the model's size, or the log of the run at URL. The output lists all assumptions.
    """
    if run is not None and url is None:
        raise click.UsageError("--run needs the URL of a store")
    if url is not None and given["raw_bytes"] is not None:
        raise click.UsageError("--bytes and URL both give the size of the model: use one of them")
    seen = None if url is None else _read_run(find_run(url, run))
    found = made_plan(PlanInputs(planned_s=hours * 3600, **given), seen)
    if as_json:
        print_json({"plan": found, "run": seen})
    else:
        _show(found, seen)


def _read_run(target: Target) -> RecordedRun:
    log = RunLog(target.store, target.run)
    there = sorted(log.listed().seqs)[-_MAX_ENTRIES:]
    with ThreadPoolExecutor(_READERS) as pool:
        slots = pool.map(log.read_slot, there)
        found = recorded_run(slot.entry for slot in slots if isinstance(slot, Sealed))
    if found is None:
        raise UserError(
            f"run {target.run} has no checkpoint yet",
            where=target.store.url,
            remedy="give the size by --bytes instead of the URL",
        )
    return found


def _show(found: SavePlan, seen: RecordedRun | None) -> None:
    out = console()
    out.print(Text("Inputs of this plan", style="bold"))
    out.print(
        key_value_table(
            [(each.name, Text.assemble(each.value, (f"  ({each.source})", "dim"))) for each in found.figures]
        )
    )
    out.print()
    out.print(Text(f"auto: save every {duration(found.interval_s)}", style="bold"))
    most = (
        f"at most {found.restores}" if found.restores < MAX_RESTORE_COUNT else f"over {MAX_RESTORE_COUNT:,}"
    )
    restores = f"{found.expected_restores:,.3g} restores expected, with 95 % {most}"
    pairs = [
        ("why", found.why),
        ("bound", found.bound),
        ("bits", f"{found.encoding} ({restores}): {found.bits_why}"),
        ("overhead", f"{_percent(found.overhead)} of training (saves {_percent(found.save_share)})"),
        (
            "lost work",
            f"{duration(found.mean_lost_s)} per failure on average, {duration(found.worst_lost_s)} at worst",
        ),
        (
            "bytes a day",
            f"{size(found.bytes_per_day)}: saves of {size(found.stored_bytes)}, "
            + ("all full" if seen is None else "like those in the log"),
        ),
    ]
    out.print(key_value_table([(name, text) for name, text in pairs if text]))
    if found.overhead >= 1:
        hopeless = f"training hardly advances: failures every {duration(found.mtbf_s)} leave less than half of the time"
        out.print(Text(hopeless, style="yellow"))
    if found.now_s is not None and found.overhead_now is not None:
        now = f"its last saves were {duration(found.now_s)} apart: {_percent(found.overhead_now)} of training"
        out.print(Text(f"Now {now}", style="bold"))


def _percent(portion: float) -> str:
    return f"{100 * portion:.3g} %" if portion <= 10 else "over 1,000 %"
