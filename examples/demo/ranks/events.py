"""What happens to the ranks, and what is checked after each of it.

`kill_rank`: SIGKILL one rank. torchrun starts all of them again, and all come back to the newest committed step.
`resize`: end all ranks, told to or not, and start another number of them, each with other shards of the tables.
`lose_rank`: SIGKILL one rank where recovery is partial. torchrun starts all of them again; its rows come back from the
    newest committed step, the others keep theirs, and training goes on where the survivors were.
`kill_sidecar`: SIGKILL the sidecar that the ranks share, in the middle of an upload. Training goes on, rank 0 starts
    another, and the next checkpoint covers what the lost one would have.
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
from records import Step, StepLines, Watch
from shard_checks import Comparison

T = TypeVar("T")
DEADLINE_S = 420.0
"""Without a step or a checkpoint: ranks may wait for one another in vain (`train.PEER_S`) and be started once more."""
FULL, PARTIAL, NONE = "full", "partial", "none"
"""Modes of recovery: all ranks go back to a checkpoint; a lost rank's rows do; nobody had to."""


NOT_YET = Comparison(step_per_shard={}, ahead=(), wrong=("not compared yet",), rows=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened, and how the run came out of it."""

    what: str
    mark: str
    """The same for figures."""
    mode: str
    at_s: float
    last_step: int
    """The last step that was finished then."""
    world_before: int
    world_after: int
    committed_step: int
    """By the store's log, when the ranks that came after took over; of a sidecar's death, when it died."""
    restored_step: int
    """After which all ranks said they went on; where nobody had to go back, the step of the next checkpoint."""
    pls: float
    """Portion of lost samples (of CPR), as the ranks said: 0 where all went back, and where none had to."""
    restore_s: float
    """The slowest rank's `restore()`; where nobody had to, reading the next checkpoint back."""
    back_s: float
    """From then to the next finished step."""
    source: str
    """Where the rows came from: cache or store."""
    seq: int
    """The checkpoint that all ranks must hold; after a partial recovery the lost one."""
    said: Mapping[int, Mapping[str, Any]]
    """What each rank held, by rank."""
    kept: Mapping[int, Kept] = field(default_factory=dict)
    """What the survivors of a partial recovery held when it began, by rank."""
    comparison: Comparison = NOT_YET
    """Made at the end by `Scene.judged`, so that training does not run ahead of the next event meanwhile."""
    broken: tuple[str, ...] = ()
    """Promises that were not kept, beside the comparison's."""

    @property
    def exact(self) -> bool:
        """Every bit of every shard is of the newest committed step; or, of a survivor, what that one held last."""
        return self.comparison.exact and not self.broken

    @property
    def lost_steps(self) -> int:
        """Steps that are trained once more."""
        return 0 if self.mode == NONE else max(0, self.last_step - self.restored_step)


@dataclass(slots=True, kw_only=True)
class Scene:
    """All that an event needs to know of the run."""

    job: RankJob
    watch: Watch
    lines: StepLines
    """Of rank 0."""
    evidence: Path
    url: str
    run: str
    steps_to_lose: int
    attempt: int | None = None
    """What the ranks that train now said they had opened; None: they began anew."""

    def until(self, what: str, found: Callable[[], T | None], *, poll_s: float = 0.02) -> T:
        """Wait for `found()` to be true; raises `DemoFailed` with what the ranks printed last."""
        return until(
            what,
            found,
            reached=lambda: (self.lines.last, len(self.watch.seen)),
            over=lambda: self.job.finished.is_set() or self.job.failed.is_set(),
            logs=self.job.log_tail,
            poll_s=poll_s,
            deadline_s=DEADLINE_S,
        )

    def ready(self, step: int) -> None:
        """Wait for a step, and for a checkpoint of the ranks that train now."""
        self.until(f"step {step}", lambda: self.lines.last >= step)
        opened = self.watch.attempts[-1]
        self.until("a checkpoint of these ranks", lambda: (c := self.watch.newest()) and c.seq > opened)

    def something_to_lose(self) -> None:
        self.until(
            f"{self.steps_to_lose} steps after a checkpoint",
            lambda: (c := self.watch.newest()) and self.lines.last >= c.step + self.steps_to_lose,
        )

    def said(self, name: str) -> dict[int, dict[str, Any]] | None:
        """What all ranks of the world wrote under this name, by rank; None while one has not."""
        paths = {rank: self.evidence / f"rank-{rank}" / f"{name}.json" for rank in range(self.job.world)}
        if not all(path.exists() for path in paths.values()):
            return None
        return {rank: json.loads(path.read_text()) for rank, path in paths.items()}

    def judged(self, event: Event) -> Event:
        """With what its ranks held compared with the checkpoint of the store."""
        steps = {seen.checkpoint.seq: seen.checkpoint.step for seen in self.watch.seen}
        held = {rank: each["content"] for rank, each in event.said.items()}
        begun = time.perf_counter()
        comparison = shard_checks.compare(self.url, self.run, event.seq, held, steps, event.kept)
        read_s = time.perf_counter() - begun
        restore_s = read_s if event.mode == NONE else event.restore_s
        return replace(event, comparison=comparison, restore_s=restore_s)


def kill_rank(scene: Scene) -> Event:
    rank = scene.job.world - 1
    return _come_back(
        scene, f"rank {rank} killed", f"kill rank {rank}", lambda: _kill_between_snapshots(scene, rank)
    )


def _kill_between_snapshots(scene: Scene, rank: int) -> float:
    """SIGKILL a rank some steps after a cut, and not about to make the next; when."""
    lines = StepLines(scene.evidence / f"rank-{rank}")

    def between_snapshots() -> bool:
        cut = next((step for step in reversed(lines.read()) if step.cut), None)
        return cut is not None and scene.steps_to_lose <= lines.last - cut.step < 2 * scene.steps_to_lose

    while True:
        scene.until("steps that no checkpoint has", between_snapshots)
        with frozen(scene.job.ranks()[rank]):  # what it has done stands still, too
            if between_snapshots():
                return scene.job.kill_rank(rank)


def resize(scene: Scene, world: int, *, gently: bool, told: Sequence[str] = ()) -> Event:
    """End all ranks, and start `world`, with these arguments more."""
    how = "told to end" if gently else "killed"
    if not gently:
        scene.something_to_lose()
    return _come_back(
        scene,
        f"{ranks(scene.job.world)} {how}, {world} started",
        f"{scene.job.world} to {ranks(world)}",
        lambda: scene.job.resize(world, gently=gently, told=told),
    )


def ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Return:
    """How the ranks of the next life came back."""

    at_s: float
    """When the ones before were struck."""
    last: Step
    """The last one that rank 0 had finished then."""
    world_before: int
    world_after: int
    said: dict[int, dict[str, Any]]
    committed: Checkpoint
    """The newest when they took over, by the store's log."""
    first: Step
    """Of the new life."""

    def event(
        self, *, what: str, mark: str, mode: str, broken: list[str], kept: Mapping[int, Kept] | None = None
    ) -> Event:
        """As one; `broken`: what else was not as promised."""
        restored, after = self.said[0]["step"], self.first.step
        broken = broken + [
            f"rank {rank} is one of {each['world']}"
            for rank, each in self.said.items()
            if each["world"] != self.world_after
        ]
        if after != restored + 1:
            broken.append(f"training went on with step {after} after step {restored}")
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
            pls=self.said[0]["pls"],
            restore_s=max(each["seconds"] for each in self.said.values()),
            back_s=self.first.at_s - self.at_s,
            source="store" if any(each["source"] == "store" for each in self.said.values()) else "cache",
            seq=self.committed.seq,
            said=self.said,
            kept=kept or {},
            broken=tuple(broken),
        )

    def differing(self, wanted: Mapping[str, Any]) -> list[str]:
        """Which ranks said otherwise."""
        return [
            f"rank {rank} came back with {name} {each[name]!r}, not {value!r}"
            for rank, each in self.said.items()
            for name, value in wanted.items()
            if each[name] != value
        ]


