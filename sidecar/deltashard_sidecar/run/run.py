"""The run of a sidecar: its store, log, cache and attempts.

The first request to the store is made when a trainer opens an attempt, or by the background read of the log at start.
A save is planned from the state known so far; the commit validates it again at its log slot. Each session commits
through a separate log handle, so a commit that waits for an unreachable store does not keep another trainer from
opening.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.format.index import table_message
from deltashard_checkpoint.format.object_key import new_token, run_key
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint, entry_key
from deltashard_checkpoint.log.log_error import LogRemoved, stopped
from deltashard_checkpoint.log.manifest import Manifests
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.log.selection import select
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import AccessDenied, BucketMissing, Store, StoreFull
from deltashard_checkpoint.stores.deadline import deadline
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.vocabulary import PLS_KEY
from deltashard_checkpoint.write.attempt import ResumeBasis, open_attempt, read_unopened
from deltashard_checkpoint.write.closing import CLOSING_WAIT_S
from deltashard_checkpoint.write.commit_wait import CommitLatency
from deltashard_checkpoint.write.report import ReportBodyCache
from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard_sidecar.run.bit_choice import BitChoice
from deltashard_sidecar.run.chain_watch import ChainWatch
from deltashard_sidecar.run.identity import identity
from deltashard_sidecar.run.participation import Participation
from deltashard_sidecar.run.run_bootstrap import RunBootstrap
from deltashard_sidecar.run.snapshot_content import SnapshotContents
from deltashard_sidecar.run.store_health import StoreHealth
from deltashard_sidecar.run.synthetic_baseline import SyntheticBaselines
from deltashard_sidecar.session.attachment import Attachment
from deltashard_sidecar.settings import Settings
from deltashard_sidecar.telemetry.incident import Incidents
from deltashard_sidecar.telemetry.metric import Metrics
from deltashard_sidecar.telemetry.structured_logging import Logger, explain

REATTACH_DEADLINE_S = 5.0
"""Longest time that a trainer that re-attaches during its run waits for its last commit to be read."""
LATE_DEADLINE_S = 3.0
OPEN_RETRY_S = 0.5
REMOVED_CHECK_S = 1.0
"""For checking whether a removed run exists again; training waits for it at the begin of a save."""
SHARED_IDLE_S = 60.0
"""Shared reads of a restore are kept for this time after the last one."""


def commit_message(entry: Checkpoint, *, baseline: bool | None = None) -> pb.Commit:
    """Return the message about a checkpoint; `baseline`: whether the rank's part is one, None: whether all are."""
    same = ("seq", "attempt", "snapshot_id", "step", "stored_bytes", "raw_bytes", "rows")
    values = {name: getattr(entry, name) for name in same}
    return pb.Commit(baseline=entry.baseline if baseline is None else baseline, **values)


