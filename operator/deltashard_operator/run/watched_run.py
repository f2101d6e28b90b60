"""One run as the controller knows it: the workload, its pods, what their sidecars say, and what has come of it. Pure.

A `Run` is a value; what happens to it are functions from a run to a run. Facts come in by three roads that know nothing
of each other and may be late: the API's watches (`with_job`, `with_pod`), the sidecars' heartbeats (`with_report`) and
the CheckpointRun's own status, read back when the controller starts (`run_record`). `judgement` then draws the
conclusions. Nothing is counted twice: what was counted is kept with the run and written to its status.

A run has any number of pods, and a pod any number of ranks. Where every pod of an Indexed Job is a run of its own in
the store, the CheckpointRun of the Job shows the one whose newest checkpoint is the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from deltashard_checkpoint.deciding import evidence
from deltashard_checkpoint.deciding.evidence import Rates
from deltashard_checkpoint.vocabulary import RUN_PER_POD
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision

from deltashard_operator.fleet.sidecar_report import (
    Heartbeat,
    Hello,
    Incident,
    IncidentKind,
    Measured,
)
from deltashard_operator.run import failure, incident
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.failure import Interruption, Loss, Point, Tally
from deltashard_operator.run.incident import Incidents
from deltashard_operator.run.observed_object import JobView, PodView, Wish, Workload
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.reclaim import Reclaim

V = TypeVar("V")
MAX_NAME = 63
HORIZON_S = 86400.0
"""Restores are expected over the coming day of training."""
NO_WISH = Wish()
NO_INCIDENTS = Incidents()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Newest heartbeat of a sidecar."""

    hello: Hello
    heartbeat: Heartbeat | None = None
    connected: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The newest incident that was taken from a process of a pod's sidecar; older ones were, too."""

    process: str
    incident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training and its checkpoints are."""

    step: int = 0
    last_step: int = 0
    last_commit_at_s: float = 0.0
    last_seq: int = 0
    durable_s: float = 0.0
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Newest attempt of each run in the store: by the pod's number where each is a run of its own, else by ""."""
    openings: Mapping[str, int] = field(default_factory=dict)
    """How often the workload has opened each of them."""
    world_size: int = 0
    """Ranks of the newest attempt of its one run; 0: not known."""
    stall_s: float = 0.0
    """The longest that a rank stood still for the newest commit."""
    lost_share: float = 0.0
    """Of samples, by partial recoveries so far (PLS)."""
    partial_recoveries: int = 0
    stored_bytes: int = 0
    checkpoints: int = 0
    policy: pb.Policy = field(default_factory=pb.Policy)
    """Policy in force, as the sidecars report it."""

    @property
    def attempt(self) -> int:
        return max(self.attempts.values(), default=0)


NO_PROGRESS = Progress()
MAX_STAMPS = 1024
"""Runs in the store of one workload whose newest commit is kept in mind; a sidecar may call its run what it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """When the newest commit of a run in the store was seen, by the controller's own clock."""

    seq: int
    at_s: float


