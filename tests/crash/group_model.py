"""A model of a group of ranks in one thread: in any order of threads and store calls, a save is of one step or absent.

The code under test is the real one, from `save()` and `step()` down; its dependencies are stand-ins. A thread is a
greenlet, which stops at each read of shared state and at each call of the group's store; a seeded scheduler selects
the next thread, and time passes when all wait. A schedule is a sequence of attempts of a group over one store: ranks save
together or alone, pin, wait; sidecars request saves, disconnect, or fail one; validate= vetoes; a rank may be slow, and
may be killed, which ends the attempt and may leave a zombie.

Invariants: all parts of a snapshot are of one step; every running rank takes or declines a granted snapshot; no boundary is held
longer than the product documents; a program without a kill reaches its end, with its last step committed; a save
that all ranks request and await at one step never fails for lack of an agreement.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import greenlet
from deltashard.attach.attachment import Listener, RunMember, SidecarAttachment
from deltashard.attach.lifecycle import AttachEvent, TrainingAttempt
from deltashard.attach.rank import Rank
from deltashard.attach.session import Attached, Lost
from deltashard.errors import SaveFailed, WaitError
from deltashard.group import coordinator_thread as coordinator_threads
from deltashard.group import rendezvous as rendezvous_module
from deltashard.group.coordinator_thread import HOLD_S, CoordinatorThread
from deltashard.group.rendezvous import Rendezvous
from deltashard.group.snapshot_round import RoundVerdict, SnapshotRounds
from deltashard.loader.registry import LoaderRegistry
from deltashard.program import Program, TrainingLoop
from deltashard.save import closing, coordinator, failure_tracker, outcome, save_loop, taker
from deltashard.save.closing import LastSnapshot
from deltashard.save.coordinator import EXACT_TIMEOUT_S, SnapshotCoordinator
from deltashard.save.failure_tracker import SaveFailureTracker
from deltashard.save.handle import SaveHandle, Stats
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.precopy_scheduler import PrecopyScheduler
from deltashard.save.records import SaveRecords
from deltashard.save.request import Requests
from deltashard.save.save_loop import SaveLoop
from deltashard.save.snapshot_gate import MESSAGE
from deltashard.save.taker import SnapshotRows, SnapshotTaker
from deltashard.save.watchdog import Watchdog
from deltashard.snapshot.save_stream import SnapshotFailed
from deltashard.tracking import step_clock
from deltashard.tracking.snapshot_base import SnapshotBase
from deltashard.tracking.step_boundary import StepBoundaryMonitor
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP, URGENT
from deltashard_proto.block_reason import BlockReason
from deltashard_proto.v1 import trainer_pb2 as pb
from torch import nn

RANKS = 4
STEPS = 40
CALM = 12
"""The last steps have no faults: a save requested then must succeed."""
PART_S = 60.0
"""Time for which a pod waits for the other ranks' parts."""
LIMIT_S = 600.0
"""Virtual seconds: a longer attempt contains an endless wait."""


class GroupViolation(AssertionError):
    """An invariant does not hold."""


class RankKilled(BaseException):
    """The process was killed. This is no Exception, so no code in it can continue."""


@dataclass(eq=False)
class Thread:
    """A greenlet of one rank."""

    process: SimProcess
    run: Callable[[], None]
    until_s: float = 0.0
    awaits: SimEvent | None = None
    coroutine: greenlet.greenlet | None = None
    failure: BaseException | None = None

    def is_alive(self) -> bool:
        return self.coroutine is None or not self.coroutine.dead


class SimEvent:
    """A stand-in for `threading.Event`."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.on = False

    def set(self) -> None:
        self.sim.switch()
        self.on = True

    def clear(self) -> None:
        self.sim.switch()
        self.on = False

    def is_set(self) -> bool:
        return self.on

    def wait(self, timeout: float | None = None) -> bool:
        self.sim.wait(self, math.inf if timeout is None else timeout)
        return self.on


@dataclass(eq=False)
class SimProcess:
    """A rank's threads, which a kill ends together."""

    dead: bool = False
    frozen: bool = False
    weight: float = 1.0


