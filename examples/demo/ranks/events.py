"""The events of the demo of several ranks, and the checks after each of them.

`kill_rank`: SIGKILL one rank. torchrun restarts all of them, and all restore the newest committed step.
`resize`: end all ranks, with or without a signal to save, and start another number of them with other shards.
`lose_rank`: SIGKILL one rank where recovery is partial. torchrun restarts all of them; its rows are restored from
    the newest committed step, the others keep theirs, and training continues where the survivors were.
`kill_sidecar`: SIGKILL the sidecar that the ranks share, in the middle of an upload. Training continues, rank 0
    starts another, and the next checkpoint covers the rows of the lost one.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import shard_checks
from content import Kept
from deltashard_checkpoint.log.entry import Checkpoint
from harness import frozen, until
from job import RankJob
from records import LogWatcher, StepLines, StepRecord
from shard_checks import ShardComparison

T = TypeVar("T")
DEADLINE_S = 420.0
"""Limit without a step or a checkpoint: ranks can wait for one another (`train.PEER_S`) and be restarted once."""
FULL, PARTIAL, NONE = "full", "partial", "none"
"""Modes of recovery: all ranks restore a checkpoint; a lost rank's rows are restored; no rank restores."""


NOT_COMPARED = ShardComparison(step_per_shard={}, ahead=(), wrong=("not compared yet",), rows=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event, and the run's recovery from it."""

    what: str
    mark: str
    mode: str
    at_s: float
    last_step: int
    world_before: int
    world_after: int
    committed_step: int
    """By the store's log, when the next ranks took over; for the kill of the sidecar, at that time."""
    restored_step: int
    """The step from which all ranks continued; without a restore, the step of the next checkpoint."""
    pls: float
    """Portion of lost samples (of CPR), as the ranks reported: 0 where all ranks restored, and where none did."""
    restore_s: float
    """The slowest rank's `restore()`; without a restore, the time to read the next checkpoint."""
    back_s: float
    source: str
    seq: int
    """The checkpoint that all ranks must hold; after a partial recovery only the lost rank."""
    reports: Mapping[int, Mapping[str, Any]]
    kept: Mapping[int, Kept] = field(default_factory=dict)
    """The content of the survivors at the start of a partial recovery, by rank."""
    comparison: ShardComparison = NOT_COMPARED
    """Set at the end by `EventContext.compared`, so that training does not run ahead of the next event meanwhile."""
    violations: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Return whether every shard is bit for bit the newest committed step's, or a survivor's last content."""
        return self.comparison.exact and not self.violations

    @property
    def lost_steps(self) -> int:
        return 0 if self.mode == NONE else max(0, self.last_step - self.restored_step)


@dataclass(slots=True, kw_only=True)
class EventContext:
    """The parts of the run that an event needs."""

    job: RankJob
    watch: LogWatcher
    lines: StepLines
    """Of rank 0."""
    evidence: Path
    url: str
    run: str
    steps_to_lose: int
    attempt: int | None = None
    """The attempt that the current ranks reported; None: they started without a checkpoint."""

    def until(self, what: str, found: Callable[[], T | None], *, poll_s: float = 0.02) -> T:
        """Wait for `found()` to be true; raises `DemoFailed` with the last output of the ranks."""
        return until(
            what,
            found,
            progress=lambda: (self.lines.last, len(self.watch.seen)),
            is_finished=lambda: self.job.finished.is_set() or self.job.failed.is_set(),
            logs=self.job.log_tail,
            poll_s=poll_s,
            deadline_s=DEADLINE_S,
        )

    def ready(self, step: int) -> None:
        """Wait for a step, and for a checkpoint of the current ranks."""
        self.until(f"step {step}", lambda: self.lines.last >= step)
        opened = self.watch.attempts[-1]
        self.until("a checkpoint of these ranks", lambda: (c := self.watch.newest()) and c.seq > opened)

    def wait_past_commit(self) -> None:
        self.until(
            f"{self.steps_to_lose} steps after a checkpoint",
            lambda: (c := self.watch.newest()) and self.lines.last >= c.step + self.steps_to_lose,
        )

    def reports(self, name: str) -> dict[int, dict[str, Any]] | None:
        """Return the files of this name from all ranks of the world, by rank; None while one is missing."""
        paths = {rank: self.evidence / f"rank-{rank}" / f"{name}.json" for rank in range(self.job.world)}
        if not all(path.exists() for path in paths.values()):
            return None
        return {rank: json.loads(path.read_text()) for rank, path in paths.items()}

    def compared(self, event: Event) -> Event:
        """Add the comparison of the ranks' content with the checkpoint of the store."""
        steps = {seen.checkpoint.seq: seen.checkpoint.step for seen in self.watch.seen}
        held = {rank: each["content"] for rank, each in event.reports.items()}
        begun = time.perf_counter()
        comparison = shard_checks.compare(self.url, self.run, event.seq, held, steps, event.kept)
        read_s = time.perf_counter() - begun
        restore_s = read_s if event.mode == NONE else event.restore_s
        return replace(event, comparison=comparison, restore_s=restore_s)


def kill_rank(context: EventContext) -> Event:
    rank = context.job.world - 1
    return _full_recovery(
        context, f"rank {rank} killed", f"kill rank {rank}", lambda: _kill_between_snapshots(context, rank)
    )


def _kill_between_snapshots(context: EventContext, rank: int) -> float:
    """SIGKILL a rank some steps after a snapshot and not right before the next; return the time."""
    lines = StepLines(context.evidence / f"rank-{rank}")

    def between_snapshots() -> bool:
        newest = next((step for step in reversed(lines.read()) if step.snapshot), None)
        return (
            newest is not None
            and context.steps_to_lose <= lines.last - newest.step < 2 * context.steps_to_lose
        )

    while True:
        context.until("steps that no checkpoint has", between_snapshots)
        with frozen(context.job.ranks()[rank]):  # the stopped process's pending work is also stopped
            if between_snapshots():
                return context.job.kill_rank(rank)


def resize(
    context: EventContext, world: int, *, graceful: bool, extra_arguments: Sequence[str] = ()
) -> Event:
    """End all ranks, and start `world` ranks with these additional arguments."""
    how = "ended by SIGTERM" if graceful else "killed"
    if not graceful:
        context.wait_past_commit()
    return _full_recovery(
        context,
        f"{ranks(context.job.world)} {how}, {world} started",
        f"{context.job.world} to {ranks(world)}",
        lambda: context.job.resize(world, graceful=graceful, extra_arguments=extra_arguments),
    )


def ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recovery:
    """The restore by the restarted ranks."""

    at_s: float
    """The time of the event."""
    last: StepRecord
    world_before: int
    world_after: int
    reports: dict[int, dict[str, Any]]
    committed: Checkpoint
    """The newest checkpoint at takeover, by the store's log."""
    first: StepRecord
    """Of the restarted ranks."""

    def event(
        self,
        *,
        what: str,
        mark: str,
        mode: str,
        violations: list[str],
        kept: Mapping[int, Kept] | None = None,
    ) -> Event:
        """Return the recovery as an event; `violations`: further violations."""
        restored, after = self.reports[0]["step"], self.first.step
        violations = violations + [
            f"rank {rank} reports a world of {each['world']}, not {self.world_after}"
            for rank, each in self.reports.items()
            if each["world"] != self.world_after
        ]
        if after != restored + 1:
            violations.append(f"training continued with step {after} after step {restored}")
        return Event(
            what=what,
            mark=mark,
            mode=mode,
            at_s=self.at_s,
            last_step=self.last.step,
            world_before=self.world_before,
            world_after=self.world_after,
            committed_step=self.committed.step,
            restored_step=restored,
            pls=self.reports[0]["pls"],
            restore_s=max(each["seconds"] for each in self.reports.values()),
            back_s=self.first.at_s - self.at_s,
            source="store" if any(each["source"] == "store" for each in self.reports.values()) else "cache",
            seq=self.committed.seq,
            reports=self.reports,
            kept=kept or {},
            violations=tuple(violations),
        )

    def differing(self, wanted: Mapping[str, Any]) -> list[str]:
        return [
            f"rank {rank} reports {name} {each[name]!r}, not {value!r}"
            for rank, each in self.reports.items()
            for name, value in wanted.items()
            if each[name] != value
        ]


def _recover_after(context: EventContext, action: Callable[[], float]) -> _Recovery:
    before, known = context.job.world, set(context.watch.attempts)
    at_s = action()
    last = next(s for s in reversed(context.lines.read()) if s.at_s <= at_s)

    def restored() -> dict[int, dict[str, Any]] | None:
        newer = [attempt for attempt in context.watch.attempts if attempt not in known]
        return context.reports(f"restored-{newer[-1]}") if newer else None

    reports = context.until("the restore reports of all ranks", restored)
    context.attempt = reports[0]["attempt"]
    committed = context.watch.newest(before_seq=context.attempt)
    assert committed is not None
    first = context.until(
        "the first step after the restart",
        lambda: next((s for s in context.lines.read() if s.process > last.process), None),
    )
    return _Recovery(
        at_s=at_s,
        last=last,
        world_before=before,
        world_after=context.job.world,
        reports=reports,
        committed=committed,
        first=first,
    )


def _full_recovery(context: EventContext, what: str, mark: str, action: Callable[[], float]) -> Event:
    back = _recover_after(context, action)
    newest = {"mode": FULL, "step": back.committed.step, "seq": back.committed.seq, "pls": 0.0}
    return back.event(what=what, mark=mark, mode=FULL, violations=back.differing(newest))


def lose_rank(context: EventContext, *, planned_steps: int) -> Event:
    """SIGKILL the last rank of a job whose recovery is partial: the others keep their rows."""
    attempt, lost = context.attempt, context.job.world - 1
    back = _recover_after(context, lambda: _kill_between_snapshots(context, lost))
    last = context.until("the last content of the ranks", lambda: context.reports(f"last-{attempt}"))
    kept = {rank: own for rank, own in last.items() if rank != lost}
    furthest = max(own["step"] for own in kept.values())
    steps = [kept[rank]["step"] if rank in kept else back.committed.step for rank in sorted(last)]
    wanted = {
        "mode": PARTIAL,
        "step": furthest,
        "seq": back.committed.seq,
        "exact": False,
        "rank_steps": steps,
    }
    violations = back.differing(wanted)
    held = {rank: each["content"] for rank, each in back.reports.items()}
    pls = shard_checks.lost_samples(held, kept, back.committed.step, planned_steps)
    violations += [
        f"rank {rank} reports PLS {each['pls']}, but it is {pls}"
        for rank, each in back.reports.items()
        if not math.isclose(each["pls"], pls, rel_tol=1e-9)
    ]
    if pls <= 0:
        violations.append("no samples were lost, so the event tests nothing")
    if back.reports[0]["mode"] != PARTIAL:
        violations.append(context.job.last_line("recovery is full"))
    return back.event(
        what=f"rank {lost} killed, partial recovery",
        mark=f"lose rank {lost}",
        mode=PARTIAL,
        kept=kept,
        violations=violations,
    )


def kill_sidecar(context: EventContext) -> Event:
    alive = context.job.ranks()
    sidecar = context.until("the sidecar", context.job.sidecar)
    while True:
        context.until("an upload to interrupt", context.watch.uploading, poll_s=0.001)
        with frozen(sidecar):
            context.watch.poll()
            if context.watch.uploading() is None:
                continue  # it committed before it was stopped: try the next upload
            last = context.lines.read()[-1]
            before = context.watch.newest()
            assert before is not None
            at_s = time.time()
            os.kill(sidecar, signal.SIGKILL)
        break
    following = context.until(
        "the next checkpoint after the kill of the sidecar",
        lambda: next((s.checkpoint for s in context.watch.seen if s.checkpoint.seq > before.seq), None),
    )
    reports = context.until(
        "the snapshot reports of all ranks",
        lambda: context.reports(f"snapshot-{context.attempt}-{following.step}"),
    )
    violations = []
    if context.lines.read()[-1].process != last.process or (
        context.job.ranks() and alive != context.job.ranks()
    ):
        violations.append("a rank did not survive its sidecar")
    next_step = context.until(
        "a step after the kill of the sidecar",
        lambda: next((s for s in context.lines.read() if s.at_s > at_s), None),
    )
    return Event(
        what="the sidecar of all ranks killed mid-upload",
        mark="kill sidecar",
        mode=NONE,
        at_s=at_s,
        last_step=last.step,
        world_before=context.job.world,
        world_after=context.job.world,
        committed_step=before.step,
        restored_step=following.step,
        pls=0.0,
        restore_s=0.0,
        back_s=next_step.at_s - at_s,
        source="none: training continued",
        seq=following.seq,
        reports=reports,
        violations=tuple(violations),
    )
