"""State of one run: workload, pods, their sidecars' reports and the conclusions. Pure.

A `Run` is an immutable value. Facts arrive independently and possibly late from three sources: API watches (`with_job`,
`with_pod`), sidecar reports (`report_change`) and, at controller start, the CheckpointRun's status (`run_record`).
`reconcile` draws the conclusions.

If every pod of an Indexed Job is its own run in the store, each is a **part** of the run, keyed by the pod's index, and
the Job's CheckpointRun shows the part whose newest checkpoint is oldest. Otherwise the only part is "". Each part has
one reporter: the sidecar with rank 0, or the only sidecar. If the reporter is silent, the next sidecar that reports
replaces it until rank 0 reports again.
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
"""Interval of a reporter's reports while nothing changes."""
PEER_INTERVAL_S = 300.0
MAX_MISSED_INTERVALS = 2.5
"""A sidecar is live while its newest report is younger than this number of report intervals."""
REPORTER_TIMEOUT_S = MAX_MISSED_INTERVALS * REPORTER_INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReport:
    """Newest report of a sidecar."""

    report: Report
    """Without the run's state and incidents, which are stored elsewhere."""
    at_s: float
    report_interval_s: float
    """Expected time to the next report while nothing changes."""
    is_reporter: bool = False
    """Whether the sidecar is the reporter of its part of the run."""
    changed_s: float = 0.0
    incident: int = 0
    """Newest processed incident of the process."""

    @property
    def pod(self) -> PodState:
        return self.report.pod

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s <= MAX_MISSED_INTERVALS * self.report_interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """Run in the store, as its reporter describes it."""

    attempt: int = 0
    seq: int = 0
    committed_at_s: float = 0.0
    """Time when the commit was first reported, on the controller's clock."""
    state: RunReport | None = None
    """Last reported state without checkpoints; None if this controller has received none."""
    kept: tuple[Mapping[str, Any], ...] = ()
    """Newest checkpoints in status form, newest first. Only for the single run of a workload."""


NO_PART = RunPart()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of training and its checkpoints, over all parts. Computed by `reconcile`."""

    step: int = 0
    last_step: int = 0
    last_commit_at_s: float = 0.0
    last_seq: int = 0
    durable_s: float = 0.0
    attempt: int = 0
    world_size: int = 0
    """Ranks of the newest attempt of the only part; 0 if unknown."""
    ranks_present: int = 0
    stall_s: float = 0.0
    lost_share: float = 0.0
    """Share of samples lost by partial recoveries so far (PLS)."""
    partial_recoveries: int = 0
    stored_bytes: int = 0
    checkpoints: int = 0
    policy: pb.Policy = field(default_factory=pb.Policy)
    measured: Measured | None = None
    decisions: tuple[Decision, ...] = ()


EVENTS: Mapping[str, str] = {
    "Restored": "A trainer continued from a checkpoint. The message has step, source, seconds and lost steps.",
    "RunReplaced": "A recreated workload began a new run. The message has the older run's id and how to continue it.",
    "UnsupportedKind": "The pods belong to an unsupported kind of workload. The message has the risks.",
    "CheckpointStale": "Training continues, and the newest checkpoint is too old.",
    "SaveFailed": "A save failed. Training continues, and the next save covers its rows.",
    "StoreUnavailable": "The store does not answer, or rejects requests.",
    "CredentialsMissing": "The store's credentials are absent or empty.",
    "Fenced": "This trainer was ended because another one trains the run.",
    "TrackingFault": "Rows changed without being tracked.",
    "FellBack": "A restore skipped damaged checkpoints.",
    "IntervalChanged": "The chosen save interval changed. The message has the old value, new value and reason.",
    "BitsChanged": "The chosen bits of weights changed. The message has the old value, new value and reason.",
    "GoalUnreachable": "A goal cannot be reached, such as lost work shorter than a save. The message has a substitute.",
    "CrashLooping": "The training container ends repeatedly in the same way, with no commit in between.",
    "StuckOnLostNode": "A pod on a lost node blocks its replacement. The message has both remedies.",
    "Reclaimed": "The bytes of the run were removed from the store by its policy. The message has their number.",
    "ReclaimKept": "The bytes of the run are due for removal and are kept. The message has the reason.",
    "ReclaimFailed": "The removal of the bytes of the run failed. The message has the reason.",
    "RunIdTaken": "Another live workload holds the run id.",
}
"""Kubernetes events by reason, for docs/reference/events.md."""
NORMAL_EVENTS = frozenset({"Restored", "RunReplaced", "IntervalChanged", "BitsChanged", "Reclaimed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Kubernetes event to emit; `EVENTS` has its reason."""

    reason: str
    message: str
    warning: bool = True
    key: str = ""
    """Natural key of an incident. Every report repeats the incident until it is acknowledged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """Known state of a run. Mappings are never changed in place."""

    workload: Workload
    requested: RequestedSettings = field(default_factory=RequestedSettings)
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    pods: Mapping[str, PodView] = field(default_factory=dict)
    last_reports: Mapping[str, LastReport] = field(default_factory=dict)
    """Newest reports by pod UID, for existing pods."""
    first_report_s: float = 0.0
    """When this controller received the first report of the run; 0: none yet."""
    watched_since_s: float = 0.0
    """When this controller first reconciled the run; 0: not yet."""
    parts: Mapping[str, RunPart] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    losses: tuple[Loss, ...] = ()
    progress: Progress = field(default_factory=Progress)
    incident_messages: Mapping[str, str] = field(default_factory=dict)
    """Message of the newest incident by event reason, until the problem ends."""
    fell_back: tuple[str, int] | None = None
    """Part and attempt of the last fallback since this controller started."""
    run_id_conflict: str = ""
    """Holder of the requested run id if the request is rejected."""
    phase: Phase = Phase.PENDING
    training_since_s: float = 0.0
    """When the current training period began; 0: not training."""
    trained_s: float = 0.0
    last_seen_s: float = 0.0
    """Last time a pod or Job of the run appeared, changed or disappeared."""
    reconciled_s: float = 0.0
    loaded_status_s: float = 0.0
    """Write time of the status with which this controller started; 0: none."""
    conditions: tuple[Condition, ...] = ()
    finished: str = ""
    """Completed, Failed or Deleted; empty until the run ends."""
    finished_at_s: float = 0.0
    store: str = ""
    """URL of the store, as the newest report gives it."""
    reclaim: Reclaim | None = None
    """Removal of the run's bytes; None if they are kept."""

    @property
    def key(self) -> tuple[str, str]:
        return self.workload.key

    @property
    def run_id(self) -> str:
        """Name of the run in the store, below the namespace."""
        return self.requested.run_id or f"{self.workload.name}-{self.workload.uid}"

    @property
    def name(self) -> str:
        """Name of the CheckpointRun: the truncated workload name and the start of its UID."""
        tail = self.workload.uid.replace("-", "")[:8].lower()
        return f"{self.workload.name[: MAX_NAME - 1 - len(tail)].rstrip('-.')}-{tail}"

    @property
    def per_pod(self) -> bool:
        """Whether each pod is known to be its own run."""
        return self.requested.runs == RUN_PER_POD or any(self.parts)

    @property
    def suspended(self) -> bool:
        return bool(self.jobs) and all(each.suspended for each in self.jobs.values())

    def seq_of(self, part: str) -> int:
        return self.parts[part].seq if part in self.parts else self.progress.last_seq


