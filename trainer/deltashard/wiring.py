"""Object graph of one Checkpointer, built once from its configuration.

Each part writes only its own fields. Parts share two records: the program in its loop (`TrainingLoop`) and this process
as a member of its run (`RunMember`).

A process may have several graphs, of different runs. Process-wide hooks (uncaught errors, forks) reach all of them
here.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deltashard_proto.block_reason import BlockReason

from deltashard.attach import exit_code
from deltashard.attach.attachment import Listener, RunMember, SidecarAttachment
from deltashard.attach.launcher import (
    ChildLauncher,
    Launcher,
    PodLauncher,
    SidecarOptions,
    normal_url,
)
from deltashard.attach.lifecycle import AttachEvent, TrainingAttempt
from deltashard.attach.rank import Rank, rank_of_this_process
from deltashard.attach.session import Link, SidecarSession
from deltashard.attach.term_signal import TermHandler
from deltashard.config import CheckpointConfig
from deltashard.errors import AnotherTrainer, UserError
from deltashard.group.coordinator_thread import CoordinatorThread
from deltashard.loader.registry import LoaderRegistry
from deltashard.program import Program, TrainingLoop
from deltashard.restore.content_hash import ContentHashes
from deltashard.restore.open_attempt import AttemptOpener, attach_request
from deltashard.restore.recovery_plan import PlanContext, create_plan
from deltashard.restore.restore import Restorer
from deltashard.save.closing import LastSnapshot
from deltashard.save.coordinator import SnapshotCoordinator
from deltashard.save.failure_tracker import SaveFailureTracker
from deltashard.save.handle import Stats
from deltashard.save.outcome import SnapshotOutcomes
from deltashard.save.precopy_scheduler import PrecopyScheduler
from deltashard.save.records import SaveRecords
from deltashard.save.request import Requests
from deltashard.save.save_loop import SaveLoop
from deltashard.save.snapshot_gate import MESSAGE
from deltashard.save.taker import SnapshotTaker
from deltashard.save.watchdog import Watchdog
from deltashard.tracking.snapshot_base import SnapshotBase
from deltashard.tracking.step_boundary import StepBoundaryMonitor
from deltashard.tracking.step_clock import StepClock
from deltashard.tracking.tracking import Tracking

log = logging.getLogger("deltashard")

RELEASE_S = 10.0
"""Seconds that detaching from the sidecar may take, within the deadline of `close()`."""


class Wiring:
    """All parts of one Checkpointer; building them attaches to the sidecar, or starts it."""

    def __init__(self, config: CheckpointConfig, stats: Stats) -> None:
        self.rank = rank_of_this_process("Checkpointer()")
        self.stats = stats
        self.listener = Listener(config.on_event, stats.count_event_error)
        self.program = Program(
            Tracking(
                config.model,
                config.optimizer,
                settings=config.tracking,
                report=self._tracked,
                rank=self.rank.number,
                world_size=self.rank.world_size,
            ),
            config.state or {},
        )
        if self.rank.alone:  # with several ranks, each may have tables that the others do not have
            config.check_tables(schema.fqn for schema in self.program.schemas)
        self.clock = StepClock(self.program.tracking)
        self.step_boundary = StepBoundaryMonitor(self.program.tracking, self.clock)
        self.loaders = LoaderRegistry(
            lambda: self.clock.step, state=self.program.state, sources=self.program.sources
        )
        self.attempt = TrainingAttempt()
        exit_code.install(_uncaught)
        self.launcher = _launcher(config, self.rank)
        self.session, link = self._connect()
        self.attempt.transition(AttachEvent.ATTACH)
        self.attachment = SidecarAttachment(self.session, link, self.clock)
        self.forked = False
        """Whether this is a forked child; all resources then belong to the parent."""
        self.term: TermHandler | None = None
        """None if no SIGTERM handler is installed."""
        try:
            self._assemble(config)
        except BaseException:
            self._release(time.monotonic() + RELEASE_S)
            raise
        _live.add(self)

    def _tracked(self, name: str, facts: Mapping[str, Any]) -> None:
        """Queue an event that tracking found within an optimizer's step, for the next boundary."""
        if name == "optimizer_state_reset":
            self.stats.optimizer_state_resets += 1
        self.session.post(lambda: self.listener.emit(name, **facts))

    def _connect(self) -> tuple[SidecarSession, Link]:
        """Attach; after an error, remove everything that was installed in the program."""
        try:
            self._check_single_instance()
            session = SidecarSession(
                self.launcher,
                request=lambda: attach_request(self.program, self.rank, *self.attempt.granted),
                schemas=lambda: self.program.schemas,
                wake=self.clock.wake,
                local_rank=self.rank.local,
            )
            return session, session.connect()
        except BaseException:
            self.launcher.close()
            self.step_boundary.close()
            self.program.tracking.close()
            raise

    def _check_single_instance(self) -> None:
        """Reject a second Checkpointer of the run, which the lock between processes does not exclude."""
        for other in list(_live):
            if other.launcher.location == self.launcher.location and other.session.fenced is None:
                raise AnotherTrainer(
                    "another Checkpointer of this process already trains this run",
                    where=str(self.launcher.location),
                    remedy="close() it first; use another run name only to train another model",
                )

    def _assemble(self, config: CheckpointConfig) -> None:
        clock, attachment, listener = self.clock, self.attachment, self.listener
        loop = TrainingLoop(
            program=self.program, loaders=self.loaders, clock=clock, step_boundary=self.step_boundary
        )
        member = RunMember(rank=self.rank, attempt=self.attempt, attachment=attachment, listener=listener)
        context = PlanContext(config=config, loop=loop, member=member, launcher=self.launcher)
        self.plan = plan = create_plan(context)
        contents = ContentHashes() if config.content_hash_enabled else None
        base = SnapshotBase(config.planned_steps or 0, plan.pls_target)
        failure_tracker = SaveFailureTracker(clock, self.stats, listener)
        requests = Requests(failure_tracker)
        self.records = records = SaveRecords(
            requests=requests,
            failure_tracker=failure_tracker,
            stats=self.stats,
            watchdog=Watchdog(
                clock, listener, timer=lambda: (attachment.policy.every_s, attachment.policy.every_steps)
            ),
            term=self._handle_term(config.grace_s, requests),
        )
        precopy = PrecopyScheduler(
            loop, member, records, base=base, enabled=config.precopy_enabled and contents is None
        )
        self.outcomes = SnapshotOutcomes(loop, member, records, base=base, precopy=precopy)
        self.taker = SnapshotTaker(
            loop,
            member,
            records,
            self.outcomes,
            base=base,
            contents=contents,
            validate=config.validate,
            metadata=lambda: plan.metadata,
        )
        self.coordinator_thread = coordinator = None
        if not self.rank.alone:
            self.coordinator_thread = CoordinatorThread(
                self.rank.number, self.rank.world_size, clock=clock, not_ready_reason=self._block_message
            )
            coordinator = SnapshotCoordinator(
                self.coordinator_thread, loop, member, records, self.outcomes, self.taker
            )
        opener = AttemptOpener(
            loop,
            member,
            apply_notifications=self.outcomes.apply,
            fresh=config.fresh,
            coordinator_thread=self.coordinator_thread,
            plan=plan,
        )
        self.restorer = Restorer(
            loop,
            member,
            opener=opener,
            base=base,
            contents=contents,
            plan=plan,
        )
        self.save_loop = SaveLoop(
            loop,
            member,
            records,
            self.outcomes,
            self.taker,
            opener=opener,
            coordinator=coordinator,
        )
        self.last_snapshot = LastSnapshot(
            loop,
            member,
            records,
            self.outcomes,
            self.taker,
            save_loop=self.save_loop,
            coordinator=coordinator,
        )
        plan.watch(base, lambda step: self.taker.capture.blobs(step, None, all_here=True), records.term)

    def _handle_term(self, grace_s: float | str | None, requests: Requests) -> TermHandler | None:
        def on_sigterm() -> None:
            requests.request_urgent("sigterm")
            self.clock.request_boundary()

        def until_end_s() -> float:
            return self.attachment.grace_s if grace_s == "auto" else float(grace_s or 0.0)

        term = None if grace_s is None else TermHandler(grace_s=until_end_s, notice=on_sigterm)
        self.term = term if term is not None and term.install() else None
        return self.term

    def _block_message(self, urgent: bool) -> str:
        """Return why this rank cannot take a snapshot now, for the other ranks; called on the rounds' thread."""
        if self.coordinator_thread is not None and self.coordinator_thread.sums:
            return "tensors replicated on all ranks differ between ranks"
        if self.outcomes.in_flight:
            return MESSAGE[BlockReason.IN_FLIGHT]
        if self.attachment.link is None:
            return MESSAGE[BlockReason.SIDECAR_DISCONNECTED]
        return (
            MESSAGE[BlockReason.BACK_OFF] if self.records.failure_tracker.backing_off and not urgent else ""
        )

    def close(self, until_s: float) -> None:
        """Release everything by `until_s` (monotonic), whatever is in flight."""
        self.attempt.transition(AttachEvent.CLOSE)
        # Returns the arena's line; from now on every step has a boundary, which rejects it.
        self.clock.detach()
        guarded(self.plan.close)
        if self.term is not None:
            self.term.remove()
        if self.coordinator_thread is not None:
            self.coordinator_thread.close()
        try:
            self.taker.close()
            self.outcomes.close(until_s=min(until_s, time.monotonic() + RELEASE_S / 2))
        finally:
            self._release(until_s)
            _live.discard(self)

    def _release(self, until_s: float) -> None:
        """Leave the program and the sidecar by `until_s` (monotonic), however much was built."""
        if self.term is not None:
            self.term.remove()
        self.session.close(until_s=min(until_s, time.monotonic() + RELEASE_S))
        self.launcher.close()
        self.step_boundary.close()
        self.loaders.close()
        self.program.tracking.close()


