"""The three kills of the demo, and the checks after each of them.

`trainer`: SIGKILL the training process; its restart restores from the sidecar's local cache.
`sidecar`: SIGKILL the sidecar while a checkpoint is half uploaded; training continues, and the next checkpoint covers
    the rows of the lost one.
`node`: SIGKILL both, wipe shared memory and local cache; the restart has only the store.

An upload is "half uploaded" when the store holds objects of a snapshot that the log does not have. To check, the
sidecar is stopped (SIGSTOP). It is killed if this is so, and continued if the commit came first.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import checks
import numpy as np
from deltashard_checkpoint.format import typed_tree
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from harness import DemoFailed, until
from pods import LocalPod
from records import LogWatcher, StepLines

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill and the run's recovery from it."""

    what: str
    source: str
    at_s: float
    last_step: int
    """The last step the training process had finished at that moment."""
    last_committed_step: int
    """Newest checkpoint by the store's log."""
    restored_step: int
    lost_steps: int
    restore_s: float
    back_s: float
    comparison: checks.CopyComparison
    same_batches: bool
    """The steps trained from the restored state on had the batches of the uninterrupted run."""
    process: int
    """The number of the training process that continued."""

    @property
    def exact(self) -> bool:
        return self.comparison.exact and self.same_batches


@dataclass(slots=True, kw_only=True)
class KillContext:
    """The parts of the run that a kill needs."""

    pod: LocalPod
    watch: LogWatcher
    lines: StepLines
    evidence: Path
    url: str
    run: str
    encoding: str

    def until(self, what: str, found: Callable[[], T | None], *, poll_s: float = 0.02) -> T:
        """Wait for `found()` to be true; raises `DemoFailed` with the containers' last lines."""
        return until(
            what,
            found,
            progress=lambda: (self.lines.last, len(self.watch.seen)),
            is_finished=self.pod.finished.is_set,
            logs=lambda: "\n".join(
                f"--- {name}\n{self.pod.log_tail(name)}" for name in ("trainer", "sidecar")
            ),
            poll_s=poll_s,
        )

    def ready(self, *, step: int, commits: int) -> None:
        """Wait for a step, and for this many checkpoints since the newest process took over."""
        self.until(f"step {step}", lambda: self.lines.last >= step)
        opened = self.watch.attempts[-1]
        self.until(
            f"{commits} checkpoints",
            lambda: sum(s.checkpoint.seq > opened for s in self.watch.seen) >= commits,
        )

    def keep(self, name: str) -> Path:
        self.until(f"the copy {name}", (self.evidence / name).is_dir)  # a commit can be faster than the copy
        kept = self.evidence / f"kept-{name}"
        shutil.copytree(self.evidence / name, kept, copy_function=os.link)
        return kept

    def compare(self, snapshot_step: int, restored: dict[str, np.ndarray]) -> checks.CopyComparison:
        snapshot = self.keep(f"snapshot-{snapshot_step}")
        try:
            return checks.compare(snapshot, restored, encoding=self.encoding)
        finally:
            shutil.rmtree(snapshot)


def kill_trainer(context: KillContext, *, steps_after_commit: int) -> Kill:
    """SIGKILL the trainer some steps after a checkpoint, so that it loses steps."""
    _wait_past_commit(context, steps_after_commit)
    return _restart(context, "trainer", lambda: context.pod.kill("trainer"))


def kill_node(context: KillContext, *, steps_after_commit: int) -> Kill:
    """SIGKILL both, wipe memory and cache."""
    _wait_past_commit(context, steps_after_commit)
    return _restart(context, "both, memory and cache wiped", context.pod.kill_all_and_wipe)


