"""A model of a run in which every operation may fail, with a reference that checks the invariants.

The code under test is the real one, over the real faulty store. Every process is a greenlet that stops before each
store call; a seeded scheduler decides which process continues, which is killed there, which becomes a zombie, and
when time passes. So a schedule is one number, and repeats exactly. Data objects are light stand-ins (JSON: cell ->
value; a pack and an index per part). A cell is one (row, column) of one table; its value is the number of the write,
so no two are equal.

Invariants (`LogWorld.check`): the log is dense, its entries never change, none breaks a rule; zombies never commit;
every live checkpoint restores exactly what was in the model at its snapshot; an acknowledged commit is in the log; the
newest checkpoint, or that of a rewind, and pinned checkpoints are never retired; an attempt resumes from the newest
valid checkpoint, and loads exactly that. At the end a new trainer opens, restores, trains, saves; a last maintenance
round leaves no unneeded object, and no record of deleted ones (`LogWorld.finish`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import greenlet
from deltashard_checkpoint.backoff import Clocks
from deltashard_checkpoint.errors import CorruptObject, DeltashardError, InvalidCheckpoint
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import (
    compaction_index_key,
    compaction_pack_key,
    index_key,
    pack_key,
)
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.log import chain as lineages
from deltashard_checkpoint.log import commit_log
from deltashard_checkpoint.log.entry import (
    AttemptOpened,
    Checkpoint,
    Part,
    Pinned,
    Reclaimed,
    Retired,
    Rewound,
    Sealed,
    entry_key,
    seq_of,
    snapshot_of,
)
from deltashard_checkpoint.log.entry_codec import parse
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.replay import is_protected, is_uncommittable
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance import compaction, garbage_collection, user_entry
from deltashard_checkpoint.maintenance import retention as retentions
from deltashard_checkpoint.stores import probe
from deltashard_checkpoint.stores.abc import ObjectExists, ObjectInfo, ObjectNotFound, Store, StoreUnavailable
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.write import attempt as attempts
from deltashard_checkpoint.write.commit import commit_parts
from deltashard_checkpoint.write.fencing import FencedError
from deltashard_checkpoint.write.report import PartReport
from deltashard_checkpoint.write.snapshot_reports import SnapshotAbandoned

from tests.support.checkpoint.faulty_store import Fault, FaultyStore

RUN = "job"
TABLE = TableSchema(fqn="t", rows=6, columns=2, dtype="float32")
WHOLE = Box(table="t", row_start=0, row_stop=TABLE.rows, col_start=0, col_stop=TABLE.columns)
Cell = tuple[int, int]
FAULTS = {
    Fault.UNAVAILABLE: 0.04, Fault.LOST_ACK: 0.05, Fault.DELAYED: 0.03, Fault.FLIPPED: 0.01,
    Fault.TRUNCATED: 0.01, Fault.STALE_LIST: 0.02,
}  # fmt: skip


class LogViolation(AssertionError):
    """An invariant does not hold."""


class Killed(BaseException):
    """The process was killed: not an Exception, so no code in it can continue."""


def cells_of(boxes: tuple[Box, ...]) -> Iterator[Cell]:
    for box in boxes:
        for row in range(box.row_start, box.row_stop):
            for col in range(box.col_start, box.col_stop):
                yield row, col


class WatchedStore(MemoryStore):
    """The store without faults. It counts relevant changes, so that the checks run only after a change."""

    log_changes = 0
    deletions = 0

    def _put(self, key: str, data: bytes, *, create_only: bool) -> None:
        super()._put(key, data, create_only=create_only)
        if key.startswith(f"{RUN}/log/0"):
            self.log_changes += 1

    def delete(self, keys) -> None:
        keys = list(keys)
        super().delete(keys)
        self.deletions += any("/data/" in key for key in keys)
        self.log_changes += any("/log/" in key for key in keys)


class GetOnly(MemoryStore):
    """The store by which a process reads manifests and layouts."""

    def __init__(self, get: Callable[[str], bytes]) -> None:
        super().__init__(url="model://")
        self.get = get  # type: ignore[method-assign]


def _stepped(name: str) -> Callable[..., Any]:
    def call(self: SteppedStore, *positional: Any, **named: Any) -> Any:
        self.world.step()
        return getattr(self.world.faulty, name)(*positional, **named)

    return call


class SteppedStore(Store):
    """Hands control to the scheduler before every call of a process."""

    def __init__(self, world: LogWorld) -> None:
        self.world = world
        self.url = "model://"

    put, put_if_absent, get, get_into, head, delete = map(
        _stepped, ("put", "put_if_absent", "get", "get_into", "head", "delete")
    )

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.world.step()
        # A hidden entry together with a stale listing exceeds the protocol's claims: a listing that ends before the
        # hole cannot show it. (Seed 41799 of a run of 100,000 schedules had both.)
        store = self.world.faulty if self.world.hidden is None else self.world.memory
        yield from store.list(prefix, start_after=start_after)

    def now_s(self) -> float:
        return self.world.now_s


@dataclass(eq=False)
class SimTask:
    """A running process, or one of its threads."""

    name: str
    run: greenlet.greenlet
    rank: ModelRank | None = None

    @property
    def done(self) -> bool:
        return self.run.dead


@dataclass(eq=False)
class SnapshotJob:
    """One rank's part of one snapshot, in flight."""

    snapshot_id: int
    step: int
    full: bool
    covers: int | None
    cells: dict[Cell, int]
    committed: int | None = None
    acknowledged: bool = False