def _launcher(config: CheckpointConfig, rank: Rank) -> Launcher:
    socket_path = os.environ.get("DELTASHARD_SOCKET")
    if socket_path:
        return PodLauncher(Path(socket_path))
    url = config.url or os.environ.get("DELTASHARD_URL")
    run = config.run or os.environ.get("DELTASHARD_RUN")
    if not url or not run:
        raise UserError(
            f"no {'url' if not url else 'run'} was given, and there is no sidecar in this pod",
            where="Checkpointer()",
            remedy='pass url="file:///some/dir" and run="name" (or set DELTASHARD_URL and DELTASHARD_RUN); in '
            "Kubernetes, check the annotation deltashard.io/policy on the Job",
        )
    options = SidecarOptions(url=normal_url(url), run=run, flags=config.sidecar_settings)
    return ChildLauncher(options, rank)


def guarded(call: Callable[..., object], *arguments: object) -> object:
    """Call an extension and log its errors, so that they neither hide the user's error nor stop the caller."""
    try:
        return call(*arguments)
    except Exception:
        log.exception("the recovery plan failed")
        return None


_live: weakref.WeakSet[Wiring] = weakref.WeakSet()


def _uncaught(error: BaseException) -> None:
    """Pass an error that ends the program to the recovery plans, as it may come from a collective."""
    for wiring in list(_live):
        guarded(wiring.plan.handle_error, error)


def _after_fork_in_child() -> None:
    for wiring in list(_live):
        wiring.forked = True
        wiring.clock.reset_after_fork()
        wiring.step_boundary.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
