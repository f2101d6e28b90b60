"""`make demo`: train on real baskets, kill everything in turn, come back, and show it.

Two trainings of the same script (`train.py`): one that nothing happens to, without deltashard, for comparison; and
one in a pod (`pods.py`) in which the trainer, the sidecar, and then both with their memory and cache are killed
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
from figures import Course
from harness import STORES, VERDICT, DemoFailed, empty_store, table_of
from pods import Pod
from progress import Progress
from records import StepLines, Watch
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
class Played:
    """The run with kills."""

    lines: StepLines
    watch: Watch
    pod: Pod
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started is ended
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = Path(tempfile.mkdtemp(prefix="deltashard-demo-"))
    try:
        with contextlib.ExitStack() as stack:
            url, store = empty_store(args.store, folder, stack)
            console.print(f"[bold]deltashard demo[/] on {store}; working in {folder}")
            console.print(f"1/2 training {args.steps:,} steps, nothing saved, nothing killed ...")
            with Progress(console, folder / "uninterrupted", args.steps):
                reference, uninterrupted = _reference(folder, args.steps)
            console.print(f"    AUC {uninterrupted['auc']:.4f}")
            console.print("2/2 the same with checkpoints and kills ...")
            with Progress(console, folder / "evidence", args.steps):
                played = _play(folder, url, args.steps, stack, console)
        played = _judged(played, reference)
        summary = _summary(played, uninterrupted, args.steps)
        story = _story(played, reference, summary, store, uninterrupted, time.monotonic() - began)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(summary, indent=2) + "\n")
    (args.out / "demo.html").write_text(report.render(story))
    _print(console, summary, args.out, time.monotonic() - began)
    return 0 if all(kill.exact for kill in played.kills) else 1


def _reference(folder: Path, steps: int) -> tuple[StepLines, dict[str, float]]:
    evidence = folder / "uninterrupted"
    subprocess.run(
        [sys.executable, HERE / "train.py", "--plain", "--steps", str(steps), "--evidence", evidence],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return StepLines(evidence), json.loads((evidence / "result.json").read_text())


def _play(folder: Path, url: str, steps: int, stack: contextlib.ExitStack, console: Console) -> Played:
    evidence = folder / "evidence"
    memory = Path(tempfile.mkdtemp(prefix="deltashard-demo-", dir="/dev/shm"))
    sidecar = ["--encoding", ENCODING, "--differential", DIFFERENTIAL, "--every-steps", str(EVERY_STEPS)]
    sidecar += ["--pack-bytes", "8MiB"]
    trainer = ["--steps", str(steps), "--evidence", str(evidence)]
    pod = Pod(folder, memory=memory, url=url, run=RUN, sidecar=sidecar, trainer=trainer)
    stack.callback(pod.close)
    started_s = time.time()
    pod.start()
    watch = Watch(url, RUN)
    stack.callback(watch.close)
    lines = StepLines(evidence)
    scene = kills.Scene(
        pod=pod, watch=watch, lines=lines, evidence=evidence, url=url, run=RUN, encoding=ENCODING
    )
    happened = []
    acts = (
        ("SIGKILL the trainer", lambda: kills.kill_trainer(scene, steps_after_commit=STEPS_TO_LOSE)),
        ("SIGKILL the sidecar in the middle of an upload", lambda: kills.kill_sidecar(scene)),
        (
            "SIGKILL both, wipe shared memory and the local cache",
            lambda: kills.kill_node(scene, steps_after_commit=STEPS_TO_LOSE),
        ),
    )
    for share, (what, act) in zip(KILL_AT, acts, strict=True):
        scene.ready(step=round(steps * share), commits=2)
        kill = act()
        console.print(
            f"    {what}: committed {kill.last_committed_step}, back at {kill.restored_step}; source: {kill.source}"
        )
        happened.append(kill)
    scene.until("the end of training", pod.finished.is_set)
    watch.poll()
    result = json.loads((evidence / "result.json").read_text())
    return Played(lines=lines, watch=watch, pod=pod, kills=happened, result=result, started_s=started_s)


def _judged(played: Played, reference: StepLines) -> Played:
    judged = [kills.judge_batches(kill, played.lines, reference) for kill in played.kills]
    return Played(
        lines=played.lines,
        watch=played.watch,
        pod=played.pod,
        kills=judged,
        result=played.result,
        started_s=played.started_s,
    )


def _summary(played: Played, uninterrupted: dict[str, float], steps: int) -> dict[str, object]:
    seen = played.watch.seen
    full = int(uninterrupted["full_bytes"])
    stored = sum(s.checkpoint.stored_bytes for s in seen)
    held_ms = [s.held_s * 1e3 for s in played.lines.read() if s.cut]
    newest = seen[-1].checkpoint
    return {
        "dataset": baskets.NAME,
        "rows": sum(table.rows for table in newest.tables),
        "steps": steps,
        "checkpoints": len(seen),
        "full_bytes": full * len(seen),
        "stored_bytes": stored,
        "reduction": full * len(seen) / stored,
        "stall_ms": {"p50": float(np.median(held_ms)), "max": max(held_ms)},
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
            for kill in played.kills
        ],
        "quality": {"uninterrupted": uninterrupted["auc"], "with_kills": played.result["auc"]},
    }


def _story(
    played: Played,
    reference: StepLines,
    summary: dict[str, object],
    store: str,
    uninterrupted: dict[str, float],
    took_s: float,
) -> report.Story:
    newest = played.watch.seen[-1].checkpoint
    return report.Story(
        summary=summary,
        store=store,
        encoding=ENCODING,
        policy=DIFFERENTIAL,
        item_count=next(table.rows for table in newest.tables if table.fqn.startswith("items")),
        tables={table.fqn: (table.rows, table.columns) for table in newest.tables},
        course=Course(
            started_s=played.started_s,
            steps=(steps := played.lines.read()),
            reference=reference.read(),
            seen=played.watch.seen,
            marks=report.marks_of(played.kills),
            lives=[f"training process {number + 1}" for number in sorted({s.process for s in steps})],
            full_bytes=int(uninterrupted["full_bytes"]),
        ),
        kills=played.kills,
        took_s=took_s,
    )


def _print(console: Console, summary: dict[str, object], out: Path, took_s: float) -> None:
    table = table_of(
        "What was killed, and what came back",
        {
            "killed": False,
            "came back from": False,
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
        f"({summary['reduction']:.1f} x less)\n"
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
