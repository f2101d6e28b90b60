"""One run as the controller knows it: the workload, its pods, what their sidecars say, and what has come of it. Pure.

A `Run` is a value. Facts come in by three ways that know nothing of each other and may be late: the API's watches
(`with_job`, `with_pod`), the sidecars' reports (`report_change`) and the CheckpointRun's own status, read back when the
controller starts (`run_record`). `reconcile` then draws the conclusions.

Where every pod of an Indexed Job is a run of its own in the store, each of these is a **part** of the run, by the pod's
number, and the CheckpointRun of the Job shows the one whose newest checkpoint is the oldest. Else the run has the one
part "". One sidecar speaks for a part: the one with rank 0, or the only one. Where that one is not heard, the next that
reports is asked to, until rank 0 is heard again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deltashard_checkpoint.vocabulary import RUN_PER_POD
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision, Measured

from deltashard_operator.fleet.report import PodState, Report, RunReport
from deltashard_operator.run import failure
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.failure import Loss
from deltashard_operator.run.ledger import Ledger, hashed
from deltashard_operator.run.observed_object import JobView, NodeView, PodView, RequestedSettings, Workload
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.reclaim import Reclaim

V = TypeVar("V")
MAX_NAME = 63
NO_NODES: Mapping[str, NodeView] = {}
REPORTER_INTERVAL_S = 60.0
"""Between the reports of a sidecar that speaks for its run, when nothing changes."""
PEER_INTERVAL_S = 300.0
MAX_MISSED_INTERVALS = 2.5
"""A sidecar is heard as long as its newest report is younger than so many beats."""
REPORTER_TIMEOUT_S = MAX_MISSED_INTERVALS * REPORTER_INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReport:
    """A sidecar's newest report."""

    report: Report
    """Without the run's state and what happened, which are kept elsewhere."""
    at_s: float
    report_interval_s: float
    """How soon it is to come again, when nothing changes."""
    is_reporter: bool = False
    """Whether it is the one that speaks for its part of the run."""
    changed_s: float = 0.0
    incident: int = 0
    """The newest incident of the process that was seen."""

    @property
    def pod(self) -> PodState:
        return self.report.pod

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s <= MAX_MISSED_INTERVALS * self.report_interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """A run in the store, by the word of who speaks for it."""

    attempt: int = 0
    seq: int = 0
    """Newest commit."""
    committed_at_s: float = 0.0
    """When that was seen, by the controller's clock."""
    state: RunReport | None = None
    """As it was told last, without the checkpoints; None: not by this controller's time."""
    kept: tuple[Mapping[str, Any], ...] = ()
    """Newest checkpoints as the status has them, newest first; only of the one run of a workload."""