class Run:
    """The run of a sidecar. Thread-safe."""

    def __init__(self, settings: Settings, *, metrics: Metrics, log: Logger) -> None:
        self.settings = settings
        self.incidents = Incidents(metrics, has_controller=bool(settings.fleet))
        self.health = StoreHealth(self.incidents, metrics=metrics, log=log)
        self.store: Store = open_store(settings.url, observer=self.health)
        self.cache = PackCache(
            Path(settings.cache_dir),
            budget_bytes=settings.cache_bytes,
            removed=lambda: log.warning(
                "cache.recreated",
                what="the cache directory was removed: the next restore reads from the store",
                where=str(settings.cache_dir),
                remedy="do not touch it while a sidecar runs",
            ),
        )
        self.synthetic = SyntheticBaselines(settings, self.cache)
        self.identity = identity(settings)
        self.participation = Participation(settings.cache_dir.parent if settings.pod_uid else None, log)
        self.log = RunLog(self.store, self.identity.run)
        self.removed: str | None = None
        """Error of the save or Open that found the run removed; None: it is not removed."""
        self._bootstrap = RunBootstrap(settings.restore_from, self.store, self.identity, self.cache, log)
        self.token = new_token()
        self.report_bodies = ReportBodyCache()
        self.latency = CommitLatency()
        self.metrics = metrics
        self.chains = ChainWatch(self.store, metrics=metrics, log=log)
        self.bits = BitChoice(log=log)
        self.snapshot_contents = SnapshotContents(self.bits, self.chains, self.synthetic)
        self._shared = SharedReads()
        self._manifests: dict[str, Manifests] = {}
        self.logger = log
        self._lock = threading.Lock()
        self._logs: dict[str, RunLog] = {}
        self._newest_state: RunState | None = None

    @property
    def name(self) -> str:
        return self.identity.run

    def close(self) -> None:
        self.cache.close()
        self.store.close()

    def read_log(self, log: RunLog, *, deadline_s: float) -> bool:
        """Read the log to its tip; returns False if the store does not answer in time. Writes nothing."""
        try:
            log.refresh(deadline_s=deadline_s)
        except DeltashardError as error:
            self.logger.warning("log.read_failed", **explain(error))
            return False
        return True

    def state(self) -> RunState:
        """Return the newest state that any handle has read, without a request to the store."""
        with self._lock:
            seen = [self.log.state, *(log.state for log in self._logs.values())]
            before = [] if self._newest_state is None else [self._newest_state]
            self._newest_state = max(seen + before, key=lambda state: state.tip)
            return self._newest_state

    def log_of(self, attachment: Attachment) -> RunLog:
        with self._lock:
            return self._logs.get(attachment.id, self.log)

    def release_unused(self, used: Callable[[], set[str]]) -> None:
        self._shared.release_idle(idle_s=SHARED_IDLE_S)
        with self._lock:
            held = set(self._logs)
        # In this order: a session attaches before it gets a handle, so a handle's session that is not in use has ended.
        if held and (over := held - used()):
            self.state()  # keeps the newest state of the handles
            with self._lock:
                for session_id in over:
                    self._logs.pop(session_id, None)

    def shared(self, attachment: Attachment) -> SharedReads | None:
        """Return the reads shared between the pod's ranks; None for a trainer without peers."""
        return self._shared if attachment.world_size > 1 else None

    def manifests_of(self, run: str) -> Manifests:
        with self._lock:
            if run not in self._manifests:
                self._manifests = {run: Manifests(self.store, run)}
            return self._manifests[run]

    def resume(self, attachment: Attachment, attempt: int) -> pb.Commit | None:
        """Return the last commit of the attempt that a trainer continues, or None if the store does not answer."""
        log = self.log.fork()
        with deadline(REATTACH_DEADLINE_S):  # limits each request as well: the trainer waits
            self.read_log(log, deadline_s=REATTACH_DEADLINE_S)
        with self._lock:
            self._logs[attachment.id] = log
        self.participation.record(self.name, attempt)
        opened = log.state.attempts.get(attempt)
        seq = None if opened is None else opened.last_seq
        entry = None if seq is None else log.state.checkpoints.get(seq)
        return None if entry is None else commit_message(entry)

    def open(
        self, request: pb.OpenRequest, attachment: Attachment, *, gone: Callable[[], bool], step_seen: int
    ) -> pb.OpenReply:
        """Open an attempt for a trainer; raises the errors of `open_attempt` and of reading `from_run`.

        In a pod, faults that a person must fix elsewhere (a Secret, a bucket, a quota) are waited for until the
        trainer is `gone`. The store's health reports them meanwhile; a restart of the container would only add the
        pod's back-off. If the store is readable but rejects writes, the reply has no attempt but a basis to restore
        from. The trainer calls again with it (`OpenRequest.basis`), and that call does not wait.
        """
        if request.HasField("basis"):
            with deadline(LATE_DEADLINE_S):  # training is paused meanwhile
                return self._open(request, attachment, step_seen=0, deadline_s=LATE_DEADLINE_S)
        until_s = time.monotonic() + self.settings.open_deadline_s
        while True:
            try:
                left_s = max(0.0, until_s - time.monotonic())
                return self._open(request, attachment, step_seen=step_seen, deadline_s=left_s)
            except LogRemoved as error:
                if self.removed is not None:
                    raise
                self.removed = str(error)
            except (AccessDenied, BucketMissing, StoreFull) as error:
                if (
                    reply := self._read_only_reply(request, attachment, error, step_seen=step_seen)
                ) is not None:
                    return reply
                if not self.settings.workload_uid or gone() or time.monotonic() >= until_s:
                    raise
                time.sleep(OPEN_RETRY_S)

    def _source(
        self, request: pb.OpenRequest, deadline_s: float
    ) -> tuple[RunState | None, Checkpoint | None, str]:
        which = request.which or "latest"
        if not request.from_run:
            return None, None, which
        read = RunLog(self.store, request.from_run).refresh(deadline_s=deadline_s)
        if read.damage() is not None and not read.checkpoints:
            raise stopped(read)
        return read, select(read, which, request.exclude_seqs), "none"

    def _read_only_reply(
        self, request: pb.OpenRequest, attachment: Attachment, refusal: DeltashardError, *, step_seen: int
    ) -> pb.OpenReply | None:
        """Return the reply for a store that is readable but rejects writes; None if there is nothing to restore.

        Also None with several ranks: all of them need the attempt's number for the names of their objects.
        """
        if attachment.world_size > 1:
            return None
        log = self.log.fork()
        try:
            read, source, which = self._source(request, LATE_DEADLINE_S)
            state, chosen, basis = read_unopened(
                log,
                owner=self.identity.owner,
                workload=self.settings.workload_uid,
                pod=self.settings.pod_uid,
                participated_attempt=max(request.participated_attempt, self.participation.newest(self.name)),
                which=which,
                exclude=() if request.from_run else request.exclude_seqs,
                takeover=request.takeover,
                deadline_s=LATE_DEADLINE_S,
            )
        except (AccessDenied, BucketMissing, StoreFull):
            return None
        resume = source or chosen
        if resume is None:
            return None
        with self._lock:
            self._logs[attachment.id] = log
        self.logger.warning("attempt.open_deferred", **explain(refusal))
        damage = (read or state).damage() or ""
        reply = pb.OpenReply(
            basis=pb.Basis(attempt=basis.attempt, resume_seq=basis.resume, token=basis.token),
            deferred_reason=str(refusal),
            fell_back=damage != "" and (request.which or "latest") == "latest",
            log_damage=damage,
        )
        self._describe(reply, resume, step_seen=step_seen)
        return reply

    def _open(
        self, request: pb.OpenRequest, attachment: Attachment, *, step_seen: int, deadline_s: float
    ) -> pb.OpenReply:
        known = self.state().tip
        if not request.HasField("basis"):
            self._bootstrap.ensure(request, deadline_s=deadline_s)
        log = self.log.fork() if self.removed is None else RunLog(self.store, self.name)
        read, source, which = self._source(request, deadline_s)
        damage = "" if read is None else read.damage() or ""
        lost = damage != "" and (request.which or "latest") == "latest"
        basis: ResumeBasis | None = None
        if request.HasField("basis"):
            given = request.basis
            seq = given.resume_seq if given.HasField("resume_seq") else None
            basis = ResumeBasis(attempt=given.attempt, resume=seq, token=given.token)
        opened = open_attempt(
            log,
            owner=self.identity.owner,
            workload=self.settings.workload_uid,
            pod=self.settings.pod_uid,
            participated_attempt=max(request.participated_attempt, self.participation.newest(self.name)),
            world_size=attachment.world_size,
            layout=request.layout or None,
            which=which,
            exclude=() if request.from_run else request.exclude_seqs,
            takeover=request.takeover,
            closing_wait_s=min(CLOSING_WAIT_S, deadline_s),
            deadline_s=deadline_s,
            basis=basis,
        )
        if opened.attempt <= known:
            self._reset_log()
        with self._lock:
            self._logs[attachment.id] = log
        self.removed = None
        self.participation.record(self.name, opened.attempt)
        damage = "; ".join(filter(None, (damage, opened.damage, self._debris(opened.state))))
        if damage:
            self.metrics.log_damaged.inc()
            self.logger.error("log.damaged", what=damage, voided=opened.voided)
        resume = source or opened.resume
        reply = pb.OpenReply(
            attempt=opened.attempt,
            waited_s=opened.waited_s,
            fell_back=opened.fell_back or lost,
            log_damage=damage,
            layout=opened.state.attempts[opened.attempt].layout,
        )
        if earlier := [number for number in opened.state.attempts if number < opened.attempt]:
            reply.previous_attempt = max(earlier)
        self.bits.opened(opened.attempt, resume, read or opened.state)
        if resume is not None:
            self._describe(reply, resume, step_seen=step_seen)
        return reply

    def _describe(self, reply: pb.OpenReply, resume: Checkpoint, *, step_seen: int) -> None:
        self.metrics.resumed(step=resume.step, at_s=resume.at_s)
        self.metrics.record_lost_samples(resume.metadata.get(PLS_KEY, "0"))
        reply.resume_seq = resume.seq
        reply.step = resume.step
        reply.snapshot_id = resume.snapshot_id
        reply.resume_attempt = resume.attempt
        reply.fingerprint.update(resume.fingerprint)
        reply.tables.extend(table_message(table) for table in resume.tables)
        reply.metadata.update(resume.metadata)
        if step_seen > 0:
            reply.last_step_seen = step_seen

    def _reset_log(self) -> None:
        """Replace log and token: the run was removed and begun again, and object names must not be reused."""
        with self._lock:
            self.log = RunLog(self.store, self.name)
            self.token = new_token()
            self._logs.clear()
            self._newest_state = None

    def _debris(self, state: RunState) -> str:
        """Return a warning if a new run begins at a name that already has data; otherwise an empty string."""
        if state.tip > 1 or next(iter(self.store.list(run_key(self.name, "data/"))), None) is None:
            return ""
        return (
            "this run starts without a log at a name that already has data: an interrupted copy (copy to another "
            "name), a removal (run `deltashard rm` first), or saves whose log was lost (run `deltashard scan`)"
        )

    def still_removed(self, attachment: Attachment, attempt: int) -> str | None:
        """Return why a save of this attempt must not write: the run was removed; None: the run exists.

        A request is made only after a removal was seen. Each save checks again, because the removal may be temporary,
        such as a directory that was mounted elsewhere.
        """
        log = self.log_of(attachment)
        if self.removed is not None:
            with suppress(DeltashardError), deadline(REMOVED_CHECK_S):
                if log.state.tip < 0:
                    log.store.head(log.key(entry_key(attempt)))
                    self.removed = None
                elif log.read_slot(log.state.tip).hash == log.state.tip_hash:
                    self.removed = None
        return self.removed
