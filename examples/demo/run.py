"""`make demo`: trains on real baskets, kills the processes, compares the restored states and draws the result.

The same script (`train.py`) trains twice: once uninterrupted without deltashard, for comparison, and once in a pod
(`pods.py`). There the trainer is killed, then the sidecar, then both together with their memory and cache
(`kills.py`). Writes out/demo.json and out/demo.html and prints a table. The exit status is 0 only if every restored
state was exact.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import baskets
import kills
import numpy as np
import report
from figures import RunHistory
from harness import STORES, VERDICT, DemoFailed, empty_store, make_table
from pods import LocalPod
from progress import ProgressLine
from records import LogWatcher, StepLines
from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

STEPS = 2500
"""Less than one epoch."""
RUN = "baskets"
ENCODING = "q8"
DIFFERENTIAL = "intermittent"
EVERY_STEPS = 150
KILL_AT = (0.25, 0.5, 0.75)
"""Shares of the steps from which on each kill is due."""
STEPS_TO_LOSE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class KillDemoResult:
    """The run with kills."""

    lines: StepLines
    watch: LogWatcher
    pod: LocalPod
    kills: list[kills.Kill]
    result: dict[str, float]
    started_s: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=STORES, default="file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=ROOT / "out")
    parser.add_argument("--keep", action="store_true", help="keep the working folder (store, logs, copies)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end every process that was started
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = Path(tempfile.mkdtemp(prefix="deltashard-demo-"))
    try:
        with contextlib.ExitStack() as stack:
            url, store = empty_store(args.store, folder, stack)
            console.print(f"[bold]deltashard demo[/] on {store}; working in {folder}")
            console.print(f"1/2 training {args.steps:,} steps, without checkpoints and kills ...")
            with ProgressLine(console, folder / "uninterrupted", args.steps):
                reference, uninterrupted = _reference(folder, args.steps)
            console.print(f"    AUC {uninterrupted['auc']:.4f}")
            console.print("2/2 the same with checkpoints and kills ...")
            with ProgressLine(console, folder / "evidence", args.steps):
                outcome = _train_with_kills(folder, url, args.steps, stack, console)
        outcome = _with_checked_batches(outcome, reference)
        summary = _summary(outcome, uninterrupted, args.steps)
        demo_report = _demo_report(
            outcome, reference, summary, store, uninterrupted, time.monotonic() - began
        )
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    (args.out / "demo.html").write_text(report.render(demo_report))
    _print(console, summary, args.out, time.monotonic() - began)
    return 0 if all(kill.exact for kill in outcome.kills) else 1


def _reference(folder: Path, steps: int) -> tuple[StepLines, dict[str, float]]:
    evidence = folder / "uninterrupted"
    subprocess.run(
        [sys.executable, HERE / "train.py", "--plain", "--steps", str(steps), "--evidence", evidence],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return StepLines(evidence), json.loads((evidence / "result.json").read_text())


def _train_with_kills(
    folder: Path, url: str, steps: int, stack: contextlib.ExitStack, console: Console
) -> KillDemoResult:
    evidence = folder / "evidence"
    memory = Path(tempfile.mkdtemp(prefix="deltashard-demo-", dir="/dev/shm"))
    sidecar = ["--encoding", ENCODING, "--differential", DIFFERENTIAL, "--every-steps", str(EVERY_STEPS)]
    sidecar += ["--pack-bytes", "8MiB"]
    trainer = ["--steps", str(steps), "--evidence", str(evidence)]
    pod = LocalPod(folder, memory=memory, url=url, run=RUN, sidecar=sidecar, trainer=trainer)
    stack.callback(pod.close)
    started_s = time.time()
    pod.start()
    watch = LogWatcher(url, RUN)
    stack.callback(watch.close)
    lines = StepLines(evidence)
    context = kills.KillContext(
        pod=pod, watch=watch, lines=lines, evidence=evidence, url=url, run=RUN, encoding=ENCODING
    )
    happened = []
    kill_plan = (
        ("SIGKILL the trainer", lambda: kills.kill_trainer(context, steps_after_commit=STEPS_TO_LOSE)),
        ("SIGKILL the sidecar in the middle of an upload", lambda: kills.kill_sidecar(context)),
        (
            "SIGKILL both, wipe shared memory and the local cache",
            lambda: kills.kill_node(context, steps_after_commit=STEPS_TO_LOSE),
        ),
    )
    for share, (what, action) in zip(KILL_AT, kill_plan, strict=True):
        context.ready(step=round(steps * share), commits=2)
        kill = action()
        console.print(
            f"    {what}: committed {kill.last_committed_step}, restored {kill.restored_step}; source: {kill.source}"
        )
        happened.append(kill)
    context.until("the end of training", pod.finished.is_set)
    watch.poll()
    result = json.loads((evidence / "result.json").read_text())
    return KillDemoResult(
        lines=lines, watch=watch, pod=pod, kills=happened, result=result, started_s=started_s
    )


def _with_checked_batches(outcome: KillDemoResult, reference: StepLines) -> KillDemoResult:
    checked = [kills.check_batches(kill, outcome.lines, reference) for kill in outcome.kills]
    return KillDemoResult(
        lines=outcome.lines,
        watch=outcome.watch,
        pod=outcome.pod,
        kills=checked,
        result=outcome.result,
        started_s=outcome.started_s,
    )


def _summary(outcome: KillDemoResult, uninterrupted: dict[str, float], steps: int) -> dict[str, object]:
    seen = outcome.watch.seen
    full = int(uninterrupted["full_bytes"])
    stored = sum(s.checkpoint.stored_bytes for s in seen)
    stalls_ms = [s.stall_s * 1e3 for s in outcome.lines.read() if s.snapshot]
    newest = seen[-1].checkpoint
    return {
        "dataset": baskets.NAME,
        "rows": sum(table.rows for table in newest.tables),
        "steps": steps,
        "checkpoints": len(seen),
        "full_bytes": full * len(seen),
        "stored_bytes": stored,
        "reduction": full * len(seen) / stored,
        "stall_ms": {"p50": float(np.median(stalls_ms)), "max": max(stalls_ms)},
        "kills": [
            {
                "what": kill.what,
                "source": kill.source,
                "last_committed_step": kill.last_committed_step,
                "restored_step": kill.restored_step,
                "lost_steps": kill.lost_steps,
                "restore_s": kill.restore_s,
                "exact": kill.exact,
            }
            for kill in outcome.kills
        ],
        "quality": {"uninterrupted": uninterrupted["auc"], "with_kills": outcome.result["auc"]},
    }


def _demo_report(
    outcome: KillDemoResult,
    reference: StepLines,
    summary: dict[str, object],
    store: str,
    uninterrupted: dict[str, float],
    took_s: float,
) -> report.DemoReport:
    newest = outcome.watch.seen[-1].checkpoint
    return report.DemoReport(
        summary=summary,
        store=store,
        encoding=ENCODING,
        policy=DIFFERENTIAL,
        item_count=next(table.rows for table in newest.tables if table.fqn.startswith("items")),
        tables={table.fqn: (table.rows, table.columns) for table in newest.tables},
        history=RunHistory(
            started_s=outcome.started_s,
            steps=(steps := outcome.lines.read()),
            reference=reference.read(),
            seen=outcome.watch.seen,
            marks=report.marks_of(outcome.kills),
            processes=[f"training process {number + 1}" for number in sorted({s.process for s in steps})],
            full_bytes=int(uninterrupted["full_bytes"]),
        ),
        kills=outcome.kills,
        took_s=took_s,
    )


def _print(console: Console, summary: dict[str, object], out: Path, took_s: float) -> None:
    table = make_table(
        "Kills and restored states",
        {
            "killed": False,
            "restored from": False,
            "committed step": True,
            "restored step": True,
            "lost steps": True,
            "restore s": True,
            "exact": False,
        },
        [
            (
                kill["what"],
                kill["source"],
                f"{kill['last_committed_step']:,}",
                f"{kill['restored_step']:,}",
                f"{kill['lost_steps']:,}",
                f"{kill['restore_s']:.2f}",
                VERDICT[kill["exact"]],
            )
            for kill in summary["kills"]  # type: ignore[attr-defined]
        ],
    )
    console.print(table)
    quality, stall = summary["quality"], summary["stall_ms"]
    console.print(
        f"{summary['checkpoints']} checkpoints of {summary['rows']:,} rows in {summary['steps']:,} steps: "
        f"{summary['stored_bytes'] / 1e6:.0f} MB stored, {summary['full_bytes'] / 1e6:.0f} MB in full "  # type: ignore[operator]
        f"({summary['reduction']:.1f} times as much)\n"
        f"stall per checkpoint: median {stall['p50']:.0f} ms, longest {stall['max']:.0f} ms\n"  # type: ignore[index]
        f"AUC on held-out baskets: {quality['uninterrupted']:.4f} uninterrupted, "  # type: ignore[index]
        f"{quality['with_kills']:.4f} with kills\n"  # type: ignore[index]
        f"{out / 'demo.html'}   {out / 'demo.json'}   ({took_s:.0f} s)"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoFailed as failure:
        sys.exit(f"the demo failed: {failure}")