NO_PART = RunPart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training and its checkpoints are, of all parts together. `reconcile` makes it."""

    step: int = 0
    last_step: int = 0
    last_commit_at_s: float = 0.0
    last_seq: int = 0
    durable_s: float = 0.0
    attempt: int = 0
    world_size: int = 0
    """Ranks of the newest attempt of its one run; 0: not known."""
    ranks_present: int = 0
    stall_s: float = 0.0
    lost_share: float = 0.0
    """Of samples, by partial recoveries so far (PLS)."""
    partial_recoveries: int = 0
    stored_bytes: int = 0
    checkpoints: int = 0
    policy: pb.Policy = field(default_factory=pb.Policy)
    """In force, as the sidecars report it."""
    measured: Measured | None = None
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Event to tell people of."""

    reason: str
    message: str
    warning: bool = True
    key: str = ""
    """Natural key of an incident, which comes again with every report until its sidecar need not tell it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """Everything known of a run. Mappings are never changed in place."""

    workload: Workload
    requested: RequestedSettings = field(default_factory=RequestedSettings)
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    pods: Mapping[str, PodView] = field(default_factory=dict)
    last_reports: Mapping[str, LastReport] = field(default_factory=dict)
    """Newest reports, by pod UID, of pods that exist; see `last_reports`."""
    first_report_s: float = 0.0
    """When this controller heard the first sidecar of it; 0: none."""
    watched_since_s: float = 0.0
    """When this controller judged it first; 0: not yet."""
    parts: Mapping[str, RunPart] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    losses: tuple[Loss, ...] = ()
    """The newest losses, oldest first."""
    progress: Progress = field(default_factory=Progress)
    incident_messages: Mapping[str, str] = field(default_factory=dict)
    """Sentence of the newest incident of a kind, by the reason of its Event, until it is over."""
    fell_back: tuple[str, int] | None = None
    """Part and attempt that fell back last, since this controller began."""
    run_id_conflict: str = ""
    """Who holds the run id that this workload asks for, where it is refused."""
    phase: Phase = Phase.PENDING
    training_since_s: float = 0.0
    """When it last began to train; 0: it does not."""
    trained_s: float = 0.0
    last_seen_s: float = 0.0
    """Newest time a pod or Job of it was seen to come, change or go."""
    reconciled_s: float = 0.0
    loaded_status_s: float = 0.0
    """When the status was written that this controller began with; 0: with none."""
    conditions: tuple[Condition, ...] = ()
    finished: str = ""
    """How it ended: Completed, Failed or Deleted; empty before."""
    finished_at_s: float = 0.0
    store: str = ""
    """Where its checkpoints are, by the word of the newest sidecar."""
    reclaim: Reclaim | None = None
    """Where the removal of its bytes stands; None: they stay."""

    @property
    def key(self) -> tuple[str, str]:
        return self.workload.key

    @property
    def run_id(self) -> str:
        """The run's name in the store, below the namespace."""
        return self.requested.run_id or f"{self.workload.name}-{self.workload.uid}"

    @property
    def name(self) -> str:
        """The CheckpointRun's: the workload's, clipped, and enough of its UID."""
        tail = self.workload.uid.replace("-", "")[:8].lower()
        return f"{self.workload.name[: MAX_NAME - 1 - len(tail)].rstrip('-.')}-{tail}"

    @property
    def per_pod(self) -> bool:
        """Whether each of its pods is known to be a run of its own."""
        return self.requested.runs == RUN_PER_POD or any(self.parts)

    @property
    def suspended(self) -> bool:
        return bool(self.jobs) and all(each.suspended for each in self.jobs.values())

    def seq_of(self, part: str) -> int:
        """Newest commit of a part of it."""
        return self.parts[part].seq if part in self.parts else self.progress.last_seq


def live_reports(
    run: WatchedRun, now_s: float, nodes: Mapping[str, NodeView] = NO_NODES
) -> Mapping[str, LastReport]:
    """The sidecars that are heard now, by pod UID.

    Of a pod that has ended none is; of one whose node is lost only what came after the node was lost.
    """

    def is_live(pod: PodView, each: LastReport) -> bool:
        node = nodes.get(pod.node)
        cut_off = node is not None and not node.ready and each.at_s <= node.since_s
        return each.is_fresh(now_s) and not pod.finished and not cut_off

    return {uid: each for uid, each in run.last_reports.items() if is_live(run.pods[uid], each)}


def policy_in_force(run: WatchedRun, part: str) -> pb.Policy:
    """The policy in force in a part of the run; an empty one while this controller was not told it."""
    state = run.parts.get(part, NO_PART).state
    return state.policy if state is not None else pb.Policy()


def with_job(run: WatchedRun, job: JobView, now_s: float) -> WatchedRun:
    requested = (
        run.requested
        if run.jobs and len(job.requested.overrides) < len(run.requested.overrides)
        else job.requested
    )
    return replace(run, jobs={**run.jobs, job.uid: job}, requested=requested, last_seen_s=now_s)


def without_job(run: WatchedRun, uid: str, now_s: float) -> WatchedRun:
    if uid not in run.jobs:
        return run
    outcome = run.jobs[uid].outcome or "Deleted"
    run = replace(run, jobs=without(run.jobs, uid), last_seen_s=now_s)
    return finished(run, outcome, now_s) if run.workload.native == "Job" and not run.finished else run