class Sim:
    """The virtual clock and the scheduler."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 1000.0
        self.threads: list[Thread] = []
        self.running: Thread | None = None
        self.switches = 0
        self.main = greenlet.getcurrent()

    def start(self, process: SimProcess, run: Callable[[], None]) -> Thread:
        thread = Thread(process, run)

        def body() -> None:
            with contextlib.suppress(RankKilled, greenlet.GreenletExit):
                run()

        thread.coroutine = greenlet.greenlet(body, parent=self.main)
        self.threads.append(thread)
        return thread

    def switch(self) -> None:
        """Let another thread run, with a probability of 0.2."""
        if self.running is not None and self.chance.random() < 0.2:
            self._yield()

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def wait(self, signal: SimEvent | None, seconds: float) -> None:
        thread = self.running
        if thread is None:
            return
        thread.awaits, thread.until_s = signal, self.now_s + seconds
        self._yield()
        thread.awaits = None

    def _yield(self) -> None:
        thread = self.running
        assert thread is not None
        self.main.switch()
        if thread.process.dead:
            raise RankKilled

    def run_next(self) -> bool:
        """Run one thread to its next stop; return False when all threads wait forever."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        active = [thread for thread in self.threads if not thread.process.frozen]
        ready = [t for t in active if t.until_s <= self.now_s or (t.awaits is not None and t.awaits.on)]
        if not ready:
            ahead = [thread.until_s for thread in active if thread.until_s < math.inf]
            if not ahead:
                return False
            self.now_s = max(self.now_s, min(ahead))
            return True
        if self.chance.random() < 0.3:
            self.now_s += self.chance.choice([1e-5, 1e-4, 1e-3])
        thread = self.chance.choices(ready, [t.process.weight for t in ready])[0]
        thread.until_s = 0.0
        self.switches += 1
        self.running = thread
        assert thread.coroutine is not None
        try:
            thread.coroutine.switch()
        finally:
            self.running = None
        return True

    def end(self, process: SimProcess) -> None:
        process.dead, process.frozen = True, False
        for thread in [t for t in self.threads if t.process is process]:
            self.running = thread
            if thread.coroutine:  # the thread has started
                thread.coroutine.throw(RankKilled)
            self.running = None
        self.threads = [t for t in self.threads if t.process is not process]

    @property
    def time(self) -> Any:
        return SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)

    @property
    def threading(self) -> Any:
        sim = self

        class Started:
            def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
                assert sim.running is not None
                self._process, self._target = sim.running.process, target

            def start(self) -> None:
                self._thread = sim.start(self._process, self._target)

            def join(self, timeout: float | None = None) -> None:
                until_s = sim.now_s + (math.inf if timeout is None else timeout)
                while self._thread.is_alive() and sim.now_s < until_s and sim.running is not None:
                    sim.sleep(0.001)

        def current() -> Any:
            return SimpleNamespace() if sim.running is None else sim.running

        return SimpleNamespace(Event=lambda: SimEvent(sim), Thread=Started, current_thread=current)


def watched(sim: Sim, name: str) -> Any:
    """Return a property for an attribute that several threads use: each access lets the other threads run."""
    held = f"_watched_{name.strip('_')}"

    def get(self: Any) -> Any:
        sim.switch()
        return getattr(self, held)

    def put(self: Any, value: Any) -> None:
        sim.switch()
        setattr(self, held, value)

    return property(get, put)


