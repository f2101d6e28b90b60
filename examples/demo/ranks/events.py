"""What happens to the ranks, and what is checked after each of it.

`kill_rank`: SIGKILL one rank. torchrun starts all of them again, and all come back to the newest committed step.
`resize`: end all ranks, told to or not, and start another number of them, each with other shards of the tables.
`kill_sidecar`: SIGKILL the sidecar that the ranks share, in the middle of an upload. Training goes on, rank 0 starts
    another, and the next checkpoint covers what the lost one would have.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import shard_checks
from harness import frozen, until
from job import RankJob
from records import StepLines, Watch
from shard_checks import Comparison

T = TypeVar("T")
DEADLINE_S = 420.0
"""Without a step or a checkpoint: ranks may wait for one another in vain (`train.PEER_S`) and be started once more."""
FULL, NONE = "full", "none"
"""Modes of recovery: all ranks go back to a checkpoint; nobody had to."""


NOT_YET = Comparison(step_per_shard={}, wrong=("not compared yet",), rows=0)


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
    """What all ranks said they came back to; where nobody had to, the step of the next checkpoint."""
    pls: float
    """Portion of lost samples (of CPR): 0 where all ranks went back, and where none had to."""
    restore_s: float
    """The slowest rank's `restore()`; where nobody had to, reading the next checkpoint back."""
    back_s: float
    """From then to the next finished step."""
    source: str
    """Where the rows came from: cache or store."""
    seq: int
    """The checkpoint that all ranks must hold."""
    said: Mapping[int, Mapping[str, Any]]
    """What each rank held, by rank."""
    comparison: Comparison = NOT_YET
    """Made at the end by `Scene.judged`, so that training does not run ahead of the next event meanwhile."""
    broken: tuple[str, ...] = ()
    """Promises that were not kept, beside the comparison's."""

    @property
    def exact(self) -> bool:
        """Every bit of every shard, all of one step, the newest committed."""
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
        """Wait for some steps after a checkpoint."""
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
        comparison = shard_checks.compare(self.url, self.run, event.seq, held, steps)
        read_s = time.perf_counter() - begun
        restore_s = read_s if event.mode == NONE else event.restore_s
        return replace(event, comparison=comparison, restore_s=restore_s)


def kill_rank(scene: Scene) -> Event:
    """SIGKILL the last rank."""
    rank = scene.job.world - 1
    scene.something_to_lose()
    return _come_back(scene, f"rank {rank} killed", f"kill rank {rank}", lambda: scene.job.kill_rank(rank))


def resize(scene: Scene, world: int, *, gently: bool) -> Event:
    """End all ranks, and start `world`."""
    how = "told to end" if gently else "killed"
    if not gently:
        scene.something_to_lose()
    return _come_back(
        scene,
        f"{ranks(scene.job.world)} {how}, {world} started",
        f"{scene.job.world} to {ranks(world)}",
        lambda: scene.job.resize(world, gently=gently),
    )


def ranks(count: int) -> str:
    """So many, in words."""
    return f"{count} rank{'' if count == 1 else 's'}"


def _come_back(scene: Scene, what: str, mark: str, strike: Callable[[], float]) -> Event:
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
    broken = [
        f"rank {rank} came back to step {each['step']} (seq {each['seq']}); the newest committed is step "
        f"{committed.step} (seq {committed.seq})"
        for rank, each in said.items()
        if (each["step"], each["seq"]) != (committed.step, committed.seq)
    ]
    broken += [
        f"rank {rank} is one of {each['world']}"
        for rank, each in said.items()
        if each["world"] != scene.job.world
    ]
    if first.step != committed.step + 1:
        broken.append(f"training went on with step {first.step} after step {committed.step}")
    return Event(
        what=what,
        mark=mark,
        mode=FULL,
        at_s=at_s,
        last_step=last.step,
        world_before=before,
        world_after=scene.job.world,
        committed_step=committed.step,
        restored_step=said[0]["step"],
        pls=0.0,
        restore_s=max(each["seconds"] for each in said.values()),
        back_s=first.at_s - at_s,
        source="store" if any(each["source"] == "store" for each in said.values()) else "cache",
        seq=committed.seq,
        said=said,
        broken=tuple(broken),
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