def with_pod(run: WatchedRun, pod: PodView, *, node_ready: bool, now_s: float) -> WatchedRun:
    """The run after a pod of it was seen; its loss or its container's restart is counted, once."""
    before = run.pods.get(pod.uid)
    run = replace(
        run,
        pods={**run.pods, pod.uid: pod},
        requested=run.requested
        if run.jobs
        else pod.requested,  # annotations of a Job's own metadata are not on its pods
        last_seen_s=now_s if pod.alive or before is None else run.last_seen_s,
    )
    if pod.restarts > (before.restarts if before is not None else 0):
        loss = failure.loss_of_container(pod, now_s)
        run = _with_end(run, pod, loss, str(pod.restarts), first=before is None)
    if before is None or not before.ends:
        run = _with_pod_end(run, pod, gone=False, node_ready=node_ready, now_s=now_s, first=before is None)
    return run


def without_pod(run: WatchedRun, uid: str, *, node_ready: bool, now_s: float) -> WatchedRun:
    pod = run.pods.get(uid)
    if pod is None:
        return run
    if not pod.ends:
        run = _with_pod_end(run, pod, gone=True, node_ready=node_ready, now_s=now_s, first=False)
    run = replace(
        run, pods=without(run.pods, uid), last_reports=without(run.last_reports, uid), last_seen_s=now_s
    )
    return finished(run, "Deleted", now_s) if run.workload.native == "Pod" and not run.finished else run


def with_persisted_counts(
    run: WatchedRun, written: WatchedRun, nodes: Mapping[str, NodeView], now_s: float
) -> WatchedRun:
    """The run with what another controller counted and wrote: what the API tells of its pods is counted in that."""
    last_seen_s, pods = run.last_seen_s, run.pods.values()
    run = replace(run, ledger=written.ledger, losses=written.losses, pods={})
    for each in pods:
        node = nodes.get(each.node)
        run = with_pod(run, each, node_ready=node is not None and node.ready, now_s=now_s)
    return replace(run, last_seen_s=last_seen_s)


def without(mapping: Mapping[str, V], *keys: str) -> Mapping[str, V]:
    return {k: v for k, v in mapping.items() if k not in keys}


def _with_pod_end(
    run: WatchedRun, pod: PodView, *, gone: bool, node_ready: bool, now_s: float, first: bool
) -> WatchedRun:
    job = run.jobs.get(pod.job_uid)
    suspended = job is not None and job.suspended
    loss = failure.loss_of_pod(pod, gone=gone, node_ready=node_ready, suspended=suspended, now_s=now_s)
    return run if loss is None else _with_end(run, pod, loss, "end", first=first)


def _with_end(run: WatchedRun, pod: PodView, loss: Loss, what: str, *, first: bool) -> WatchedRun:
    """The run with an end of a trainer; `first`: the pod was not seen before it, so an earlier controller may have."""
    key = hashed(pod.uid, what)
    if run.finished or key in run.ledger.counted or (first and run.ledger.has(key, loss.at_s)):
        return run
    return with_loss(run, loss, pod.index if run.per_pod else "", key)


def part_of(run: WatchedRun, pod_uid: str, reported_run: str) -> str:
    """Part of the run that a pod's report is of; `reported_run`: `PodState.run`, empty where it is not known yet."""
    pod = run.pods.get(pod_uid)
    if pod is None or not pod.index:
        return ""
    own = (
        reported_run == f"{run.workload.namespace}/{run.run_id}-{pod.index}" if reported_run else run.per_pod
    )
    return pod.index if own else ""


def with_loss(run: WatchedRun, loss: Loss, part: str, key: str) -> WatchedRun:
    """The run with a loss in a part of it, counted by this key."""
    ledger = run.ledger.with_loss(part, loss, key, run.seq_of(part))
    return replace(run, ledger=ledger, losses=failure.with_loss(run.losses, loss))


def finished(run: WatchedRun, how: str, at_s: float) -> WatchedRun:
    return replace(run, finished=how, finished_at_s=at_s)