class SimGroupStore:
    """`group_store.GroupStore` over a dict; each call takes time before and after its effect."""

    def __init__(self, sim: Sim, held: dict[str, bytes], prefix: str) -> None:
        self.sim, self.held, self.prefix = sim, held, prefix

    def _call(self) -> None:
        assert self.sim.running is not None
        slow = self.sim.running.process.weight < 1
        most_s = 0.3 if slow and self.sim.chance.random() < 0.2 else 0.004
        self.sim.sleep(self.sim.chance.random() * most_s)

    def put(self, key: str, value: bytes) -> None:
        self._call()
        self.held[self.prefix + key] = value
        self._call()

    def get(self, key: str) -> bytes | None:
        found = self.get_all([key])
        return None if found is None else found[0]

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        self._call()
        found = [self.held.get(self.prefix + key) for key in keys]
        self._call()
        return None if None in found else found  # type: ignore[return-value]

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        self._call()
        found = self.held.setdefault(self.prefix + key, value)
        self._call()
        return found

    def delete(self, key: str) -> None:
        self._call()
        self.held.pop(self.prefix + key, None)


class SimLink:
    """A rank's view of its sidecar."""

    def __init__(self, epoch: int, tables: Any) -> None:
        self.reply = pb.AttachReply(epoch=epoch, session=f"s{epoch}", run="job", url="sim://")
        self.line = [0] * 8
        self.line[SAVE_AT_STEP] = NEVER
        self.tables = tables
        self.session = "sim"
        self.arena = None

    def is_alive(self, _within_s: float) -> bool:
        return True


class SimSession:
    """A stand-in for a session thread: the world posts its events."""

    def __init__(self, link: SimLink) -> None:
        self.link: SimLink | None = link
        self.events: list[Any] = []
        self.fenced = None
        self.disconnected_s = 0.0

    def next_event(self) -> Any:
        return self.events.pop(0) if self.events else None

    def suspect(self, link: SimLink, why: str) -> None:
        raise GroupViolation(f"the session suspects the sidecar: {why}")

    @contextlib.contextmanager
    def hold_link(self, link: SimLink) -> Iterator[None]:
        yield


class SimParts(SnapshotTaker):
    """The real `SnapshotTaker`, which reports a part to the model instead of copying rows."""

    member: GroupMember

    def _send(self, link: Any, flight: Any, counts: Any, began_s: float, **_: Any) -> SnapshotRows:
        self.member.part(flight.snapshot_id, flight.step)
        flight.mark_staged()
        return SnapshotRows(mode="all")


@dataclass
class SnapshotRecord:
    """A snapshot, as the pods record it."""

    parts: dict[int, int] = field(default_factory=dict)
    """Step by rank."""
    declined: dict[int, str] = field(default_factory=dict)
    notified: set[int] = field(default_factory=set)
    """Ranks that have or will get the result of their part."""