class ModelRank:
    """One rank: its trainer's marks, as docs/format.md defines them, and the sidecar that uploads."""

    def __init__(self, gang: Gang, rank: int, boxes: tuple[Box, ...]) -> None:
        self.gang = gang
        self.rank = rank
        self.boxes = boxes
        self.fresh: set[Cell] = set()
        self.fresh_pending: set[Cell] = set()
        self.base: set[Cell] = set()
        self.base_pending: set[Cell] = set()
        self.known_commit: int | None = None
        self.known_base: int | None = None
        self.jobs: list[SnapshotJob] = []
        self.state: RunState | None = None

    def touch(self, cell: Cell) -> None:
        self.fresh.add(cell)
        self.base.add(cell)

    def take_snapshot(self, snapshot_id: int, step: int, mode: str) -> SnapshotJob:
        """Return the snapshot's cells and `covers`, and update the marks."""
        if mode == "rebased":
            # The newest commit replaces the baseline: later deltas build on it, whether or not it gets compacted.
            self.known_base, mode = self.known_commit, "since_commit"
            self.base, self.base_pending = self.since_commit(), set()
        if mode == "full" or (self.known_base if mode == "since_baseline" else self.known_commit) is None:
            rows, covers = set(cells_of(self.boxes)), None
        elif mode == "since_baseline":
            rows, covers = self.base | self.base_pending, self.known_base
        else:
            rows, covers = self.since_commit(), self.known_commit
        weights = self.gang.weights
        job = SnapshotJob(snapshot_id, step, covers is None, covers, {cell: weights[cell] for cell in rows})
        # Marks of a snapshot with an unknown commit stay, as pending: the next snapshot holds those rows again.
        self.fresh_pending |= self.fresh
        self.fresh = set()
        if job.full:
            self.base_pending |= self.base
            self.base = set()
        self.jobs.append(job)
        return job

    def since_commit(self) -> set[Cell]:
        """Return the rows changed since the newest commit, with those of a snapshot in flight."""
        return self.fresh | self.fresh_pending

    def acknowledge(self, job: SnapshotJob) -> None:
        """Handle the commit's acknowledgement, which may be late."""
        job.acknowledged = True
        assert job.committed is not None
        if job is self.jobs[-1]:
            self.fresh_pending = set()
            self.known_commit = job.committed
        if job.full and job is [j for j in self.jobs if j.full][-1]:
            self.base_pending = set()
            self.known_base = job.committed

    def staged(self, job: SnapshotJob) -> None:
        """The sidecar has the bytes. The marks do not change."""

    def reseed(
        self, seq: int, links: tuple[lineages.ChainLink, ...], cells: dict[str, dict[Cell, int]]
    ) -> None:
        """Set the marks after a restore: the rows of the deltas that were read."""
        mine = set(cells_of(self.boxes))
        roots = {link.seq for link in links if link.part.covers is None and mine & set(cells_of(link.boxes))}
        self.known_commit = seq
        self.known_base = roots.pop() if len(roots) == 1 else None
        if self.known_base is not None:
            for link in links:
                if link.part.covers is not None:
                    self.base |= set(cells[link.part.index_key]) & mine & set(cells_of(link.boxes))

    def drop_marks(self) -> None:
        """Drop the record of covered rows, so that the next snapshot is a baseline."""
        self.known_commit = self.known_base = None


class Gang:
    """The trainer processes of one attempt."""

    def __init__(
        self, world: LogWorld, opened: attempts.OpenedAttempt, weights: dict[Cell, int], split: str, size: int, layout: Layout | None
    ) -> None:  # fmt: skip
        self.world = world
        self.attempt = opened.attempt
        self.step = opened.resume.step if opened.resume else 0
        self.snapshots = 0
        self.weights = weights
        self.split = split
        self.layout = "" if layout is None else layout.digest
        self.fenced = False
        self.alive = True
        self.ranks = [ModelRank(self, rank, boxes) for rank, boxes in enumerate(shards(split, size))]

    @property
    def busy(self) -> bool:
        return any(task.rank in self.ranks and not task.done for task in self.world.tasks)