def _struck(scene: Scene, strike: Callable[[], float]) -> _Return:
    before, known = scene.job.world, set(scene.watch.attempts)
    at_s = strike()
    last = next(s for s in reversed(scene.lines.read()) if s.at_s <= at_s)

    def restored() -> dict[int, dict[str, Any]] | None:
        newer = [attempt for attempt in scene.watch.attempts if attempt not in known]
        return scene.said(f"restored-{newer[-1]}") if newer else None

    said = scene.until("what all ranks restored", restored)
    scene.attempt = said[0]["attempt"]
    committed = scene.watch.newest(before_seq=scene.attempt)
    assert committed is not None
    first = scene.until(
        "the first step after the restart",
        lambda: next((s for s in scene.lines.read() if s.process > last.process), None),
    )
    return _Return(
        at_s=at_s,
        last=last,
        world_before=before,
        world_after=scene.job.world,
        said=said,
        committed=committed,
        first=first,
    )


def _come_back(scene: Scene, what: str, mark: str, strike: Callable[[], float]) -> Event:
    back = _struck(scene, strike)
    newest = {"mode": FULL, "step": back.committed.step, "seq": back.committed.seq, "pls": 0.0}
    return back.event(what=what, mark=mark, mode=FULL, broken=back.differing(newest))