def kill_sidecar(context: KillContext) -> Kill:
    """SIGKILL the sidecar while it uploads; the trainer must neither stop nor restart."""
    trainer = context.pod.pid("trainer")
    process = context.lines.read()[-1].process
    while True:
        context.until("an upload to interrupt", context.watch.uploading, poll_s=0.001)
        with context.pod.frozen("sidecar"):
            context.watch.poll()
            if context.watch.uploading() is None:
                continue  # it committed before it was stopped: try the next upload
            last_step = context.lines.last
            before = context.watch.newest()
            assert before is not None
            at_s = context.pod.kill("sidecar")
        break
    following = context.until(
        "the next checkpoint after the kill of the sidecar",
        lambda: next((s.checkpoint for s in context.watch.seen if s.checkpoint.seq > before.seq), None),
    )
    snapshot = context.keep(f"snapshot-{following.step}")
    begun = time.perf_counter()
    restored = _read_from_store(context, following.seq)
    restore_s = time.perf_counter() - begun
    if context.pod.pid("trainer") != trainer:
        raise DemoFailed(f"the trainer did not survive its sidecar\n{context.pod.log_tail('trainer')}")
    comparison = checks.compare(snapshot, restored, encoding=context.encoding)
    shutil.rmtree(snapshot)
    next_step = next(s for s in context.lines.read() if s.at_s > at_s and s.process == process)
    return Kill(
        what="sidecar mid-upload",
        source="none: training continued",
        at_s=at_s,
        last_step=last_step,
        last_committed_step=before.step,
        restored_step=following.step,
        lost_steps=0,
        restore_s=restore_s,
        back_s=next_step.at_s - at_s,
        comparison=comparison,
        same_batches=False,  # checked at the end
        process=process,
    )


def check_batches(kill: Kill, lines: StepLines, reference: StepLines) -> Kill:
    """Fill in `same_batches` after both runs have ended."""
    expected = {s.step: s.crc for s in reference.read()}
    seen = [s for s in lines.read() if s.process == kill.process and s.at_s > kill.at_s]
    return replace(kill, same_batches=bool(seen) and all(expected.get(s.step) == s.crc for s in seen))


def _wait_past_commit(context: KillContext, steps: int) -> None:
    def past() -> bool:
        newest = context.watch.newest()
        return (
            newest is not None
            and context.lines.last >= newest.step + steps
            and context.watch.uploading() is None
        )

    context.until(f"{steps} steps after a checkpoint", past)


def _restart(context: KillContext, what: str, kill: Callable[[], float]) -> Kill:
    known = set(context.evidence.glob("restored-*.json"))
    attempts = set(context.watch.attempts)
    at_s = kill()
    last = context.lines.read()[-1]
    report_path = context.until(
        "the restored state", lambda: next(iter(set(context.evidence.glob("restored-*.json")) - known), None)
    )
    report = json.loads(report_path.read_text())
    opened = context.until(
        "the new attempt", lambda: next(iter(set(context.watch.attempts) - attempts), None)
    )
    committed = context.watch.newest(before_seq=opened)
    assert committed is not None
    comparison = context.compare(report["step"], checks.load_copy(context.evidence / report["dump"]))
    first = context.until(
        "the first step after the restart",
        lambda: next((s for s in context.lines.read() if s.process > last.process), None),
    )
    shutil.rmtree(context.evidence / report["dump"])
    return Kill(
        what=what,
        source=report["source"],
        at_s=at_s,
        last_step=last.step,
        last_committed_step=committed.step,
        restored_step=report["step"],
        lost_steps=last.step - report["step"],
        restore_s=report["seconds"],
        back_s=first.at_s - at_s,
        comparison=comparison,
        same_batches=False,  # checked at the end
        process=first.process,
    )


def _read_from_store(context: KillContext, seq: int) -> dict[str, np.ndarray]:
    """Read the checkpoint from the store alone, in this third process."""
    state = RunLog(context.watch.store, context.run).refresh()
    checkpoint = OpenCheckpoint.of(context.watch.store, state, state.checkpoints[seq])
    found: dict[str, np.ndarray] = {}
    for table in checkpoint.tables():
        found[table.schema.fqn] = table.weights
        for name, values in table.fields.items():
            found[f"{table.schema.fqn}:{name}"] = values
    for name, data in checkpoint.blobs().items():
        kind, _, rest = name.partition("/")
        if kind == "dense":
            found[rest] = _array(typed_tree.decode(data))
        elif kind == "optim":
            for fqn, entries in typed_tree.decode(data)["state"].items():
                found |= {f"{fqn}:{key}": _array(value) for key, value in entries.items()}
    return found


def _array(value: object) -> np.ndarray:
    if isinstance(value, typed_tree.Tagged):
        value = value.value
    if isinstance(value, typed_tree.Tensor):
        return np.frombuffer(value.data, value.dtype).reshape(value.shape)
    return np.asarray(value)