NO_STAMP = Stamp(seq=0, at_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Event to tell people of."""

    reason: str
    message: str
    warning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything known of a run. Mappings are never changed in place."""

    workload: Workload
    wish: Wish = NO_WISH
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    pods: Mapping[str, PodView] = field(default_factory=dict)
    reports: Mapping[str, Report] = field(default_factory=dict)
    """Newest reports, by pod UID."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Restarts that are counted, by pod UID."""
    lost: frozenset[str] = frozenset()
    """UIDs of pods whose loss is counted."""
    taken: Mapping[str, Taken] = field(default_factory=dict)
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    """Failures, by the same keys as `Progress.attempts`."""
    incidents: Incidents = NO_INCIDENTS
    """What they count for."""
    width: int = 0
    """Most pods that it ever had at once."""
    measured: Measured | None = None
    decisions: tuple[Decision, ...] = ()
    """By the word of the pod that decides."""
    progress: Progress = NO_PROGRESS
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    """Newest commits seen, by the runs' names in the store."""
    restores: int = 0
    lost_steps: int = 0
    saves_failed: int = 0
    fenced: str = ""
    tracking: str = ""
    fell_back: str = ""
    failing: str = ""
    """Sentences of the newest incident of a kind, until it is over."""
    taken_by: str = ""
    """Who holds the run id that this workload asks for, where it is refused."""
    phase: Phase = Phase.PENDING
    phase_since_s: float = 0.0
    trains_since_s: float = 0.0
    """When it last began to train; 0: it does not."""
    started_at_s: float = 0.0
    trained_s: float = 0.0
    seen_s: float = 0.0
    """Newest time a pod or Job of it was seen to come, change or go."""
    judged_s: float = 0.0
    conditions: tuple[Condition, ...] = ()
    finished: str = ""
    """How it ended: Completed, Failed or Deleted; empty before."""
    finished_at_s: float = 0.0
    generation: int = 0
    """Generation of the newest directive."""
    directed: pb.Policy | None = None
    store: str = ""
    """Where its checkpoints are, by the word of the newest sidecar."""
    reclaim: Reclaim | None = None
    """Where the removal of its bytes stands; None: they stay."""

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, workload UID)."""
        return self.workload.key

    @property
    def run_id(self) -> str:
        """The run's name in the store, below the namespace."""
        return self.wish.run_id or f"{self.workload.name}-{self.workload.uid}"

    @property
    def name(self) -> str:
        return object_name(self.workload)

    @property
    def failures(self) -> int:
        return sum(each.failures for each in self.tallies.values())

    @property
    def pods_at_risk(self) -> int:
        return 1 if self.parts else max(self.width, 1)

    @property
    def rates(self) -> Rates:
        """How often steps are lost and checkpoints restored, as it is believed now."""
        return evidence.rates(self.incidents.evidence, pods=self.pods_at_risk)

    @property
    def parts(self) -> int:
        """How many runs of their own in the store it has; 0: its pods are of one run."""
        return sum(map(bool, self.progress.attempts))

    def at(self, part: str) -> Point:
        """How far a part of it is, see `Loss.run`."""
        name = f"{self.workload.namespace}/{self.run_id}" + (f"-{part}" if part else "")
        known = self.stamps.get(name)
        seq = known.seq if known is not None else self.progress.last_seq
        return Point(seq=seq, trained_s=self.trained_s)

    @property
    def suspended(self) -> bool:
        return bool(self.jobs) and all(each.suspended for each in self.jobs.values())

    @property
    def live(self) -> tuple[Heartbeat, ...]:
        """Heartbeats of sidecars that are connected and whose pod still trains."""
        return tuple(
            each.heartbeat
            for uid, each in self.reports.items()
            if each.connected
            and each.heartbeat is not None
            and (uid not in self.pods or self.pods[uid].phase not in {"Succeeded", "Failed"})
        )


def object_name(workload: Workload) -> str:
    """A CheckpointRun's name: the workload's, clipped, and enough of its UID."""
    tail = workload.uid.replace("-", "")[:8].lower()
    head = workload.name[: MAX_NAME - 1 - len(tail)].rstrip("-.")
    return f"{head}-{tail}"


def with_job(run: Run, job: JobView, now_s: float) -> Run:
    return replace(run, jobs={**run.jobs, job.uid: job}, wish=_wish(run, job.wish), seen_s=now_s)


def _wish(run: Run, wish: Wish) -> Wish:
    # A Job says more than its pods: annotations of its own metadata are not on them.
    if run.jobs and len(wish.overrides) < len(run.wish.overrides):
        return run.wish
    return wish


def without_job(run: Run, uid: str, now_s: float) -> Run:
    if uid not in run.jobs:
        return run
    outcome = run.jobs[uid].outcome or "Deleted"
    jobs = {key: each for key, each in run.jobs.items() if key != uid}
    run = replace(run, jobs=jobs, seen_s=now_s)
    if run.workload.native == "Job" and not run.finished:
        return finished(run, outcome, now_s)
    return run


def with_pod(run: Run, pod: PodView, *, node_ready: bool, now_s: float) -> Run:
    """The run after a pod of it was seen; its loss or its container's restart is counted, once."""
    before = run.pods.get(pod.uid)
    if before is not None and pod.disruption == "" and before.disruption:
        pod = replace(pod, disruption=before.disruption, disruption_message=before.disruption_message)
    run = replace(
        run,
        pods={**run.pods, pod.uid: pod},
        wish=run.wish if run.jobs else _wish(run, pod.wish),
        seen_s=now_s if pod.alive or before is None else run.seen_s,
    )
    if pod.restarts > run.restarts.get(pod.uid, 0):
        run = replace(run, restarts={**run.restarts, pod.uid: pod.restarts})
        run = _with_loss(run, failure.loss_of_restart(pod, now_s), _number(run, pod))
    return _with_end(run, pod, gone=False, node_ready=node_ready, now_s=now_s)


