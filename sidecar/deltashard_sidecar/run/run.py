"""The run as this sidecar sees it: store, log, cache, attempts, and what trainers learn of them.

The store is first asked when a trainer opens an attempt, or by the background look at the log at start. Decisions at a
cut are made from what is known already; the commit judges again, at its slot. Every session commits through a handle of
its own on the log, so that a commit which waits for a store that is down never keeps another trainer from opening.
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
"""A trainer that re-attaches in the middle of its run waits no longer for news of its last commit."""
LATE_DEADLINE_S = 3.0
"""For reading what a full store holds, and for each try to open an attempt late."""
OPEN_RETRY_S = 0.5
"""Between looks of an Open that waits for credentials or a bucket."""
REMOVED_CHECK_S = 1.0
"""For the look whether a removed run is there again: training waits for the save's begin."""
SHARED_IDLE_S = 60.0
"""So long after the last read of a restore, what ranks have read for one another is kept."""


def commit_message(entry: Checkpoint, *, baseline: bool | None = None) -> pb.Commit:
    """What a trainer learns of a checkpoint; `baseline`: whether its own part is one, None: whether all are."""
    same = ("seq", "attempt", "cut", "step", "stored_bytes", "raw_bytes", "rows")
    said = {name: getattr(entry, name) for name in same}
    return pb.Commit(baseline=entry.baseline if baseline is None else baseline, **said)


class Run:
    """The run of this sidecar. Thread-safe."""

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
                remedy="leave it to the sidecar while that lives",
            ),
        )
        self.synthetic = SyntheticBaselines(settings, self.cache)
        self.identity = identity(settings)
        self.participation = Participation(settings.cache_dir.parent if settings.pod_uid else None, log)
        self.log = RunLog(self.store, self.identity.run)
        self.removed: str | None = None
        """What the log said when a save or an Open found the run gone, removed by a person; None: it was not."""
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
        """Read the log to its tip; False when the store does not answer in time. Nothing is written."""
        try:
            log.refresh(deadline_s=deadline_s)
        except DeltashardError as error:
            self.logger.warning("log.read_failed", **explain(error))
            return False
        return True

    def state(self) -> RunState:
        """The newest that any handle has seen. No store is asked."""
        with self._lock:
            seen = [self.log.state, *(log.state for log in self._logs.values())]
            before = [] if self._newest_state is None else [self._newest_state]
            self._newest_state = max(seen + before, key=lambda state: state.tip)
            return self._newest_state

    def log_of(self, attachment: Attachment) -> RunLog:
        with self._lock:
            return self._logs.get(attachment.id, self.log)

    def release_unused(self, used: Callable[[], set[str]]) -> None:
        """Let go what is not used any more: handles of sessions (`used` gives the ids of those in use), bytes read."""
        self._shared.release_idle(idle_s=SHARED_IDLE_S)
        with self._lock:
            held = set(self._logs)
        # In this order: a session is attached before it gets a handle, so one that has one and is not in use is over.
        if held and (over := held - used()):
            self.state()  # remembers what they have seen
            with self._lock:
                for session_id in over:
                    self._logs.pop(session_id, None)

    def shared(self, attachment: Attachment) -> SharedReads | None:
        """What ranks of this pod read of a checkpoint for one another; None for a trainer that has no peers."""
        return self._shared if attachment.world_size > 1 else None

    def manifests_of(self, run: str) -> Manifests:
        with self._lock:
            if run not in self._manifests:
                self._manifests = {run: Manifests(self.store, run)}
            return self._manifests[run]

    def resume(self, attachment: Attachment, attempt: int) -> pb.Commit | None:
        """Last commit of the attempt that a trainer attached in the middle of, as far as the store answers."""
        log = self.log.fork()
        with deadline(REATTACH_DEADLINE_S):  # of each request, too: the trainer waits
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
        """Open an attempt for a trainer; raises what `open_attempt` raises, and what reading `from_run` does.

        In a pod, what a person must mend elsewhere (a Secret, a bucket, a quota) is waited for while the trainer is not
        `gone`: the store's health tells people meanwhile, and a container that restarts instead would only lose its
        pod's back-off to it. A store that takes no entry is read all the same, and the trainer asks again with what it
        has read (`OpenRequest.basis`), which is not waited for.
        """
        if request.HasField("basis"):
            with deadline(LATE_DEADLINE_S):  # training stands still meanwhile
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
        """The answer of a store that takes no entry, and can be read; None: it cannot, or there is nothing to restore.

        Several ranks wait for their attempt: its number is in the names of what all of them save.
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
                took_part=max(request.took_part, self.participation.newest(self.name)),
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
            unopened=str(refusal),
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
            said = request.basis
            seq = said.resume_seq if said.HasField("resume_seq") else None
            basis = ResumeBasis(attempt=said.attempt, resume=seq, token=said.token)
        opened = open_attempt(
            log,
            owner=self.identity.owner,
            workload=self.settings.workload_uid,
            pod=self.settings.pod_uid,
            took_part=max(request.took_part, self.participation.newest(self.name)),
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
        reply.cut = resume.cut
        reply.resume_attempt = resume.attempt
        reply.fingerprint.update(resume.fingerprint)
        reply.tables.extend(table_message(table) for table in resume.tables)
        reply.metadata.update(resume.metadata)
        if step_seen > 0:
            reply.last_step_seen = step_seen

    def _reset_log(self) -> None:
        """The run was removed, and another one began: its log is another one, and no name may be used again."""
        with self._lock:
            self.log = RunLog(self.store, self.name)
            self.token = new_token()
            self._logs.clear()
            self._newest_state = None

    def _debris(self, state: RunState) -> str:
        """What to say of a run that begins where data lies already; empty: it does not, or none does."""
        if state.tip > 1 or next(iter(self.store.list(run_key(self.name, "data/"))), None) is None:
            return ""
        return (
            "this run begins anew, at a name under which data without a log lies: of a copy that was cut short (copy "
            "to another name), of a removal (`deltashard rm` first), or saves whose log is lost (`deltashard scan`)"
        )

    def still_removed(self, attachment: Attachment, attempt: int) -> str | None:
        """Why a save of this attempt may write nothing: the run was removed. Asks the store only after that.

        Training goes on, and each save looks again: what looks so may pass, as a directory that was mounted elsewhere.
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
