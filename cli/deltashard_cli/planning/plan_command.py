"""The command `plan`: how often a run should save, with how many bits, and what that costs and saves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

import click
from deltashard_checkpoint.deciding.evidence import LONGEST_COUNT
from deltashard_checkpoint.deciding.goal import Goal, duration
from deltashard_checkpoint.deciding.goal import goal as read_goal
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Sealed
from deltashard_checkpoint.vocabulary import BITS_CHOICES
from rich.console import Console
from rich.text import Text

from deltashard_cli.option import Finite
from deltashard_cli.output import console, facts, plural, print_json, show, size
from deltashard_cli.planning import quantity
from deltashard_cli.planning.assumption import Assumption, Said, settled
from deltashard_cli.planning.chart import Mark, chart
from deltashard_cli.planning.failure_trace import FailureTrace, failure_trace
from deltashard_cli.planning.forecast import HOPELESS, Forecast, Plan, Planner, Prices, at_interval
from deltashard_cli.planning.recorded_run import RecordedRun, recorded_run
from deltashard_cli.target import Target, find_run

_READERS = 8
_MOST_ENTRIES = 5000
"""Of a run's log, the newest: enough for months."""

_EXAMPLE = """
\b
Example: 400 GiB on 16 pods of 8 ranks, a failure in 20 hours, for a week:
  deltashard plan --bytes 400GiB --pods 16 --ranks 128 --mtbf 20h --hours 168
From failures that were seen (a time a line, or columns start,end,cause):
  deltashard plan --bytes 400GiB --pods 16 --trace failures.csv --trace-span 30d
For a run that there is, and what would change:
  deltashard plan s3://bucket/prefix --run dlrm
"""


@click.command(epilog=_EXAMPLE)
@click.argument("url", required=False)
@click.option("--run", metavar="NAME", help="The run, when URL is a store that holds several.")
@click.option("--trace", "trace_file", type=click.File("r", encoding="utf-8-sig", errors="replace"),
              metavar="FILE", help="Failures as CSV: a time a line, or columns start,end,cause.")  # fmt: skip
@click.option(
    "--trace-span", metavar="TIME", help="How long the trace looked. Default: first to last failure."
)
@click.option("--trace-pods", type=click.IntRange(1, 1_000_000), help="Pods it is of. Default: --pods.")
@click.option("--mtbf", metavar="TIME", help="Time between failures of the whole run, instead of a trace.")
@click.option("--failures-per-day", type=Finite(1e-6, 1e4), help="The same, the other way round.")
@click.option("--bytes", "raw_bytes", metavar="SIZE", help="Of tables and their state in memory: 400GiB.")
@click.option("--model", metavar="RxCxS", help="Rows x columns x bytes of state a row: 1e9x64x4.")
@click.option(
    "--dense", metavar="SIZE", help="What every save holds whole: dense parameters and their state."
)
@click.option("--dirty", "dirty", multiple=True, metavar="SHARE[@TIME]",
              help="Rows touched: 26% (in --dirty-interval), or 26%@30m; twice fits how it grows.")  # fmt: skip
@click.option("--dirty-interval", default="30m", show_default=True, metavar="TIME")
@click.option("--pods", type=click.IntRange(1, 1_000_000), help="Pods of the run. Default: 1.")
@click.option("--ranks", type=click.IntRange(1, 1_000_000), help="Ranks that hold rows. Default: one a pod.")
@click.option("--bandwidth", metavar="SIZE/s", help="Of one pod to the store. Default: 400MB/s.")
@click.option("--step", metavar="TIME", help="Of a training step; goals are then whole steps.")
@click.option("--stall", metavar="TIME", help="That a save holds training. Default: by size, as measured.")
@click.option("--slowdown", metavar="TIME", help="That slower steps beside a save cost. Default: by size.")
@click.option(
    "--restart", metavar="TIME", help="From a failure until a trainer loads. Default: 3m, or the trace's."
)
@click.option("--hours", type=Finite(0.1, 1e6), help="Training planned. Default: 168.")
@click.option("--goal", default="auto", show_default=True,
              help="auto, overhead=1%, lost-work=5m, pls=0.02 or check-n-run.")  # fmt: skip