class GroupWorld:
    """One schedule: its store, its attempts and its counts."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.sim = Sim(seed)
        self.chance = self.sim.chance
        self.faults = faults
        self.held: dict[str, bytes] = {}
        self.counts = Counter(schedules=1)
        self.seqs = itertools.count(2)
        self.attempt = 0
        self.zombies: list[GroupMember] = []

    def run(self) -> Counter[str]:
        with self._patched():
            for _ in range(self.chance.randrange(3) if self.faults else 0):
                self._run_attempt(killed=True)
            self._run_attempt(killed=False)
            for zombie in self.zombies:
                self.sim.end(zombie.process)
        self.counts["switches"] = self.sim.switches
        return self.counts

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        sim, rounds = self.sim, type("WatchedRounds", (SnapshotRounds,), {})
        for name in ("limit", "due", "missed", "number"):
            setattr(rounds, name, watched(sim, name))

        def store(prefix: str) -> SimGroupStore:
            return SimGroupStore(sim, self.held, prefix)

        tokens = (f"{n:016x}" for n in itertools.count(1))
        with contextlib.ExitStack() as stack:
            for module in (
                coordinator_threads,
                rendezvous_module,
                closing,
                coordinator,
                outcome,
                save_loop,
                failure_tracker,
                taker,
            ):
                stack.enter_context(mock.patch.object(module, "time", sim.time))
            for module in (coordinator_threads, rendezvous_module, save_loop):
                stack.enter_context(mock.patch.object(module, "threading", sim.threading))
            for module, name, replacement in (
                (coordinator_threads, "GroupStore", store),
                (rendezvous_module, "GroupStore", store),
                (step_clock, "_time_ns", lambda: 0),  # the watchdog does not poll
                (coordinator_threads, "SnapshotRounds", rounds),
                (coordinator_threads, "_live", set()),
                (rendezvous_module, "_numbers", itertools.repeat(1)),
                (rendezvous_module, "secrets", SimpleNamespace(token_hex=lambda _: next(tokens))),
            ):
                stack.enter_context(mock.patch.object(module, name, replacement))
            yield

    def _run_attempt(self, *, killed: bool) -> None:
        self.attempt += 1
        self.counts["attempts"] += 1
        group = SimGroup(self, self.attempt)
        began_s = self.sim.now_s
        kill_step = self.chance.randrange(STEPS) if killed else None
        turns_left = self.chance.randrange(4000)
        while any(not member.done for member in group.members):
            if not self.sim.run_next() or self.sim.now_s - began_s > LIMIT_S:
                raise GroupViolation(f"a rank waits without end: {[m.activity for m in group.members]}")
            for thread in self.sim.threads:
                if thread.failure is not None:
                    raise thread.failure
            if kill_step is not None and max(m.clock.step for m in group.members) >= kill_step:
                turns_left -= 1
                if turns_left <= 0:
                    self._kill_rank(group)
                    return
            for zombie in self.zombies:
                zombie.process.frozen = self.chance.random() < 0.9
        group.check(complete=True)
        for member in group.members:
            self.sim.end(member.process)

    def _kill_rank(self, group: SimGroup) -> None:
        """Kill one rank. The other ranks run for a while and are killed as well, except a zombie."""
        self.counts["kills"] += 1
        victim = self.chance.choice(group.members)
        self.sim.end(victim.process)
        group.killed.add(victim.rank)
        for _ in range(self.chance.randrange(3000)):
            if not self.sim.run_next():
                break
        zombie = self.chance.choice(group.members) if self.chance.random() < 0.5 else None
        for member in group.members:
            if member is zombie and member is not victim and not member.done:
                self.counts["zombies"] += 1
                self.zombies.append(member)
            elif member is not victim:
                self.sim.end(member.process)
            group.killed.add(member.rank)
        group.check(complete=False)


class SimGroup:
    """The ranks of one attempt, and their pods' sidecars."""

    def __init__(self, world: GroupWorld, attempt: int) -> None:
        self.world, self.sim, self.attempt = world, world.sim, attempt
        self.counts = world.counts
        self.killed: set[int] = set()
        self.snapshots: defaultdict[int, SnapshotRecord] = defaultdict(SnapshotRecord)
        self.arrived: defaultdict[int, set[int]] = defaultdict(set)
        self.prefix = ""
        self.script = script(world.chance)
        self.members = [GroupMember(self, rank) for rank in range(RANKS)]
        if world.faults and world.chance.random() < 0.4:
            slow = world.chance.choice(self.members)
            slow.process.weight, slow.slow = 0.1, 10.0
            self.counts["slow"] += 1
        self.pods = SimProcess()

    def collective(self, rank: int, step: int) -> None:
        arrived = self.arrived[step]
        arrived.add(rank)
        while len(arrived) < RANKS:
            self.sim.sleep(0.002)

    def part(self, rank: int, number: int, step: int) -> None:
        snapshot = self.snapshots[number]
        if rank in snapshot.parts:
            raise GroupViolation(f"rank {rank} took snapshot {number} twice")
        snapshot.parts[rank] = step
        if len(set(snapshot.parts.values())) > 1:
            raise GroupViolation(f"snapshot {number} is of steps {snapshot.parts}")
        self.counts["snapshots"] += rank == 0
        self.resolve(number)

        def overdue() -> None:
            self.sim.sleep(PART_S)
            if rank not in snapshot.notified:
                self.counts["overdue"] += 1
                snapshot.declined.setdefault(rank, "the parts of other ranks are missing")
                self.resolve(number)

        self.sim.start(self.pods, overdue)

    def decline(self, rank: int, number: int, why: str) -> None:
        self.counts["declined"] += 1
        self.snapshots[number].declined[rank] = why
        self.resolve(number)

    def resolve(self, number: int) -> None:
        """Report the commit, or the failure, to each rank at a separate time."""
        snapshot = self.snapshots[number]
        if self.killed:
            return
        if snapshot.declined:
            for rank in snapshot.parts.keys() - snapshot.notified:
                snapshot.notified.add(rank)
                notice = pb.Notice()
                notice.save_failed.snapshot_id, notice.save_failed.cause = number, "abandoned"
                notice.save_failed.message = f"declined: {snapshot.declined}"
                self._later(rank, notice)
        elif len(snapshot.parts) == RANKS and not snapshot.notified:
            snapshot.notified |= snapshot.parts.keys()
            self.counts["commits"] += 1
            seq = next(self.world.seqs)
            for rank, step in snapshot.parts.items():
                commit = pb.Commit(
                    seq=seq, attempt=self.attempt, snapshot_id=number, step=step, baseline=True
                )
                self._later(rank, pb.Notice(committed=commit))

    def _later(self, rank: int, notice: Any) -> None:
        member = self.members[rank]
        wait_s = self.sim.chance.choice([0.001, 0.01, 0.1, 1.0]) * self.sim.chance.random()

        def post_later() -> None:
            self.sim.sleep(wait_s)
            member.post(notice)

        self.sim.start(self.pods, post_later)

    def check(self, *, complete: bool) -> None:
        for key, text in self.world.held.items():
            if not self.prefix or not key.startswith(f"{self.prefix}verdict/"):
                continue
            number, at = int(key.rpartition("/")[2]), RoundVerdict.of(text).at
            snapshot = self.snapshots.get(number, SnapshotRecord())
            if at is None:
                self.counts["cancelled"] += 1
                if snapshot.parts:
                    raise GroupViolation(f"snapshot {number} was cancelled, and taken: {snapshot}")
                continue
            if any(step < at for step in snapshot.parts.values()):
                raise GroupViolation(f"snapshot {number} was granted at {at}, and is {snapshot}")
            missing = set(range(RANKS)) - snapshot.parts.keys() - snapshot.declined.keys()
            if complete and snapshot.parts and missing and not snapshot.declined:
                raise GroupViolation(
                    f"snapshot {number} was granted at {at}: ranks {missing} neither took nor declined it: {snapshot}"
                )