def live_reports(
    run: WatchedRun, now_s: float, nodes: Mapping[str, NodeView] = NO_NODES
) -> Mapping[str, LastReport]:
    """Return the live reports by pod UID, without ended pods and, for a lost node, those from before the loss."""

    def is_live(pod: PodView, each: LastReport) -> bool:
        node = nodes.get(pod.node)
        cut_off = node is not None and not node.ready and each.at_s <= node.since_s
        return each.is_fresh(now_s) and not pod.finished and not cut_off

    return {uid: each for uid, each in run.last_reports.items() if is_live(run.pods[uid], each)}


def policy_in_force(run: WatchedRun, part: str) -> pb.Policy:
    """Return the policy in force in a part of the run, empty until this controller receives it."""
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
    """Return the run after an update of one of its pods. A loss or container restart is counted once."""
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
    """Return the run with the counters of an earlier controller, and count the current pods' ends that they lack."""
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
    """Return the run with the end of a trainer. `first`: an earlier controller may have counted it already."""
    key = hashed(pod.uid, what)
    if run.finished or key in run.ledger.counted or (first and run.ledger.has(key, loss.at_s)):
        return run
    return with_loss(run, loss, pod.index if run.per_pod else "", key)


def part_of(run: WatchedRun, pod_uid: str, reported_run: str) -> str:
    """Return the part of the run that a pod's report belongs to. `reported_run`: `PodState.run`, empty if unknown."""
    pod = run.pods.get(pod_uid)
    if pod is None or not pod.index:
        return ""
    own = (
        reported_run == f"{run.workload.namespace}/{run.run_id}-{pod.index}" if reported_run else run.per_pod
    )
    return pod.index if own else ""


def with_loss(run: WatchedRun, loss: Loss, part: str, key: str) -> WatchedRun:
    ledger = run.ledger.with_loss(part, loss, key, run.seq_of(part))
    return replace(run, ledger=ledger, losses=failure.with_loss(run.losses, loss))


def finished(run: WatchedRun, how: str, at_s: float) -> WatchedRun:
    return replace(run, finished=how, finished_at_s=at_s)