def shards(split: str, size: int) -> list[tuple[Box, ...]]:
    """Return the boxes of each rank: rows divided evenly, or columns (two ranks); `torn`: a row is missing or duplicated."""
    if split == "torn":
        held = [list(boxes) for boxes in shards("rows", size)]
        first = held[0][0]
        return [(replace(first, row_stop=first.row_stop - 1),), *map(tuple, held[1:])]
    if split == "columns" and size == 2:
        return [
            (Box(table="t", row_start=0, row_stop=TABLE.rows, col_start=c, col_stop=c + 1),) for c in range(2)
        ]
    edges = [TABLE.rows * i // size for i in range(size + 1)]
    return [
        (Box(table="t", row_start=a, row_stop=b, col_start=0, col_stop=TABLE.columns),)
        for a, b in itertools.pairwise(edges)
    ]


def layout_of(split: str, size: int) -> Layout:
    return Layout.of(size, {"t": (TABLE.rows, TABLE.columns)}, dict(enumerate(shards(split, size))))


class LogWorld:
    """One run, its store, its processes, and its expected state."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.random = random.Random(seed)
        self.now_s = 1e9
        self.memory = WatchedStore(url="model://", clock=lambda: self.now_s)
        self.faulty = FaultyStore(
            self.memory, seed=self.random.getrandbits(32), rates=FAULTS if faults else {}
        )
        self.store = SteppedStore(self)
        if self.random.random() < 0.9:
            probe._probed.add(self.store)
        self.main = greenlet.getcurrent()
        self.tasks: list[SimTask] = []
        self.gangs: list[Gang] = []
        self.logs: list[tuple[greenlet.greenlet, commit_log.RunLog]] = []
        self.writes = 0
        self.expected: dict[tuple[int, int], dict[Cell, int]] = {}
        self.seen: dict[int, bytes] = {}
        self.sealed: list[Sealed] = []
        self.state = RunState(run=RUN)
        self.checked = (0, 0)
        self.acknowledged: list[tuple[int, int, int]] = []
        self.manifests = Manifests(self.memory, RUN)
        self.broken: set[str] = set()
        self.excluding: dict[int, frozenset[int]] = {}
        self.hidden: tuple[int, bytes] | None = None
        self.head: int | None = None
        """The newest checkpoint by the last commit or rewind."""
        self.pins: dict[str, int | None] = {}
        """The checkpoint of each pinned name, by the last commit, pin or unpin."""
        self.counts = Counter(schedules=1)

    def step(self) -> None:
        """Called by a process before each store call: the scheduler decides the next action."""
        if greenlet.getcurrent() is not self.main:
            self.counts["steps"] += 1
            self.main.switch()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.step()

    def log(self, state: RunState | None = None) -> commit_log.RunLog:
        now = lambda: self.now_s  # noqa: E731
        clocks = Clocks(wall_s=now, monotonic_s=now, sleep=self.sleep, uniform=self.random.random)
        log = commit_log.RunLog(self.store, RUN, clocks=clocks, readers=1)
        if state is not None:
            log._state = state
        self.logs = [(process, other) for process, other in self.logs if not process.dead]
        self.logs.append((greenlet.getcurrent(), log))
        return log

    def spawn(self, name: str, work: Callable[[], None], rank: ModelRank | None = None) -> SimTask:
        def body() -> None:
            try:
                work()
            except Killed:
                self.counts["kills"] += 1
            except LogGap:
                self.counts["failures"] += 1
                if self.hidden is None:
                    raise
            except (DeltashardError, ObjectExists, ObjectNotFound):
                self.counts["failures"] += 1

        task = SimTask(name, greenlet.greenlet(body, parent=self.main), rank)
        self.tasks.append(task)
        return task

    def advance(self, task: SimTask, steps: int = 1) -> None:
        for _ in range(steps):
            if task.done:
                break
            self.now_s += 0.01
            task.run.switch()
        if task.done and task in self.tasks:
            self.tasks.remove(task)

    def kill(self, task: SimTask) -> None:
        if task.run:  # started, and not at its end
            task.run.throw(Killed())
        if task in self.tasks:
            self.tasks.remove(task)

    def live_gangs(self) -> list[Gang]:
        return [gang for gang in self.gangs if gang.alive]

    def put_object(self, key: str, data: bytes) -> None:
        """A sidecar's put of a data object: retried, immutable, under a unique name."""
        for _ in range(6):
            try:
                self.store.put_if_absent(f"{RUN}/{key}", data)
            except ObjectExists:
                return
            except StoreUnavailable:
                self.sleep(0.1)
                continue
            return
        raise StoreUnavailable("upload failed", where=key)

    def put_part(
        self, names: Callable[[str, int], str], rank: int, boxes: tuple[Box, ...], covers: int | None, cells: dict[Cell, int]
    ) -> Part:  # fmt: skip
        """Put pack, then index, as a real part writer does."""
        pack = json.dumps(sorted([*cell, value] for cell, value in cells.items())).encode()
        pack_name = names("pack", 0)
        self.put_object(pack_name, pack)
        index = json.dumps({"pack": pack_name, "hash": hashlib.sha256(pack).hexdigest()}).encode()
        index_name = names(hashlib.sha256(index).hexdigest()[:32], -1)
        self.put_object(index_name, index)
        return Part(rank=rank, index_key=index_name, boxes=boxes, stored_bytes=len(pack), covers=covers)

    def read_part(self, get: Callable[[str], bytes], part: Part) -> dict[Cell, int]:
        """Read the cells of a part; raise `CorruptObject` or `ObjectNotFound`. A wrong hash causes a second read."""
        for _ in range(4):
            index = get(f"{RUN}/{part.index_key}")
            if hashlib.sha256(index).hexdigest()[:32] in part.index_key:
                break
        else:
            raise CorruptObject("index", where=part.index_key)
        parsed = json.loads(index)
        for _ in range(4):
            pack = get(f"{RUN}/{parsed['pack']}")
            if hashlib.sha256(pack).hexdigest() == parsed["hash"]:
                return {(row, col): value for row, col, value in json.loads(pack)}
        raise CorruptObject("pack", where=parsed["pack"])

    def restore(
        self, state: RunState, seq: int, get: Callable[[str], bytes]
    ) -> tuple[dict[Cell, int], tuple[lineages.ChainLink, ...], dict[str, dict[Cell, int]]]:
        """Return what checkpoint `seq` restores by its chain, newest frame of each cell first."""
        links = lineages.chain(self.listed(state, lineages.closure(state, [seq]), get), seq)
        read: dict[str, dict[Cell, int]] = {}
        found: dict[Cell, int] = {}
        for link in links:
            if link.part.index_key not in read:
                read[link.part.index_key] = self.read_part(get, link.part)
            cells = read[link.part.index_key]
            for cell in cells_of(link.boxes):
                if cell in cells and cell not in found:
                    found[cell] = cells[cell]
        return found, links, read

    def listed(self, state: RunState, seqs: Iterable[int], get: Callable[[str], bytes]) -> RunState:
        """Return `state` with the parts of these checkpoints, where manifests list them; raise `CorruptObject`."""
        seqs = [seq for seq in seqs if seq in state.checkpoints and state.checkpoints[seq].listed is not None]
        if not seqs:
            return state
        manifests = Manifests(GetOnly(get), RUN)
        for _ in range(4):
            try:
                return manifests.listing(state, seqs)
            except InvalidCheckpoint as error:
                found = error  # the read may be flipped
        raise CorruptObject("manifest or layout", where=str(seqs)) from found

    def parts_of(self, state: RunState, seq: int) -> tuple[Part, ...]:
        """Return the parts of a checkpoint, as the store holds them; none if its manifest is missing."""
        try:
            return lineages.parts_of(self.manifests.listing(state, (seq,)), seq)
        except InvalidCheckpoint:
            return ()

    def get_with_retries(self, key: str) -> bytes:
        for _ in range(40):
            try:
                return self.store.get(key)
            except StoreUnavailable:
                self.sleep(0.1)
        raise StoreUnavailable("the store stays unavailable", where=key)

    # Moves

    def move_open(
        self, *, split: str, size: int, which: str = "latest", laid_out: bool = False, late: bool = False
    ) -> SimTask:
        """Start or restart a job: rank 0 opens the attempt, all ranks load, and fall back past invalid checkpoints.

        `late`: one rank loads first, as from a read-only store, and opens the attempt afterwards.
        """
        layout = layout_of(split, size) if laid_out else None

        def work() -> None:
            excluded: set[int] = set()
            while True:
                log = self.log()
                basis: attempts.ResumeBasis | None = None
                if late and size == 1 and layout is None:
                    state, chosen, basis = attempts.read_unopened(
                        log, owner="me", which=which, exclude=excluded
                    )
                    try:
                        before = chosen and self.restore(state, chosen.seq, self.get_with_retries)
                    except (CorruptObject, ObjectNotFound):
                        basis = None  # the code below finds the damage again
                # A late open is requested again with the same basis when its answer was lost.
                log, tries = self.log(), 1 if basis is None else 3
                while True:
                    try:
                        opened = attempts.open_attempt(
                            log, owner="me", world_size=size, which=which, exclude=excluded,
                            layout=layout and layout.data, closing_wait_s=0.0, deadline_s=60.0, basis=basis,
                        )  # fmt: skip
                        break
                    except StoreUnavailable:
                        if (tries := tries - 1) == 0:
                            raise
                    except attempts.StaleRestore:
                        self.counts["overtaken"] += 1
                        return
                if basis is not None:
                    self.counts["late"] += 1
                    if (opened.resume and opened.resume.seq) != (chosen and chosen.seq):
                        raise LogViolation(f"late attempt {opened.attempt}: its checkpoint was not loaded")
                    if before is not None and chosen is not None:
                        wanted = self.expected[chosen.attempt, chosen.snapshot_id]
                        if before[0] != wanted:
                            raise LogViolation(f"attempt {opened.attempt} was opened late on another state")
                self.counts["attempts"] += 1
                if which == "latest":
                    self.excluding[opened.attempt] = frozenset(excluded)
                if opened.resume is None:
                    gang = Gang(self, opened, dict.fromkeys(cells_of((WHOLE,)), 0), split, size, layout)
                    break
                seq = opened.resume.seq
                try:
                    weights, links, read = self.restore(opened.state, seq, self.get_with_retries)
                except (CorruptObject, ObjectNotFound) as error:
                    reread = lineages.closure(opened.state, [seq])
                    if not self.tainted(opened.state, reread) and self.is_newest(opened.attempt):
                        raise LogViolation(f"attempt {opened.attempt} cannot load {seq}: {error}") from error
                    if not self.is_newest(opened.attempt):
                        return
                    excluded.add(seq)
                    self.counts["fallbacks"] += 1
                    continue
                wanted = self.expected[opened.resume.attempt, opened.resume.snapshot_id]
                if weights != wanted:
                    raise LogViolation(
                        f"attempt {opened.attempt} loaded {weights} instead of {wanted} from {seq}"
                    )
                gang = Gang(self, opened, dict(weights), split, size, layout)
                # After a change of layout the first snapshot is a baseline: marks do not record rows of other ranks.
                for rank in gang.ranks if opened.resume.layout == gang.layout else ():
                    rank.reseed(seq, links, read)
                break
            for rank in gang.ranks:
                rank.state = opened.state
            self.gangs.append(gang)

        return self.spawn("open", work)

    def is_newest(self, attempt: int) -> bool:
        """Return whether the stored log has no later attempt, rewind or checkpoint."""
        for seq, data in self.raw().items():
            entry = parse(data, seq).entry
            if seq > attempt and isinstance(entry, (AttemptOpened, Checkpoint, Rewound)):
                return False
        return True

    def move_train(self, gang: Gang, rows: int) -> None:
        gang.step += 1
        for rank in gang.ranks:
            cells = list(cells_of(rank.boxes))
            for cell in self.random.sample(cells, min(rows, len(cells))):
                self.writes += 1
                gang.weights[cell] = self.writes
                rank.touch(cell)

    def move_snapshot(self, gang: Gang, mode: str, *, mixed: bool = False) -> None:
        """Take a snapshot of all ranks at one step (`mixed`: the last rank a step later); each sidecar uploads and commits."""
        gang.snapshots += 1
        snapshot_id = gang.snapshots
        self.expected[gang.attempt, snapshot_id] = dict(gang.weights)
        for rank in gang.ranks:
            if mixed and rank is gang.ranks[-1] and len(gang.ranks) > 1:
                self.move_train(gang, 1)
                self.expected[gang.attempt, snapshot_id] = {}  # no checkpoint: it would restore another state
                self.counts["mixed"] += 1
            job = rank.take_snapshot(snapshot_id, gang.step, self.random.choice([mode, mode, mode, "full"]))
            self.upload(rank, job)

    def upload(self, rank: ModelRank, job: SnapshotJob) -> SimTask:
        """Start a sidecar's save. A second save of the same job (by a restarted sidecar) has another token."""
        gang, token = rank.gang, f"{self.random.getrandbits(64):016x}"
        world_size = len(gang.ranks)

        def names(what: str, n: int) -> str:
            place = {
                "attempt": gang.attempt,
                "snapshot_id": job.snapshot_id,
                "rank": rank.rank,
                "token": token,
            }
            return index_key(**place, xxh3=what) if n < 0 else pack_key(**place, n=n)

        def work() -> None:
            rank.staged(job)
            part = self.put_part(names, rank.rank, rank.boxes, job.covers, job.cells)
            report = PartReport(
                part=part, tables=(TABLE,), encodings={TABLE.fqn: ("fp32",)}, rows=len(job.cells), raw_bytes=8, stall_s=0.0,
                pins=("best",) if job.snapshot_id % 4 == 3 else (),
            )  # fmt: skip
            log = self.log(rank.state if self.random.random() < 0.7 else None)
            try:
                done = commit_parts(
                    log, attempt=gang.attempt, snapshot_id=job.snapshot_id, step=job.step, world_size=world_size, reports=[report],
                    layout=gang.layout, deadline_s=20.0,
                )  # fmt: skip
            except FencedError:
                gang.fenced = True
                self.counts["fenced"] += 1
                return
            except SnapshotAbandoned as error:
                self.counts["abandoned"] += 1
                if "covers" in str(error):
                    rank.drop_marks()
                return
            rank.state = log.state
            self.acknowledged.append((done.seq, gang.attempt, job.snapshot_id))
            # With two sidecars of one rank the entry may name the part of the other one, which has the same cells.
            job.committed = done.seq

        return self.spawn("save", work, rank)

    def move_acknowledge(self) -> None:
        waiting = [
            (rank, job)
            for gang in self.live_gangs()
            for rank in gang.ranks
            for job in rank.jobs
            if job.committed is not None and not job.acknowledged
        ]
        if waiting:
            rank, job = self.random.choice(waiting)
            rank.acknowledge(job)

    def move_retire(self, *, patience_s: float | None = None) -> SimTask:
        state = self.last_state() if self.random.random() < 0.5 else None
        retention = retentions.Retention(keep_last=self.random.choice([1, 1, 2]))
        if patience_s is None:
            patience_s = self.random.choice([0.0, 1e6])

        def work() -> None:
            log = self.log(state)
            orphaned = garbage_collection.orphaned_prefixes(
                log, log.refresh(deadline_s=20.0), compaction_timeout_s=patience_s
            )
            entry = retentions.append_retirement(log, retention, orphaned_prefixes=orphaned, deadline_s=20.0)
            self.counts["retired"] += 0 if entry is None else len(entry.checkpoints)

        return self.spawn("retire", work)

    def move_gc(self) -> SimTask:
        state = self.last_state() if self.random.random() < 0.5 else None
        grace_s = self.random.choice([0.0, 0.0, 1.0])

        def work() -> None:
            log = self.log(state)
            self.counts["deleted"] += garbage_collection.collect(
                log, grace_s=grace_s, min_reclaim_prefixes=1, deadline_s=20.0
            ).objects

        return self.spawn("gc", work)

    def move_compact(self) -> SimTask | None:
        state = self.log_state()
        if not state.checkpoints:
            return None
        seq = self.random.choice(sorted(state.checkpoints)[-3:])

        def mover(
            _log: commit_log.RunLog, state: RunState, seq: int, _links: Any, token: str
        ) -> compaction.MovedRows:
            cells, _, _ = self.restore(state, seq, self.get_with_retries)

            def names(what: str, n: int) -> str:
                if n < 0:
                    return compaction_index_key(token=token, xxh3=what)
                return compaction_pack_key(token=token, n=n)

            boxes = tuple(box for part in self.parts_of(state, seq) for box in part.boxes)
            part = self.put_part(names, 0, boxes, None, cells)
            held = {TABLE.fqn: ("fp32",)}
            return compaction.MovedRows(
                parts=(part,), encodings=held, rows=len(cells), stored_bytes=part.stored_bytes
            )

        def work() -> None:
            entry = compaction.compact(self.log(), seq, mover, deadline_s=20.0)
            self.counts["compactions"] += entry is not None

        return self.spawn("compact", work)

    def move_stall(self) -> None:
        """Stall a compaction after its puts and before its entry, while maintenance abandons it; then it continues."""
        task = self.move_compact()
        count = self.compacted()
        while task is not None and not task.done and self.compacted() == count:
            self.advance(task)
        for tidy in (functools.partial(self.move_retire, patience_s=0.0), self.move_gc):
            self.advance(tidy(), 80)
            self.check_new_entries()

    def compacted(self) -> int:
        """Return the number of stored objects of compactions."""
        return sum(1 for _ in self.memory.list(f"{RUN}/data/compact-"))

    def move_pin(self) -> SimTask | None:
        """A user pins a checkpoint, or removes the name."""
        live = sorted(self.log_state().checkpoints)
        if not live:
            return None
        which = None if self.random.random() < 0.4 else f"seq:{self.random.choice(live[-4:])}"
        name, state = self.random.choice(["best", "paper"]), self.last_state()

        def work() -> None:
            user_entry.pin(self.log(state), name, which, deadline_s=20.0)

        return self.spawn("pin", work)

    def move_rewind(self) -> SimTask | None:
        """A user rewinds the run to an older, whole checkpoint, and asserts that its trainer has ended."""
        current = self.log_state()
        live = [
            seq
            for seq in sorted(current.checkpoints)
            if not self.tainted(current, lineages.closure(current, [seq]))
        ]
        if not live:
            return None
        seq, state = self.random.choice(live[-4:]), self.last_state()

        def work() -> None:
            user_entry.rewind(self.log(state), f"seq:{seq}", ended=True, deadline_s=20.0)

        return self.spawn("rewind", work)

    def move_hint(self) -> None:
        """Write a HINT that is current, old, or damaged: HINT is best effort."""
        if not self.seen:
            return
        tip = max(self.seen)
        old = self.random.randrange(tip + 1)
        hints = Hint(seq=tip), Hint(seq=old), Hint(fold=tip + 1, seq=tip), Hint(fold=0, seq=tip)
        mangled = Hint(seq=tip + 9).data.replace(b'"seq":1', b'"seq":2'), b"", b"\x00garbage"
        self.memory.put(f"{RUN}/log/HINT", self.random.choice([*(hint.data for hint in hints), *mangled]))

    def move_hide(self) -> None:
        """Hide an entry for a while (a manual error): a listing shows the gap, and no process may write there.

        Only entries that every process has passed are hidden. A process that is behind the gap, or listed before it,
        and writes without a new listing cannot detect it.
        """
        lagging = [log.state.tip for process, log in self.logs if not process.dead]
        lagging += [rank.state.tip for gang in self.gangs for rank in gang.ranks if rank.state is not None]
        tip = min(lagging, default=-1)
        if self.hidden is None and tip >= 2:
            seq = self.random.randrange(tip)
            key = f"{RUN}/{entry_key(seq)}"
            self.hidden = (seq, self.memory.get(key))
            self.memory.delete([key])

    def move_unhide(self) -> None:
        if self.hidden is None:
            return
        seq, data = self.hidden
        try:
            self.memory.put_if_absent(f"{RUN}/{entry_key(seq)}", data)
        except ObjectExists:
            raise LogViolation(f"log entry {seq} was written again while it was hidden") from None
        self.hidden = None

    def move_break(self) -> None:
        """Damage a data object while another chain remains: the store's replication handles two failures at once."""
        state = self.log_state()
        newest = state.newest()
        if newest is None or self.broken:
            return
        chain = lineages.closure(state, [newest.seq])
        current = state.checkpoints.keys() - state.detached
        if all(lineages.closure(state, [seq]) & chain for seq in current):
            return
        if any(task.name == "rewind" for task in self.tasks):  # the user checks the target of the rewind
            return
        part = self.random.choice(self.parts_of(state, self.random.choice(sorted(chain))))
        if self.random.random() < 0.5:
            self.memory.put(f"{RUN}/{part.index_key}", b"damaged")
        else:
            self.memory.delete([f"{RUN}/{part.index_key}"])
        self.broken.add(part.index_key)

    def tainted(self, state: RunState, seqs: frozenset[int]) -> bool:
        return any(part.index_key in self.broken for seq in seqs for part in self.parts_of(state, seq))

    # The expected state

    def raw(self) -> dict[int, bytes]:
        """Return the stored entries by slot, with the hidden one."""
        found = {} if self.hidden is None else {self.hidden[0]: self.hidden[1]}
        for info in self.memory.list(f"{RUN}/log/0"):
            seq = seq_of(info.key[len(RUN) + 1 :])
            if seq is not None:
                found[seq] = self.memory.get(info.key)
        return dict(sorted(found.items()))

    def log_state(self) -> RunState:
        """Return the state of the stored log, folded by a reader without faults."""
        self.check_new_entries()
        return self.state

    def last_state(self) -> RunState | None:
        states = [rank.state for gang in self.gangs for rank in gang.ranks if rank.state is not None]
        return self.random.choice(states) if states else None

    def check_new_entries(self) -> None:
        """Check new entries as soon as they exist, before gc deletes what they name."""
        changes, deletions = self.memory.log_changes, self.memory.deletions
        if (changes, deletions) == self.checked:
            return
        if changes != self.checked[0]:
            raw = self.raw()
            for seq, data in self.seen.items():
                if raw.get(seq) != data:
                    raise LogViolation(f"log entry {seq} changed or vanished")
            if len(raw) and max(raw) != len(raw) - 1:
                raise LogViolation(f"the log has a gap: {sorted(raw)}")
            for seq in range(len(self.seen), len(raw)):
                self.seen[seq] = raw[seq]
                self._check_entry(_parse_once(raw[seq], seq))
        if deletions != self.checked[1]:
            self._check_contents()
        self.checked = (changes, deletions)

    def _check_entry(self, sealed: Sealed) -> None:
        """Check the invariants of an entry at its slot."""
        entry, state = sealed.entry, self.state
        self.counts["entries"] += 1
        if isinstance(entry, AttemptOpened):
            self._check_attempt(state, entry)
        if isinstance(entry, Checkpoint):
            attempt = max(s.entry.seq for s in self.sealed if isinstance(s.entry, (AttemptOpened, Rewound)))
            if entry.attempt != attempt:
                raise LogViolation(
                    f"zombie: {entry.seq} of attempt {entry.attempt} was committed under {attempt}"
                )
            opened = state.attempts[entry.attempt]
            if opened.last_snapshot is not None and entry.snapshot_id <= opened.last_snapshot:
                raise LogViolation(
                    f"snapshot {entry.snapshot_id} was committed after snapshot {opened.last_snapshot}: the run went backwards"
                )
        newest = state.newest()
        self._track_entry(entry)
        self.state = state = commit_log.fold(state, [sealed])
        self.sealed.append(sealed)
        if state.stopped is not None:
            raise LogViolation(f"the log breaks its own rules: {state.stopped.error}")
        if newest is not None and newest.seq not in state.checkpoints:
            raise LogViolation(f"the newest checkpoint {newest.seq} was retired")
        now = state.newest()
        if (None if now is None else now.seq) != self.head:
            raise LogViolation(
                f"the newest is {now and now.seq}, but the last commit or rewind was to {self.head}"
            )
        if isinstance(entry, Checkpoint):
            self.counts["checkpoints"] += 1
            self.counts["deltas"] += not entry.baseline
            self.counts["multi_rank"] += entry.world_size > 1
            self.counts["laid_out"] += entry.listed is not None
            self._check_content(state, entry.seq)
        elif isinstance(entry, Reclaimed):
            self.counts["reclaimed"] += 1
        elif not isinstance(entry, AttemptOpened):
            self._check_contents()

    def _track_entry(self, entry: object) -> None:
        """Track the newest checkpoint and the pinned names, in log order."""
        match entry:
            case Checkpoint():
                self.head = entry.seq
                self.pins |= dict.fromkeys(entry.pins, entry.seq)
            case Rewound():
                self.head = entry.to
                self.counts["rewound"] += 1
            case Pinned():
                self.pins[entry.name] = entry.checkpoint
                self.counts["pinned"] += 1
            case Retired():
                if gone := set(self.pins.values()) & set(entry.checkpoints):
                    raise LogViolation(f"{gone} was retired, and is pinned: {self.pins}")

    def _check_contents(self) -> None:
        for seq in self.state.checkpoints:
            self._check_content(self.state, seq)

    def check(self) -> None:
        """Check everything, from the store only."""
        self.check_new_entries()
        for seq, attempt, snapshot_id in self.acknowledged:
            entry = self.sealed[seq].entry if seq < len(self.sealed) else None
            if not isinstance(entry, Checkpoint) or (entry.attempt, entry.snapshot_id) != (
                attempt,
                snapshot_id,
            ):
                raise LogViolation(
                    f"commit {seq} of {attempt}/{snapshot_id} was acknowledged, and is not in the log"
                )
        fresh = commit_log.fold(RunState(run=RUN), [parse(data, seq) for seq, data in self.raw().items()])
        if fresh != self.state:
            raise LogViolation("a fold of the whole log gives another state")
        self._check_contents()

    def _check_attempt(self, state: RunState, entry: AttemptOpened) -> None:
        newest = state.newest()
        resumes_from = entry.resumes_from
        if resumes_from is None and newest is not None:
            raise LogViolation(f"attempt {entry.seq} starts from nothing, although {newest.seq} exists")
        excluded = self.excluding.get(entry.seq, frozenset())
        for seq in sorted(state.checkpoints.keys() - state.detached, reverse=True):
            if seq == resumes_from:
                return
            if not lineages.closure(state, [seq]) & excluded and entry.seq in self.excluding:
                raise LogViolation(f"attempt {entry.seq} resumes from {resumes_from}, newer {seq} is valid")

    def _check_content(self, state: RunState, seq: int) -> None:
        entry = state.checkpoints[seq]
        closure = lineages.closure(state, [seq])
        if self.tainted(state, closure):
            return
        try:
            found, _, _ = self.restore(state, seq, self.memory.get)
        except (DeltashardError, ObjectNotFound) as error:
            raise LogViolation(f"live checkpoint {seq} does not restore: {error}") from error
        wanted = self.expected[entry.attempt, entry.snapshot_id]
        if found != wanted:
            raise LogViolation(f"checkpoint {seq} restores {found} instead of {wanted}")

    def finish(self) -> None:
        """End the faults: late puts arrive or are lost, half the processes are killed, then one more save must succeed."""
        self.move_unhide()
        self.faulty.rates = {}
        for task in list(self.tasks):
            if self.random.random() < 0.5:
                self.kill(task)
        self.faulty.flush_delayed(apply=self.random.random() < 0.7)
        self.check_new_entries()
        self.drain()
        self.check()
        task = self.move_open(split="rows", size=2, laid_out=self.random.random() < 0.5)
        self.advance(task, 10_000)
        if not task.done or not self.gangs or not self.gangs[-1].alive:
            raise LogViolation("a new trainer could not open the run")
        self.check_new_entries()
        gang = self.gangs[-1]
        self.move_train(gang, 2)
        for mode in ("since_commit", "rebased", "since_baseline", "full"):
            self.move_snapshot(gang, mode)
            self.drain()
            self.check_new_entries()
            state = self.log_state()
            last = state.commit_of(gang.attempt, gang.snapshots)
            if last is None and mode == "full":
                raise LogViolation("the next save did not succeed")
            self.move_train(gang, 1)
        self.tidy()
        self.check()

    def tidy(self) -> None:
        """Run one maintenance round without grace: only live objects and those of snapshots in flight may remain."""
        log = self.log()
        orphaned = garbage_collection.orphaned_prefixes(log, log.refresh(), compaction_timeout_s=0.0)
        retentions.append_retirement(log, retentions.Retention(keep_last=1), orphaned_prefixes=orphaned)
        garbage_collection.collect(log, grace_s=0.0, min_reclaim_prefixes=1)
        state = self.log_state()
        live = lineages.live_prefixes(state)
        for prefix, _ in garbage_collection.data_objects(log):
            place = snapshot_of(prefix)
            if is_protected(state, prefix):
                continue  # the previous attempt may have abandoned an object that an entry names
            if prefix not in live and (place is None or is_uncommittable(state, *place)):
                raise LogViolation(f"{prefix} remains, although no live checkpoint needs it")
        if state.retired:
            raise LogViolation(f"{min(state.retired)} is deleted, and its retirement is still recorded")

    def drain(self) -> None:
        while self.tasks:
            self.advance(self.random.choice(self.tasks), 5)
            self.check_new_entries()


# Schedules

MOVES = {
    "step": 60, "train": 6, "snapshot": 9, "acknowledge": 8, "open": 2, "kill_task": 2, "kill_gang": 1, "reupload": 1,
    "retire": 4, "gc": 3, "compact": 3, "pin": 1, "rewind": 0.4, "maintenance": 3, "stall": 0.5, "hint": 1, "hide": 0.3,
    "unhide": 1, "break": 1, "late": 1,
}  # fmt: skip
MODES = ("full", "rebased", *["since_baseline"] * 3, *["since_commit"] * 2)


def act(world: LogWorld, move: str) -> None:
    """Make one move, chosen by name; its parameters are drawn from the world's random."""
    rnd = world.random
    gangs = [gang for gang in world.live_gangs() if not gang.fenced]
    match move:
        case "step":
            if world.tasks:
                world.advance(rnd.choice(world.tasks), rnd.choice([1, 3, 8, 16, 32, 64]))
        case "train" if gangs:
            world.move_train(rnd.choice(gangs), rnd.choice([1, 1, 2]))
        case "snapshot" if gangs:
            gang = rnd.choice(gangs)
            # Usually only one save is in flight; the exceptions (urgent, aborted by the trainer) are under test.
            if not gang.busy or rnd.random() < 0.3:
                world.move_snapshot(gang, rnd.choice(MODES), mixed=rnd.random() < 0.06)
        case "open" if not any(task.name == "open" for task in world.tasks) or rnd.random() < 0.2:
            which = "latest"
            if rnd.random() < 0.25 and (live := sorted(world.log_state().checkpoints)):
                which = f"seq:{rnd.choice(live)}"  # the old branch remains
            split, size = rnd.choice(["rows", "columns"]), rnd.choice([1, 1, 2, 3, 4])
            laid_out = size > 1 and rnd.random() < 0.7
            if world.gangs and rnd.random() < 0.75:  # most restarts change nothing
                last = world.gangs[-1]
                split, size, laid_out = last.split, len(last.ranks), bool(last.layout)
            if laid_out and rnd.random() < 0.05:
                split = "torn"
                world.counts["torn"] += 1
            late = rnd.random() < 0.2
            world.move_open(split=split, size=size, which=which, laid_out=laid_out, late=late)
        case "kill_task" if world.tasks:
            world.kill(rnd.choice(world.tasks))
        case "kill_gang" if gangs:
            gang = rnd.choice(gangs)
            gang.alive = False
            for task in [t for t in world.tasks if t.rank in gang.ranks]:
                if rnd.random() < 0.5:
                    world.kill(task)
        case "reupload" if gangs:
            rank = rnd.choice(rnd.choice(gangs).ranks)
            if rank.jobs and rank.jobs[-1].committed is None:
                world.upload(rank, rank.jobs[-1])
        case (
            "compact"
            | "pin"
            | "rewind"
            | "retire"
            | "gc"
            | "acknowledge"
            | "stall"
            | "hint"
            | "hide"
            | "unhide"
            | "break"
        ):
            getattr(world, f"move_{move}")()
        case "maintenance":
            # Compaction, retirement, gc, all or a part of it, while every other process waits.
            for tidy in (world.move_compact, world.move_retire, world.move_gc):
                task = tidy() if rnd.random() < 0.6 else None
                if task is not None:
                    world.advance(task, 60)
                    world.check_new_entries()
        case "late":
            world.faulty.flush_delayed(apply=rnd.random() < 0.8)
    world.check_new_entries()


def run_schedule(seed: int, *, moves: int = 90, faults: bool = True) -> Counter[str]:
    """Run one schedule; raise `LogViolation` (or any error that escaped the code under test)."""
    # Parsing is pure, and every process of a schedule parses the same few entries: a cache makes schedules twice as fast.
    # Names decide the order of listings, so tokens come from the seed as well.
    tokens = random.Random(seed)
    with (
        mock.patch.object(commit_log, "parse", _parse_once),
        mock.patch.object(secrets, "token_hex", lambda n: f"{tokens.getrandbits(8 * n):0{2 * n}x}"),
    ):
        world = LogWorld(seed, faults=faults)
        names, weights = list(MOVES), list(MOVES.values())
        act(world, "open")
        for _ in range(moves):
            if not world.live_gangs() and world.random.random() < 0.3:
                act(world, "open")
            act(world, world.random.choices(names, weights)[0])
        world.finish()
        return world.counts


_parse_once = functools.lru_cache(maxsize=512)(parse)
