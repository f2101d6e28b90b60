"""`make demo RANKS=4`: trains on several ranks, kills ranks and the sidecar, resizes the world and draws the result.

The same script (`train.py`) trains real baskets twice under torchrun: once uninterrupted without deltashard, for
comparison, and once as a Job (`job.py`) with the events of `event_schedule`, one after the other. Writes
out/demo-ranks.json and out/demo-ranks.html and prints a table. The exit status is 0 only if after every event all ranks
held, bit for bit, the newest checkpoint of the store, and continued from it (`RankDemoResult.violations`). Recovery
from the last event is partial: the lost rank's rows are those of that checkpoint, and the survivors keep theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import baskets
import deltashard
import events
import numpy as np
import ranks_report
from deltashard_checkpoint.vocabulary import PLS_KEY
from events import PARTIAL, Event, EventContext
from figures import EventMark, RunHistory
from harness import STORES, VERDICT, DemoFailed, empty_store, make_table
from job import RankJob, start_torchrun
from progress import ProgressLine
from records import LogWatcher, StepLines, StepRecord
from rich.console import Console
from shares import BATCH_SIZE

ROOT = Path(__file__).resolve().parents[3]
STEPS = 600
RUN = "baskets"
SAVES = 20
"""Number of checkpoints at even distances ..."""
LEAST_STEPS = 20
"""... with at least this many steps between them."""
STEPS_TO_LOSE = 10
PLS_TARGET = 0.1
"""Share of samples that partial recoveries may lose, from the last resize on."""
REFERENCE_TIMEOUT_S = 600.0
MAX_AUC_DIFFERENCE = 0.01
"""Allowed difference of the AUC. Other numbers of ranks draw other dropout; the losses show that the rest is equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """An event of the list."""

    share: float
    """The share of the steps from which on it is due."""
    action: Callable[[EventContext], Event]