@click.option(
    "--lost-work", default="5m", show_default=True, metavar="TIME", help="Of that goal in the table."
)
@click.option("--pls", type=Finite(1e-6, 1), help="Portion of lost samples that partial recovery may cost.")
@click.option("--bits", type=click.Choice(["budget", "check-n-run", *map(str, BITS_CHOICES)]), default="budget",
              show_default=True, help="How many bits a weight has, or the rule that says it.")  # fmt: skip
@click.option("--price-gb-month", type=Finite(0, 1e6), default=0.0, help="Of 10^9 bytes stored for a month.")
@click.option("--price-put", type=Finite(0, 1e6), default=0.0, help="Of a thousand PUTs.")
@click.option("--price-get", type=Finite(0, 1e6), default=0.0, help="Of a thousand GETs.")
@click.option("--price-hour", type=Finite(0, 1e6), default=0.0, help="Of a pod, an hour.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, for programs.")
def plan(
    url: str | None,
    run: str | None,
    trace_file: TextIO | None,
    trace_span: str | None,
    trace_pods: int | None,
    mtbf: str | None,
    failures_per_day: float | None,
    raw_bytes: str | None,
    model: str | None,
    dense: str | None,
    dirty: tuple[str, ...],
    dirty_interval: str,
    pods: int | None,
    ranks: int | None,
    bandwidth: str | None,
    step: str | None,
    stall: str | None,
    slowdown: str | None,
    restart: str | None,
    hours: float | None,
    goal: str,
    lost_work: str,
    pls: float | None,
    bits: str,
    price_gb_month: float,
    price_put: float,
    price_get: float,
    price_hour: float,
    *,
    as_json: bool,
) -> None:
    """Say how often to save, with how many bits, and what it costs and saves.

    From the model's size and the failures that are expected, or from the log of the run at URL. What is not said is
    assumed, and named. (What a restore reads: `deltashard restore-plan`.)
    """
    _one_of({"--trace": trace_file, "--mtbf": mtbf, "--failures-per-day": failures_per_day})
    _one_of({"--bytes": raw_bytes, "--model": model})
    if run is not None and url is None:
        raise click.UsageError("--run names a run of URL, which is missing")
    if trace_file is None and (trace_span is not None or trace_pods is not None):
        raise click.UsageError("--trace-span and --trace-pods say something of a --trace, which is missing")
    if ranks is not None and ranks < (pods or 1):
        raise click.UsageError(
            f"--ranks {ranks} on --pods {pods}: a pod has one rank at least; say the ranks of all pods together"
        )
    wanted = read_goal(goal, where="--goal")
    if wanted.aim == "fixed":
        raise click.UsageError("--goal fixed has nothing to choose")
    if wanted.aim == "pls":
        pls = wanted.amount
    between = _time(mtbf, "--mtbf") or (86400 / failures_per_day if failures_per_day else None)
    if mtbf is not None and not between:
        raise click.UsageError("--mtbf is 0")
    said = Said(
        model=None if model is None else quantity.model(model, where="--model"),
        raw_bytes=_size(raw_bytes, "--bytes"),
        dense_bytes=_size(dense, "--dense"),
        pods=pods,
        ranks=ranks,
        bandwidth=_size(bandwidth, "--bandwidth"),
        stall_s=_time(stall, "--stall"),
        slowdown_s=_time(slowdown, "--slowdown"),
        step_s=_time(step, "--step"),
        restart_s=_time(restart, "--restart"),
        planned_s=None if hours is None else hours * 3600,
        dirty=_dirty(dirty, dirty_interval),
        mtbf_s=between,
        trace=None if trace_file is None else _trace(trace_file, trace_span),
        trace_pods=trace_pods,
        pls=pls or 0.0,
        bits=BITS_CHOICES[int(bits)] if bits.isdecimal() else bits,
        prices=Prices(gb_month=price_gb_month, put=price_put, get=price_get, pod_hour=price_hour),
    )
    target = None if url is None else find_run(url, run)
    seen = None if target is None else _seen(target)
    known, assumptions = settled(said, seen)
    planner = Planner(known)
    amount = read_goal(f"lost-work={lost_work}", where="--lost-work")
    found = planner.plan(wanted, amount)
    now = None
    if seen is not None and seen.now_s is not None:
        now = at_interval(planner, "now", seen.now_s, bits=seen.encoding or found.encoding)
    if as_json:
        print_json({"assumptions": assumptions, "plan": found, "run": seen, "now": now})
        return
    _show(console(), wanted, found, assumptions, seen, now)