def without_pod(run: Run, uid: str, *, node_ready: bool, now_s: float) -> Run:
    pod = run.pods.get(uid)
    if pod is None:
        return run
    run = _with_end(run, pod, gone=True, node_ready=node_ready, now_s=now_s)
    run = replace(
        run,
        pods=_less(run.pods, uid),
        restarts=_less(run.restarts, uid),
        lost=run.lost - {uid},
        seen_s=now_s,
    )
    report = run.reports.get(uid)
    if report is not None and not report.connected:
        run = replace(run, reports=_less(run.reports, uid), taken=_less(run.taken, uid))
    if run.workload.native == "Pod" and not run.finished:
        return finished(run, "Deleted", now_s)
    return run


def _less(mapping: Mapping[str, V], key: str) -> Mapping[str, V]:
    return {k: v for k, v in mapping.items() if k != key} if key in mapping else mapping


def _with_end(run: Run, pod: PodView, *, gone: bool, node_ready: bool, now_s: float) -> Run:
    if pod.uid in run.lost or run.finished:
        return run
    job = run.jobs.get(pod.job_uid)
    loss = failure.loss_of_pod(pod, gone=gone, node_ready=node_ready, job=job, now_s=now_s)
    if loss is None:
        return run
    return replace(_with_loss(run, loss, _number(run, pod)), lost=run.lost | {pod.uid})


def _number(run: Run, pod: PodView | None) -> str:
    """Part of the run that a pod's failure counts for: its own number where pods are known to be runs of their own."""
    own = run.wish.runs == RUN_PER_POD or any(run.progress.attempts)
    return pod.index if pod is not None and own else ""


def _part(run: Run, pod_uid: str, said: str) -> str:
    """Part of the run that a heartbeat is of: the pod's number if it is a run of its own, by the API's word."""
    pod = run.pods.get(pod_uid)
    own = pod is not None and said == f"{run.workload.namespace}/{run.run_id}-{pod.index}"
    return pod.index if own and pod is not None else ""


def _with_loss(run: Run, loss: Loss, part: str) -> Run:
    loss = replace(loss, run=part, at=run.at(part))
    report = run.reports.get(loss.pod_uid)
    took_part = report.heartbeat.openings if report is not None and report.heartbeat is not None else 0
    tally, over = failure.with_loss(run.tallies.get(part, Tally()), loss, took_part=took_part)
    run = replace(run, incidents=incident.lost(run.incidents, part, run.progress.step))
    return with_tally(run, part, tally, over)


def with_tally(run: Run, part: str, tally: Tally, over: Iterable[Interruption]) -> Run:
    """The run with this tally of a part of it, and what is over by it counted."""
    incidents = incident.over(run.incidents, part, over, parts=run.parts)
    return replace(run, tallies={**run.tallies, part: tally}, incidents=incidents)


def with_connected(run: Run, hello: Hello) -> Run:
    before = run.reports.get(hello.pod_uid)
    heartbeat = before.heartbeat if before is not None and before.hello.process == hello.process else None
    reports = {**run.reports, hello.pod_uid: Report(hello=hello, heartbeat=heartbeat)}
    return replace(run, reports=reports, store=hello.url or run.store)


def without_connected(run: Run, hello: Hello) -> Run:
    """The run after a sidecar of it went; what it reported last is kept as long as its pod is there."""
    report = run.reports.get(hello.pod_uid)
    if report is None or report.hello.process != hello.process:
        return run
    if hello.pod_uid not in run.pods:
        return replace(run, reports=_less(run.reports, hello.pod_uid), taken=_less(run.taken, hello.pod_uid))
    return replace(run, reports={**run.reports, hello.pod_uid: replace(report, connected=False)})