def event_schedule(ranks: int, steps: int) -> tuple[ScheduledEvent, ...]:
    fewer = ranks // 2
    partial = ("--pls-target", str(PLS_TARGET))
    return (
        ScheduledEvent(share=0.1, action=events.kill_rank),
        # An upload is short, and several may pass before one is interrupted: early, and where steps take longest.
        ScheduledEvent(share=0.2, action=events.kill_sidecar),
        ScheduledEvent(share=0.4, action=lambda context: events.resize(context, fewer, graceful=True)),
        ScheduledEvent(
            share=0.55,
            action=lambda context: events.resize(context, fewer + 1, graceful=False, extra_arguments=partial),
        ),
        ScheduledEvent(share=0.7, action=lambda context: events.lose_rank(context, planned_steps=steps)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDemoResult:
    """The run with events, and the violations of guarantees."""

    events: list[Event]
    history: RunHistory
    rows: int
    auc: float
    violations: list[str]


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end every process that was started
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = Path(tempfile.mkdtemp(prefix="deltashard-demo-ranks-"))
    try:
        with contextlib.ExitStack() as stack:
            url, store = empty_store(args.store, folder, stack)
            console.print(f"[bold]deltashard demo, {args.ranks} ranks[/] on {store}; working in {folder}")
            console.print(f"1/2 training {args.steps:,} steps, without checkpoints and events ...")
            with ProgressLine(console, folder / "uninterrupted" / "rank-0", args.steps):
                reference, uninterrupted = _reference(folder, args.ranks, args.steps)
            console.print(f"    AUC {uninterrupted:.4f}")
            console.print("2/2 the same with checkpoints and events ...")
            with ProgressLine(console, folder / "evidence" / "rank-0", args.steps):
                outcome = _train_with_events(folder, url, args, reference, stack, console)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if abs(outcome.auc - uninterrupted) > MAX_AUC_DIFFERENCE:
        outcome.violations.append(f"the AUC is {outcome.auc:.4f}, uninterrupted {uninterrupted:.4f}")
    summary = _summary(outcome, uninterrupted, args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo-ranks.json").write_text(json.dumps(summary, indent=2) + "\n")
    took_s = time.monotonic() - began
    page = ranks_report.render(
        ranks_report.RankReport(
            summary=summary,
            store=store,
            history=outcome.history,
            events=outcome.events,
            violations=outcome.violations,
            took_s=took_s,
        )
    )
    (args.out / "demo-ranks.html").write_text(page)
    _print(console, outcome, summary, args.out, took_s)
    return 1 if outcome.violations else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--store", choices=STORES, default="file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    parser.add_argument("--keep", action="store_true", help="keep the working folder (store, logs, records)")
    args = parser.parse_args()
    worlds = (args.ranks, args.ranks // 2, args.ranks // 2 + 1)
    if args.ranks < 2 or any(BATCH_SIZE % world for world in worlds):
        parser.error(
            f"--ranks {args.ranks}: the worlds {', '.join(map(str, worlds))} do not share a batch of {BATCH_SIZE} "
            "evenly; 2, 3, 4, 5, 6, 8 and 10 do"
        )
    return args


def _reference(folder: Path, ranks: int, steps: int) -> tuple[StepLines, float]:
    evidence = folder / "uninterrupted"
    evidence.mkdir()
    log = evidence / "torchrun.log"
    process = start_torchrun(ranks, ["--plain", "--steps", str(steps), "--evidence", str(evidence)], log, {})
    try:
        code = process.wait(REFERENCE_TIMEOUT_S)
    finally:
        process.terminate()  # it ends its ranks
        process.wait()
    if code:
        raise DemoFailed(f"the uninterrupted training ended with {code}\n{log.read_text()[-4000:]}")
    return StepLines(evidence / "rank-0"), _result(evidence)


def _result(evidence: Path) -> float:
    return float(json.loads((evidence / "rank-0" / "result.json").read_text())["auc"])


def _train_with_events(
    folder: Path,
    url: str,
    args: argparse.Namespace,
    reference: StepLines,
    stack: contextlib.ExitStack,
    console: Console,
) -> RankDemoResult:
    evidence = folder / "evidence"
    every = max(LEAST_STEPS, args.steps // SAVES)
    extra_arguments = ["--steps", str(args.steps), "--every-steps", str(every), "--evidence", str(evidence)]
    job = RankJob(folder, url=url, run=RUN, arguments=extra_arguments)
    stack.callback(job.close)
    started_s = time.time()
    job.start(args.ranks)
    watch = LogWatcher(url, RUN)
    stack.callback(watch.close)
    lines = StepLines(evidence / "rank-0")
    context = EventContext(
        job=job,
        watch=watch,
        lines=lines,
        evidence=evidence,
        url=url,
        run=RUN,
        steps_to_lose=min(STEPS_TO_LOSE, every // 2),
    )
    happened: list[Event] = []
    for scheduled in event_schedule(args.ranks, args.steps):
        context.ready(round(args.steps * scheduled.share))
        event = scheduled.action(context)
        console.print(f"    {event.what}: committed {event.committed_step}, restored {event.restored_step}")
        happened.append(event)
    context.until("the end of training", job.finished.is_set)
    watch.poll()
    happened = [context.compared(event) for event in happened]
    newest = watch.seen[-1].checkpoint
    steps = lines.read()
    violations = _violations(happened, steps, reference) + _late_first_snapshots(steps, every)
    message, pls = float(newest.metadata.get(PLS_KEY, 0)), max(event.pls for event in happened)
    if not math.isclose(message, pls, rel_tol=1e-6):
        violations.append(
            f"the newest checkpoint has PLS {message} in its metadata, but the run's PLS is {pls}"
        )
    if newest.step != args.steps:
        violations.append(
            f"training ended at step {args.steps}, but the newest checkpoint is of step {newest.step}"
        )
    with deltashard.open_checkpoint(url, RUN) as checkpoint:
        dense = sum(each.nbytes for each in checkpoint.dense.values())
        rows = sum(table.rows for table in checkpoint.tables.values())
        full = sum(4 * table.rows * (table.columns + 1) for table in checkpoint.tables.values()) + 3 * dense
    history = RunHistory(
        started_s=started_s,
        steps=steps,
        reference=reference.read(),
        seen=watch.seen,
        marks=[EventMark(text=e.mark, at_s=e.at_s, last_step=e.last_step) for e in happened],
        processes=_process_names(happened, steps, args.ranks),
        full_bytes=full,
    )
    return RankDemoResult(
        events=happened, history=history, rows=rows, auc=_result(evidence), violations=violations
    )


def _world_at(happened: list[Event], at_s: float, first: int) -> int:
    return next((event.world_after for event in reversed(happened) if event.at_s < at_s), first)


def _process_names(happened: list[Event], steps: list[StepRecord], ranks: int) -> list[str]:
    begun = {step.process: step.at_s for step in reversed(steps)}
    worlds = [_world_at(happened, begun[process], ranks) for process in sorted(begun)]
    return [
        f"{events.ranks(world)}{' again' if world in worlds[:number] else ''}"
        for number, world in enumerate(worlds)
    ]


def _violations(happened: list[Event], steps: list[StepRecord], reference: StepLines) -> list[str]:
    violations = [
        f"{event.what}: {message}"
        for event in happened
        for message in (*event.violations, *event.comparison.wrong)
    ]
    expected = {s.step: s for s in reference.read()}
    other = sorted({s.step for s in steps if expected[s.step].crc != s.crc})
    if other:
        violations.append(f"steps {other[:10]} saw other batches than the uninterrupted run")
    world = happened[0].world_before
    resized_s = min(event.at_s for event in happened if event.world_after != world)
    differ = sorted({s.step for s in steps if s.at_s < resized_s and expected[s.step].loss != s.loss})
    if differ:
        violations.append(
            f"the losses of steps {differ[:10]} on {events.ranks(world)} differ from those of the uninterrupted run"
        )
    # Ranks that get SIGTERM exit within the call that saves their last step, and write no line of it.
    missing = expected.keys() - {s.step for s in steps} - {event.committed_step for event in happened}
    # These lines are rank 0's; another survivor can be one step further, and all continue after that step.
    missing -= {event.restored_step for event in happened if event.mode == PARTIAL}
    if missing:
        violations.append(f"steps {sorted(missing)[:10]} were never trained")
    return violations


def _late_first_snapshots(steps: list[StepRecord], every: int) -> list[str]:
    """Return the processes whose first snapshot was late: a restore must not delay the first snapshot."""
    processes: dict[int, list[StepRecord]] = {}
    for step in steps:
        processes.setdefault(step.process, []).append(step)
    late = []
    for lines in processes.values():
        until = next((step for step in lines if step.snapshot), lines[-1]).step
        if until - lines[0].step >= 2 * every:
            late.append(
                f"no snapshot between step {lines[0].step} and {until}, where one is due every {every} steps"
            )
    return late


def _summary(outcome: RankDemoResult, uninterrupted: float, args: argparse.Namespace) -> dict[str, object]:
    seen = outcome.history.seen
    stalls_ms = [s.stall_s * 1e3 for s in outcome.history.steps if s.snapshot]
    return {
        "dataset": baskets.NAME,
        "ranks": args.ranks,
        "rows": outcome.rows,
        "steps": args.steps,
        "checkpoints": len(seen),
        "full_bytes": outcome.history.full_bytes * len(seen),
        "stored_bytes": sum(s.checkpoint.stored_bytes for s in seen),
        "stall_ms": {"p50": float(np.median(stalls_ms)), "max": max(stalls_ms)},
        "events": [
            {
                "what": event.what,
                "world_before": event.world_before,
                "world_after": event.world_after,
                "mode": event.mode,
                "committed_step": event.committed_step,
                "restored_step_per_shard": event.comparison.step_per_shard,
                "ahead": event.comparison.ahead,
                "pls": event.pls,
                "lost_steps": event.lost_steps,
                "restore_s": event.restore_s,
                "back_s": event.back_s,
                "exact": event.exact,
            }
            for event in outcome.events
        ],
        "quality": {"uninterrupted": uninterrupted, "with_events": outcome.auc},
        "violations": outcome.violations,
    }


def _print(
    console: Console, outcome: RankDemoResult, summary: dict[str, object], out: Path, took_s: float
) -> None:
    table = make_table(
        "Events and restored states",
        {
            "event": False,
            "ranks": True,
            "recovery": False,
            "committed step": True,
            "restored step": True,
            "repeated steps": True,
            "PLS": True,
            "restore s": True,
            "exact": False,
        },
        [
            (
                event.what,
                f"{event.world_before} -> {event.world_after}",
                event.mode,
                f"{event.committed_step:,}",
                f"{event.restored_step:,}",
                f"{event.lost_steps:,}",
                f"{event.pls:.4f}" if event.mode == PARTIAL else "-",
                f"{event.restore_s:.2f}",
                VERDICT[event.exact],
            )
            for event in outcome.events
        ],
    )
    console.print(table)
    quality = summary["quality"]
    console.print(
        f"{summary['checkpoints']} checkpoints of {outcome.rows:,} rows in {summary['steps']:,} steps: "
        f"{summary['stored_bytes'] / 1e6:.0f} MB stored, {summary['full_bytes'] / 1e6:.0f} MB in full\n"  # type: ignore[operator]
        f"AUC on held-out baskets: {quality['uninterrupted']:.4f} uninterrupted, "  # type: ignore[index]
        f"{quality['with_events']:.4f} with events\n"  # type: ignore[index]
        f"{out / 'demo-ranks.html'}   {out / 'demo-ranks.json'}   ({took_s:.0f} s)"
    )
    for message in outcome.violations:
        console.print(f"[bold red]violated:[/] {message}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoFailed as failure:
        sys.exit(f"the demo failed: {failure}")