def _one_of(options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} say the same thing: give one of them")


def _time(text: str | None, where: str) -> float | None:
    return None if text is None else quantity.seconds(text, where=where)


def _size(text: str | None, where: str) -> float | None:
    return None if text is None else quantity.size_bytes(text, where=where)


def _dirty(texts: Sequence[str], interval: str) -> tuple[tuple[float, float], ...]:
    interval_s = quantity.seconds(interval, where="--dirty-interval")
    points = [quantity.dirty(text, interval_s, where="--dirty") for text in texts]
    return quantity.growing(points, where="--dirty")


def _trace(file: TextIO, span: str | None) -> FailureTrace:
    lines: Iterable[str] = file
    return failure_trace(lines, where=file.name, span_s=_time(span, "--trace-span"))


def _seen(target: Target) -> RecordedRun:
    """What the run's log says. Raises `UserError` while it has no checkpoint, and what the log raises."""
    log = RunLog(target.store, target.run)
    there = sorted(log.listed().seqs)[-_MOST_ENTRIES:]
    with ThreadPoolExecutor(_READERS) as pool:
        slots = pool.map(log.read_slot, there)
        found = recorded_run(slot.entry for slot in slots if isinstance(slot, Sealed))
    if found is None:
        raise UserError(
            f"run {target.run} has no checkpoint yet",
            where=target.store.url,
            remedy="plan without it: --bytes",
        )
    return found


# -- how it looks -----------------------------------------------------------------------------------------------


def _show(
    out: Console,
    wanted: Goal,
    found: Plan,
    assumptions: Sequence[Assumption],
    seen: RecordedRun | None,
    now: Forecast | None,
) -> None:
    first = found.chosen
    out.print(Text("What this plan is made from", style="bold"))
    out.print(
        facts([(each.name, Text.assemble(each.value, (f"  ({each.source})", "dim"))) for each in assumptions])
    )
    out.print()
    out.print(Text(f"{wanted}: save every {duration(first.interval_s)}", style="bold"))
    out.print(facts(_facts(found)))
    if first.overhead > HOPELESS:
        often = f"with a failure in {duration(found.mtbf_s)}"
        hopeless = (
            f"training does not get on: {often}, less than a tenth of the time goes into steps that are kept"
        )
        out.print(Text(hopeless, style="yellow"))
    if first.unreachable:
        out.print(Text(first.unreachable, style="yellow"))
    out.print()
    _show_goals(out, found, now)
    out.print()
    out.print(Text("Overhead against the interval, under full recovery", style="bold"))
    curve = [(each_s, share if share <= HOPELESS else math.inf) for each_s, share in found.curve]
    for line in chart(curve, _marks(found, now), point="*" if not out.is_terminal else "\u00b7"):
        out.print(Text(line))
    names = [("@", f"{wanted} (chosen)"), *((_letter(each), each.name) for each in found.goals[1:])]
    if now is not None:
        names.append(("n", "now"))
    out.print(Text("  ".join(f"{letter} {name}" for letter, name in names), style="dim"))
    if seen is not None:
        out.print()
        out.print(Text(_change(found, seen, now), style="bold"))


def _facts(found: Plan) -> list[tuple[str, str]]:
    first, bits = found.chosen, found.precision
    most = f"at most {found.restores}" if found.restores < LONGEST_COUNT else f"over {LONGEST_COUNT:,}"
    restores = f"{_count(found.expected_restores)} restores expected, with 95 % {most}"
    other = (
        f"{size(found.full_bytes_per_day)} if every save were full, {size(found.consecutive_bytes_per_day)}"
    )
    differential = f"{found.differential}: a baseline, then {first.increments} increments"
    parts = f"saves {_percent(first.save_share)}, the rest lost work and restarts"
    drawn = f"simulated {_drawn(first)}"
    stored = (
        f"{size(found.stored_bytes)} of {size(found.raw_bytes)}, durable after {duration(found.baseline_s)}"
    )
    lost = f"{duration(first.mean_lost_s)} a failure on average, {duration(first.worst_lost_s)} at worst"
    if not first.worst_lost_s:
        lost = f"no step is trained again; {_lost(first)} are lost (PLS)"
    requests = f"{first.puts_per_day:,.0f} PUTs, {first.gets_per_day:,.0f} GETs"
    money = ", ".join(f"{name} {value:,.2f}" for name, value in first.money_per_day.items())
    pairs = [
        ("why", found.why),
        ("bound", first.bound),
        ("bits", f"{found.encoding} ({restores}): {bits.why}"),
        ("differential", differential),
        (
            "bytes a day",
            f"{size(first.bytes_per_day)}; {other} consecutive (a restore then reads all of them)",
        ),
        ("requests a day", requests),
        ("held", size(first.held_bytes)),
        ("recovery", _recovery(found)),
        ("overhead", f"{_percent(first.overhead)} of training ({parts}); {drawn}"),
        ("lost work", lost),
        ("a save", f"costs {duration(found.cost_s)} of training; durable after {duration(first.durable_s)}"),
        ("a baseline", stored),
        ("a restore", f"loads for {duration(found.restore_s)}"),
        ("money a day", money and f"{sum(first.money_per_day.values()):,.2f}: {money}"),
    ]
    return [(name, text) for name, text in pairs if text]