def with_report(run: Run, hello: Hello, heartbeat: Heartbeat, now_s: float) -> tuple[Run, tuple[Notice, ...]]:
    """The run after a heartbeat, and notices of what that tells for the first time."""
    run = replace(run, reports={**run.reports, hello.pod_uid: Report(hello=hello, heartbeat=heartbeat)})
    notices: list[Notice] = []
    known = run.taken.get(hello.pod_uid)
    newest = known.incident if known is not None and known.process == hello.process else 0
    fresh = [each for each in heartbeat.incidents if each.id > newest]
    pod = run.pods.get(hello.pod_uid)
    # A trainer that was replaced and is fenced when its node comes back is as it should be: told, but no trouble.
    newest_attempt = run.progress.attempts.get(_part(run, hello.pod_uid, heartbeat.run), 0)
    replaced = heartbeat.attempt < newest_attempt or (pod is not None and not pod.alive)
    for each in fresh:
        if each.kind is IncidentKind.FENCED and replaced and each.cause != Cause.TAKEN_OVER:
            text = f"pod {hello.pod}, which was replaced: {each.message or 'its trainer was ended'}"
            notices.append(Notice(reason="Fenced", message=text))
            continue
        run, told = _with_incident(run, hello, each, now_s)
        notices.extend(told)
    if fresh:
        taken = Taken(process=hello.process, incident=fresh[-1].id)
        run = replace(run, taken={**run.taken, hello.pod_uid: taken})
    before, run = run.decisions, _with_progress(run, now_s)
    return run, (*notices, *_changes(before, run.decisions))


_CHANGED: Mapping[str, str] = {
    "interval": "IntervalChanged",
    "bits": "BitsChanged",
}


def _changes(before: Iterable[Decision], after: Iterable[Decision]) -> Iterable[Notice]:
    known = {each.subject: each.value for each in before}
    for each in after:
        value = known.get(each.subject, "")
        if value and each.value and each.value != value:
            text = f"{each.subject}: {value} -> {each.value}; {each.why}"
            yield Notice(reason=_CHANGED[each.subject], message=text, warning=False)


def _with_incident(run: Run, hello: Hello, said: Incident, now_s: float) -> tuple[Run, list[Notice]]:
    where = f"pod {hello.pod}: {said.message}" if said.message else f"pod {hello.pod}"
    match said.kind:
        case IncidentKind.RESTORED:
            run = replace(
                run,
                restores=run.restores + 1,
                lost_steps=run.lost_steps + said.lost_steps,
                fell_back="",
                incidents=incident.restored(
                    run.incidents,
                    _number(run, run.pods.get(hello.pod_uid)),
                    step=said.step,
                    lost_steps=said.lost_steps,
                    parts=run.parts,
                ),
            )
            source = f" from the {said.cause}" if said.cause else ""
            lost = f", {said.lost_steps} steps are trained again" if said.lost_steps else ""
            text = f"pod {hello.pod}: restored step {said.step}{source} in {said.seconds:.1f} s{lost}"
            return run, [Notice(reason="Restored", message=text, warning=False)]
        case IncidentKind.SAVE_FAILED:
            run = replace(run, saves_failed=run.saves_failed + 1, failing=where)
            return run, [Notice(reason="SaveFailed", message=where)]
        case IncidentKind.FENCED:
            return replace(run, fenced=where), [Notice(reason="Fenced", message=where)]
        case IncidentKind.TRACKING_FAULT:
            return replace(run, tracking=where), [Notice(reason="TrackingFault", message=where)]
        case IncidentKind.FELL_BACK:
            return replace(run, fell_back=where), [Notice(reason="FellBack", message=where)]
        case IncidentKind.CREDENTIALS_MISSING:
            return run, [Notice(reason="CredentialsMissing", message=where)]
        case IncidentKind.STORE_UNAVAILABLE:
            return replace(run, failing=where), [Notice(reason="StoreUnavailable", message=where)]
        case IncidentKind.TRAINER_LOST:
            loss = Loss(
                at_s=min(said.at_s or now_s, now_s),
                cause=failure.LossCause.TRAINER_LOST,
                message=said.message,
                pod=hello.pod,
                pod_uid=hello.pod_uid,
                node=hello.node,
            )
            return _with_loss(run, loss, _number(run, run.pods.get(hello.pod_uid))), []
        case _:
            return run, []


def _stamped(run: Run, heartbeats: Mapping[str, Heartbeat], now_s: float) -> Mapping[str, Stamp]:
    """The stamps with those of new commits.

    The clock that counts is ours: that of a node may be wrong, and would hide that checkpoints are old or raise it for
    nothing. A sidecar's word is taken only for a commit that was there before anything was known of its run, and never
    for one in the future.
    """
    found = dict(run.stamps)
    before = run.progress
    for name, each in heartbeats.items():
        if not name and each.last_commit is None:
            continue  # its run is not known yet
        seq = each.last_commit.seq if each.last_commit is not None else 0
        known = found.get(name)
        if known is None and not run.stamps and before.last_seq:  # as an earlier controller wrote it
            known = Stamp(seq=before.last_seq, at_s=before.last_commit_at_s)
        if known is None:
            known = Stamp(seq=seq, at_s=min(each.last_commit_at_s, now_s))
        found[name] = Stamp(seq=seq, at_s=now_s) if seq > known.seq else known
    excess = len(found) - MAX_STAMPS
    return dict(list(found.items())[excess:]) if excess > 0 else found