def lose_rank(scene: Scene, *, planned_steps: int) -> Event:
    """SIGKILL the last rank of a job whose recovery is partial: the others keep the rows that they hold."""
    attempt, lost = scene.attempt, scene.job.world - 1
    back = _struck(scene, lambda: _kill_between_snapshots(scene, lost))
    last = scene.until("what the ranks held last", lambda: scene.said(f"last-{attempt}"))
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
    broken = back.differing(wanted)
    held = {rank: each["content"] for rank, each in back.said.items()}
    pls = shard_checks.lost_samples(held, kept, back.committed.step, planned_steps)
    broken += [
        f"rank {rank} says that the run's PLS is {each['pls']}, and it is {pls}"
        for rank, each in back.said.items()
        if not math.isclose(each["pls"], pls, rel_tol=1e-9)
    ]
    if pls <= 0:
        broken.append("no samples were lost, so that nothing is shown")
    if back.said[0]["mode"] != PARTIAL:
        broken.append(scene.job.last_line("recovery is full"))
    return back.event(
        what=f"rank {lost} killed, partial recovery",
        mark=f"lose rank {lost}",
        mode=PARTIAL,
        kept=kept,
        broken=broken,
    )


def kill_sidecar(scene: Scene) -> Event:
    """SIGKILL the ranks' sidecar while it uploads; no rank may stop or restart."""
    alive = scene.job.ranks()
    sidecar = scene.until("the sidecar", scene.job.sidecar)
    while True:
        scene.until("an upload to interrupt", scene.watch.uploading, poll_s=0.001)
        with frozen(sidecar):
            scene.watch.poll()
            if scene.watch.uploading() is None:
                continue  # it committed before it stood still: the next one, then
            last = scene.lines.read()[-1]
            before = scene.watch.newest()
            assert before is not None
            at_s = time.time()
            os.kill(sidecar, signal.SIGKILL)
        break
    following = scene.until(
        "the next checkpoint after the sidecar's death",
        lambda: next((s.checkpoint for s in scene.watch.seen if s.checkpoint.seq > before.seq), None),
    )
    said = scene.until("what was cut for it", lambda: scene.said(f"cut-{scene.attempt}-{following.step}"))
    broken = []
    if scene.lines.read()[-1].process != last.process or (scene.job.ranks() and alive != scene.job.ranks()):
        broken.append("a rank did not survive its sidecar")
    next_step = scene.until(
        "a step after the sidecar's death",
        lambda: next((s for s in scene.lines.read() if s.at_s > at_s), None),
    )
    return Event(
        what="the sidecar of all ranks killed mid-upload",
        mark="kill sidecar",
        mode=NONE,
        at_s=at_s,
        last_step=last.step,
        world_before=scene.job.world,
        world_after=scene.job.world,
        committed_step=before.step,
        restored_step=following.step,
        pls=0.0,
        restore_s=0.0,
        back_s=next_step.at_s - at_s,
        source="none: training went on",
        seq=following.seq,
        said=said,
        broken=tuple(broken),
    )