def _recovery(found: Plan) -> str:
    judged = found.recovery
    if judged is None:
        lost = f"{_lost(found.chosen)}"
        return f"full; partial would lose {lost} at this interval (PLS): --pls asks for it"
    return f"{judged.would}: {judged.why}"


def _show_goals(out: Console, found: Plan, now: Forecast | None) -> None:
    forecasts = [*found.goals, *([now] if now is not None else [])]
    money = any(each.money_per_day for each in forecasts)
    rows = [
        (
            "@" if each is found.chosen else "n" if each is now else _letter(each),
            Text(each.name, style="bold" if each is found.chosen else ""),
            duration(each.interval_s),
            _percent(each.overhead),
            _drawn(each),
            duration(each.mean_lost_s),
            duration(each.worst_lost_s),
            size(each.bytes_per_day),
            f"{each.puts_per_day:,.0f}",
            f"{sum(each.money_per_day.values()):,.2f}" if money else "",
            "out of reach" if each.unreachable else each.bound,
        )
        for each in forecasts
    ]
    columns = [
        "mark",
        "goal",
        ">every",
        ">overhead",
        ">simulated",
        ">lost",
        ">at worst",
        ">bytes/day",
        ">PUTs/day",
    ]
    columns += [">money/day", "~bound"]
    show(out, "Goals side by side", columns, rows, droppable=("bound", "simulated", "PUTs/day", "at worst"))


def _marks(found: Plan, now: Forecast | None) -> list[Mark]:
    marks = [Mark(letter="@", interval_s=found.chosen.interval_s, overhead=found.chosen.overhead)]
    marks += [
        Mark(letter=_letter(each), interval_s=each.interval_s, overhead=each.overhead)
        for each in found.goals[1:]
    ]
    if now is not None:
        marks.append(Mark(letter="n", interval_s=now.interval_s, overhead=now.overhead))
    return marks


def _lost(forecast: Forecast) -> str:
    return f"{forecast.pls:.2g} of all samples" if forecast.pls < 1 else "all samples"


def _letter(forecast: Forecast) -> str:
    return forecast.name[0].upper()


def _change(found: Plan, seen: RecordedRun, now: Forecast | None) -> str:
    if now is None:
        return f"{plural(seen.checkpoints, 'checkpoint')} in the log: how often it saves now is not known yet"
    apart = "" if seen.recent_s is None else f"its last saves were {duration(seen.recent_s)} apart"
    said = apart.capitalize()
    if seen.held_s is not None:
        said = f"Its newest commit says: every {duration(seen.held_s)}{apart and f' ({apart})'}"
    said += f", with {seen.encoding or 'no rows'}: "
    said += f"{_percent(now.overhead)}, {size(now.bytes_per_day)} a day. "
    return (
        f"{said}The plan, every {duration(found.chosen.interval_s)} with {found.encoding}: "
        f"{_percent(found.chosen.overhead)}, {size(found.chosen.bytes_per_day)} a day."
    )


def _count(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share <= HOPELESS else f"over {100 * HOPELESS:,.0f} %"


def _drawn(forecast: Forecast) -> str:
    if forecast.simulated > HOPELESS:
        return _percent(forecast.simulated)
    return f"{100 * forecast.simulated:.3g} +- {100 * forecast.simulated_error:.1g} %"