def script(chance: random.Random) -> dict[int, tuple[str, str]]:
    """Return the program of all ranks: step -> ("save" or "pin", when to wait for it: "wait" (at once), "later" or "")."""
    found = {}
    for step in range(1, STEPS + 1):
        if chance.random() < 0.12:
            found[step] = chance.choice(["save", "save", "pin"]), chance.choice(["wait", "wait", "later", ""])
    return found


class GroupMember:
    """A rank: its process, the real objects of its Checkpointer, its program."""

    def __init__(self, group: SimGroup, rank: int) -> None:
        self.group, self.rank, self.sim = group, rank, group.sim
        self.chance = random.Random(group.sim.chance.random())
        self.process = SimProcess()
        self.slow = 1.0
        self.done = False
        self.activity = "start"
        self.vetoes = False
        self.fails = False
        self.pace_s = 0.01 * self.chance.choice([0.1, 1, 1, 10])
        self._build()
        self.thread = self.sim.start(self.process, self._main)

    def _build(self) -> None:
        sim, rank = self.sim, self.rank
        tracking = Tracking(nn.Linear(1, 1), [])
        program = Program(tracking, {})
        clock_type = type("WatchedClock", (StepClock,), {"step": watched(sim, "step")})
        self.clock = clock_type(tracking)
        self.clock._wake = SimEvent(sim)
        self.link = SimLink(1, program.schemas)
        self.session: Any = SimSession(self.link)
        self.session.post = self.post
        attachment = SidecarAttachment(self.session, self.link, self.clock)  # type: ignore[arg-type]
        self.attempt = TrainingAttempt()
        self.attempt.transition(AttachEvent.ATTACH)
        listener = Listener(None, lambda: 0)
        self.failure_tracker = SaveFailureTracker(self.clock, stats := Stats(), listener)
        records = SaveRecords(
            requests=Requests(self.failure_tracker), failure_tracker=self.failure_tracker, stats=stats,
            watchdog=Watchdog(self.clock, listener, timer=lambda: (0.0, 0), now_s=lambda: 0.0),
        )  # fmt: skip
        loaders = LoaderRegistry(lambda: self.clock.step)
        loop = TrainingLoop(
            program=program,
            loaders=loaders,
            clock=self.clock,
            step_boundary=StepBoundaryMonitor(tracking, self.clock),
        )
        member = RunMember(
            rank=Rank(number=rank, local=rank, world_size=RANKS), attempt=self.attempt,
            attachment=attachment, listener=listener,
        )  # fmt: skip
        base = SnapshotBase()
        precopy = PrecopyScheduler(loop, member, records, base=base, enabled=True)
        precopy.streams = self  # type: ignore[assignment]  # `open`, `take`
        self.outcomes = SnapshotOutcomes(loop, member, records, base=base, precopy=precopy)
        parts = SimParts(
            loop, member, records, self.outcomes, base=base, contents=None, validate=self._validate
        )
        parts.member = self

        def not_ready_reason(urgent: bool) -> str:
            if self.outcomes.in_flight:
                return MESSAGE[BlockReason.IN_FLIGHT]
            if attachment.link is None:
                return MESSAGE[BlockReason.SIDECAR_DISCONNECTED]
            return MESSAGE[BlockReason.BACK_OFF] if self.failure_tracker.backing_off and not urgent else ""

        coordinator_type = type(
            "WatchedThread", (CoordinatorThread,), {n: watched(sim, n) for n in ("_request", "_held_step")}
        )
        with mock.patch.object(sim, "running", None):
            self.coordinator_thread = coordinator_type(
                rank, RANKS, clock=self.clock, not_ready_reason=not_ready_reason
            )
        rounds = SnapshotCoordinator(self.coordinator_thread, loop, member, records, self.outcomes, parts)
        self.loop_of = lambda: SaveLoop(
            loop, member, records, self.outcomes, parts, opener=SimpleNamespace(), coordinator=rounds
        )
        self.last_of = lambda: LastSnapshot(
            loop, member, records, self.outcomes, parts, save_loop=self.loop, coordinator=rounds
        )

    def open(self) -> None:
        """See `PreopenedStream`."""

    def take(self, link: Any) -> Any:
        """See `PreopenedStream`; called only for a snapshot that this rank declines."""
        snapshot_ids: list[int] = []

        def abort(why: str) -> None:
            self.group.decline(self.rank, snapshot_ids[0], why)

        return SimpleNamespace(begin=lambda begin, _: snapshot_ids.append(begin.snapshot_id), abort=abort)

    def part(self, snapshot_id: int, step: int) -> None:
        self.sim.sleep(self.chance.random() * 0.02 * self.slow)
        if self.fails:
            self.fails = False
            self.group.counts["failed_parts"] += 1
            self.group.decline(self.rank, snapshot_id, "failed")
            raise SnapshotFailed("error", "injected fault")
        if self.link.line[URGENT]:
            self.link.line[URGENT] = 0
        self.link.line[SAVE_AT_STEP] = NEVER
        self.group.part(self.rank, snapshot_id, step)

    def _validate(self) -> bool:
        if self.vetoes:
            self.vetoes = False
            self.group.counts["vetoes"] += 1
            return False
        return True

    def post(self, event: Any) -> None:
        self.session.events.append(event)
        self.clock.wake()

    def _main(self) -> None:
        try:
            self._train()
            self.done = True
        except RankKilled:
            raise
        except BaseException as error:
            self.thread.failure = error

    def _train(self) -> None:
        group = self.group
        self.sim.sleep(self.chance.random())
        rendezvous = Rendezvous(self.rank, RANKS, b"")
        group.prefix = f"{rendezvous.prefix}1/"
        self.attempt.grant(group.attempt, "")
        self.attempt.begin(group.attempt, resumed_step=None)
        self.loop = self.loop_of()
        self.coordinator_thread.begin(group.prefix)
        later: SaveHandle | None = None
        for step in range(1, STEPS + 1):
            self.activity = f"collective of step {step}"
            self.sim.sleep(self.pace_s * self.slow * self.chance.random())
            group.collective(self.rank, step)
            self._inject_fault(step)
            self.activity = f"step {step}"
            self._step()
            group.counts["steps"] += self.rank == 0
            if later is not None:
                self._wait(later, step)
                later = None
            what, wait = group.script.get(step, ("", ""))
            if what:
                later = self._save(what, wait, step)
            if self.chance.random() < 0.04:
                self.loop.submit(SaveHandle(reason="own", pin=None, metadata={}, waiter=self.loop.wait))
        self.activity = "close"
        self.last_of().finish(self.sim.now_s + 100.0)
        if self.outcomes.committed_step != STEPS:
            raise GroupViolation(f"rank {self.rank} closed, and step {STEPS} is not committed")
        self.coordinator_thread.close()
        self.outcomes.close(until_s=self.sim.now_s)
        group.counts["held"] += self.coordinator_thread.held_s > 0

    def _step(self) -> None:
        began_s = self.sim.now_s
        if self.clock.begin_step():
            self.loop.boundary(at_step=True)
        self.clock.end_step()
        took_s = self.sim.now_s - began_s
        if took_s > HOLD_S + EXACT_TIMEOUT_S + HOLD_S + 5:
            raise GroupViolation(f"rank {self.rank}: step {self.clock.step} was held for {took_s:.0f} s")

    def _inject_fault(self, step: int) -> None:
        """Inject requests and faults of the pod while training continues."""
        if self.rank == 0 and self.chance.random() < 0.06:
            self.link.line[SAVE_AT_STEP] = step + self.chance.randrange(6)
        if self.chance.random() < 0.01:
            self.link.line[URGENT] = 1
            self.clock.request_boundary()
        if not self.group.world.faults or step > STEPS - CALM:
            self.vetoes = self.fails = False
            return
        self.vetoes = self.vetoes or self.chance.random() < 0.01
        self.fails = self.fails or self.chance.random() < 0.01
        if self.chance.random() < 0.005 and self.session.link is not None:
            self.group.counts["disconnects"] += 1
            self.session.link = None
            self.post(Lost(why="gone"))
            wait_s = self.chance.random() * 3

            def reattach() -> None:
                self.sim.sleep(wait_s)
                self.link = SimLink(self.link.reply.epoch + 1, self.link.tables)
                self.session.link = self.link
                self.post(Attached(link=self.link))

            self.sim.start(self.process, reattach)

    def _save(self, what: str, wait: str, step: int) -> SaveHandle | None:
        pin = f"pin-{step}" if what == "pin" else None
        self.group.counts["pins"] += pin is not None
        handle = SaveHandle(reason="user", pin=pin, metadata={}, waiter=self.loop.wait)
        self.activity = f"{what} {wait} at step {step}"
        self.loop.submit(handle)
        if wait == "wait":
            self._wait(handle, step)
        return handle if wait == "later" else None

    def _wait(self, handle: SaveHandle, step: int) -> None:
        self.activity = f"wait at step {step} for {handle}"
        self.group.counts["waits"] += 1
        began_s = self.sim.now_s
        try:
            handle.wait()
        except WaitError as error:
            raise GroupViolation(
                f"rank {self.rank}, step {step}, after {self.sim.now_s - began_s:.0f} s: {error}"
            ) from error
        except SaveFailed:
            self.group.counts["waits_failed"] += 1
            self.group.counts["pins_failed"] += handle.pin is not None


def run_schedule(seed: int, *, faults: bool = True) -> Counter[str]:
    """Run one schedule; raise `GroupViolation` when an invariant does not hold."""
    try:
        return GroupWorld(seed, faults=faults).run()
    except GroupViolation as error:
        raise GroupViolation(f"schedule {seed}: {error}") from error