def _with_progress(run: Run, now_s: float) -> Run:
    """The run with the progress that its sidecars report together. What nobody reports stays as it was."""
    slowest: dict[str, Heartbeat] = {}
    parts: dict[str, str] = {}
    before = run.progress
    attempts, openings = dict(before.attempts), dict(before.openings)
    for uid, report in run.reports.items():
        each = report.heartbeat
        if each is None:
            continue
        part = _part(run, uid, each.run)
        parts[each.run] = part or parts.get(each.run, "")
        if each.attempt:
            attempts[part] = max(each.attempt, attempts.get(part, 0))
            openings[part] = max(each.openings, openings.get(part, 0))
        other = slowest.get(each.run)
        seq = each.last_commit.seq if each.last_commit is not None else 0
        if other is None or seq >= (other.last_commit.seq if other.last_commit is not None else 0):
            slowest[each.run] = each
    steps = [rank.step for beat in run.live for rank in beat.ranks]
    stamps = _stamped(run, slowest, now_s)
    run = replace(run, stamps=stamps)
    shown = min(slowest.values(), key=lambda each: stamps.get(each.run, NO_STAMP).at_s, default=None)
    if shown is None:
        return run
    commit = shown.last_commit
    # Trainers that left say no step. They trained as far as they committed, which may be after they were last heard.
    left_at = min(
        (
            each.last_commit.step
            for name, each in slowest.items()
            if each.last_commit is not None and each.last_commit.attempt == attempts.get(parts[name])
        ),
        default=0,
    )
    decider = _decider(run, shown.run)
    if decider is not None:
        run = replace(
            run, measured=decider.measured or run.measured, decisions=decider.decisions or run.decisions
        )
    progress = replace(
        before,
        step=min(steps) if steps else max(before.step, left_at),
        attempts=attempts,
        openings=openings,
        world_size=_world_size(run) or before.world_size,
        stall_s=shown.stall_s or before.stall_s,
        lost_share=before.lost_share if commit is None else shown.lost_share,
        partial_recoveries=before.partial_recoveries if commit is None else shown.partial_recoveries,
        stored_bytes=sum(each.stored_bytes for each in slowest.values()) or before.stored_bytes,
        checkpoints=sum(each.checkpoints for each in slowest.values()) or before.checkpoints,
        policy=shown.policy if shown.policy.encoding else before.policy,
    )
    # After a rewind the newest commit is an older one: by the word of the attempt that resumed it.
    anew = shown.attempt > before.attempts.get(parts[shown.run], 0)
    if commit is not None and (commit.seq >= before.last_seq or anew or len(slowest) > 1):
        progress = replace(
            progress,
            last_step=commit.step,
            last_commit_at_s=stamps.get(shown.run, NO_STAMP).at_s,
            last_seq=commit.seq,
            durable_s=commit.durable_s,
        )
    # A trainer of this workload commits again; another workload's commits stand in the same log.
    if progress.last_seq > before.last_seq and commit is not None and commit.attempt <= progress.attempt:
        run = replace(run, fenced="")
    if any(each > before.attempts.get(part, 0) for part, each in attempts.items()):
        run = replace(run, fenced="", tracking="")
    return replace(run, progress=progress)


def _world_size(run: Run) -> int:
    """Ranks that the newest attempt has, by those that are attached; 0: none is."""
    newest = max((beat.attempt for beat in run.live if beat.ranks), default=0)
    return max(
        (rank.world_size for beat in run.live if beat.attempt == newest for rank in beat.ranks), default=0
    )


def _decider(run: Run, name: str) -> Heartbeat | None:
    """The heartbeat of the pod that decides for a run in the store: of several that say so the one with rank 0."""
    told = [
        each.heartbeat
        for each in run.reports.values()
        if each.heartbeat is not None
        and each.heartbeat.run == name
        and (each.heartbeat.decisions or each.heartbeat.measured is not None)
    ]
    return max(told, key=lambda each: (each.attempt, has_rank_0(each)), default=None)


def has_rank_0(heartbeat: Heartbeat) -> bool:
    return any(each.rank == 0 for each in heartbeat.ranks)


def finished(run: Run, how: str, at_s: float) -> Run:
    """The run, over."""
    return replace(run, finished=how, finished_at_s=at_s)
