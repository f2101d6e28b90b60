"""Conclusions about a run: end state, phase, conditions and events. Pure.

`reconcile` runs after every change and every few seconds, because staleness and stuck deletions depend on time alone.
The event of a problem is emitted once, when the problem begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision

from deltashard_operator.fleet import report
from deltashard_operator.kube import owner_reference
from deltashard_operator.run import condition, failure, rank_presence, watched_run
from deltashard_operator.run import phase as phases
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.observed_object import ABSENT_S, NodeView
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import (
    REPORTER_TIMEOUT_S,
    LastReport,
    Progress,
    RunEvent,
    WatchedRun,
    finished,
)

JOBSET_RESTART_GRACE_S = 60.0
"""Time that a JobSet has to recreate its Jobs after all have ended and one has Failed."""
STUCK_DELETION_S = 10.0
"""A deletion on a lost node that is overdue for this time is stuck."""
STALE_INTERVALS = 3
MIN_STALE_S = 120.0
"""Minimum age of a stale checkpoint, so that a controller restart or a slow save is not a problem."""
REPORTED_FIELDS = ("stall_s", "lost_share", "partial_recoveries", "measured", "decisions")
"""Fields of a run's progress that are copied from its reporter."""


def reconcile(
    run: WatchedRun, nodes: Mapping[str, NodeView], now_s: float
) -> tuple[WatchedRun, tuple[RunEvent, ...]]:
    """Return the run with its current phase and conditions, and the events to emit."""
    run = _with_end_state(replace(run, watched_since_s=run.watched_since_s or now_s), now_s)
    live = watched_run.live_reports(run, now_s, nodes)
    expected, present, missing = rank_presence.of_run(run, now_s, nodes)
    decided, before = run.progress.decisions, run.phase
    run = replace(run, progress=replace(_progress(run, live), world_size=expected, ranks_present=present))
    all_known = rank_presence.is_known(run, now_s, nodes)
    facts = Facts(run=run, live=live, nodes=nodes, now_s=now_s, known=all_known)
    problems = [] if run.finished else _problems(facts)
    phase = Phase.FINISHED
    if not run.finished:
        phase = phases.phase_of(
            before,
            rank_presence.phases(run, live, known=all_known),
            alive=_may_train(facts),
            started=run.progress.attempt > 0,
            suspended=run.suspended,
            # After missing ranks the run stays Recovering until all ranks are present.
            missing=missing or (before is Phase.RECOVERING and present < expected),
            unsafe=any(each.type in UNSAFE for each in problems),
        )
    training = phase in phases.TRAINING_PHASES
    trained_s = (
        max(now_s - run.reconciled_s, 0.0)
        if run.reconciled_s and training and before in phases.TRAINING_PHASES
        else 0.0
    )
    run = replace(
        run,
        reconciled_s=now_s,
        trained_s=run.trained_s + trained_s,
        phase=phase,
        training_since_s=(run.training_since_s or now_s) if training else 0.0,
    )
    known = {each.type for each in run.conditions if each.status == "True"}
    reported = [
        RunEvent(reason=EVENT_REASONS[each.type], message=each.message)
        for each in problems
        if each.type in EVENT_REASONS and each.type not in known
    ]
    found = condition.updated(run.conditions, (_ready(run, facts, problems), *problems), now_s)
    return replace(run, conditions=found), (*reported, *_changes(decided, run))


def _progress(run: WatchedRun, live: Mapping[str, LastReport]) -> Progress:
    """Combine the progress of all parts. Values that no part reports are kept."""
    before = run.progress
    reported = [(each, each.state) for each in run.parts.values() if each.state is not None]
    steps = [rank.step for each in live.values() for rank in each.pod.ranks]
    # Disconnected trainers report no step, but their last commit may be newer than their last report.
    own = [
        state.newest.step
        for part, state in reported
        if state.newest is not None and state.newest.attempt == part.attempt
    ]
    progress = replace(
        before,
        attempt=max((each.attempt for each in run.parts.values()), default=before.attempt),
        step=min(steps) if steps else max(before.step, min(own, default=0)),
    )
    if not reported:
        return progress
    shown, state = min(reported, key=lambda each: each[0].committed_at_s)
    newest = state.newest or pb.Commit(step=before.last_step, durable_s=before.durable_s)
    return replace(
        progress,
        **{name: getattr(state, name) or getattr(before, name) for name in REPORTED_FIELDS},
        stored_bytes=sum(each.stored_bytes for _, each in reported) or before.stored_bytes,
        checkpoints=sum(each.checkpoint_count for _, each in reported),
        policy=state.policy if state.policy.encoding else before.policy,
        last_step=newest.step,
        last_commit_at_s=shown.committed_at_s or before.last_commit_at_s,
        last_seq=shown.seq or before.last_seq,
        durable_s=newest.durable_s,
    )


def _with_end_state(run: WatchedRun, now_s: float) -> WatchedRun:
    """Return the run with its end state set if the workload has ended, or cleared if it has restarted."""
    alive = any(each.alive for each in run.pods.values())
    outcomes, native = {each.outcome for each in run.jobs.values()}, run.workload.native
    how, at_s = "", now_s
    if run.finished:
        # Pods of a StatefulSet or a JobSet may be recreated long after the end.
        again = alive and not native and "" in (outcomes or {""})
        return replace(run, finished="", finished_at_s=0.0) if again else run
    if native == "Pod":
        ends = {"Succeeded": "Completed", "Failed": "Failed"}
        how = next((ends.get(each.phase, "") for each in run.pods.values()), "")
    elif run.jobs and "" not in outcomes:
        at_s = max(each.ended_at_s for each in run.jobs.values()) or now_s
        how = "Failed" if "Failed" in outcomes else "Completed"
        if how == "Failed" and native != "Job" and now_s - at_s < JOBSET_RESTART_GRACE_S:
            return run
    elif run.workload.group_kind == owner_reference.PYTORCH_JOB and run.pods:
        # Only the PyTorchJob's controller knows whether a failed pod is recreated.
        how = "Completed" if all(each.phase == "Succeeded" for each in run.pods.values()) else ""
    elif not native and not run.jobs and not run.pods and now_s - run.last_seen_s >= ABSENT_S:
        how = "Deleted"
    return finished(run, how, at_s) if how else run


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Input of the conditions."""

    run: WatchedRun
    live: Mapping[str, LastReport]
    nodes: Mapping[str, NodeView]
    now_s: float
    known: bool
    """Whether all pods that can hold a rank have reported."""

    @property
    def has_reporter(self) -> bool:
        """Whether a live sidecar reports the age of the newest checkpoint."""
        return any(each.is_reporter for each in self.live.values())


def _may_train(facts: Facts) -> bool:
    """Return whether a pod can be training: its sidecar is live, or it runs on a node that is not known to be lost."""

    def is_well(name: str) -> bool:
        node = facts.nodes.get(name)
        return node is None or node.ready

    pods = [each for each in facts.run.pods.values() if each.alive]
    return any(each.uid in facts.live or (each.phase == "Running" and is_well(each.node)) for each in pods)


def _stuck(facts: Facts) -> str:
    """Describe a pod whose deletion cannot finish because its node is lost and that is not replaced until then."""
    for pod in facts.run.pods.values():
        overdue = 0 < pod.terminating_at_s <= facts.now_s - STUCK_DELETION_S and not pod.finished
        node, job = facts.nodes.get(pod.node), facts.run.jobs.get(pod.job_uid)
        lost = pod.node and (node is None or not node.ready)
        if overdue and lost and not (pod.job_uid and (job is None or job.replaces_lost)):
            return (
                f"pod {pod.name} cannot end because node {pod.node} is lost, and is not replaced until then "
                f"(podReplacementPolicy Failed). If the machine is off for good: `kubectl delete node {pod.node}`, or "
                f"`kubectl taint node {pod.node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute`"
            )
    return ""


def _crash_looping(facts: Facts) -> str:
    for part, loop in facts.run.ledger.crashes.items():
        if failure.is_loop(loop, facts.run.seq_of(part)):
            whose = f" of run {part}" if part else ""
            return (
                f"{loop.ending}{whose}, {loop.times} times with no commit between: restarts do not "
                "help; see the container's log (kubectl logs --previous)"
            )
    return ""


def _unreachable(facts: Facts) -> str:
    return next((each.unreachable for each in facts.run.progress.decisions if each.unreachable), "")


def _credentials_missing(facts: Facts) -> str:
    if all(each.pod.credentials_ok for each in facts.live.values()):
        return ""
    return (
        "the store's credentials are absent or empty: create the Secret or the service account's role that the "
        "policy names; no restart is needed"
    )


def _store_unavailable(facts: Facts) -> str:
    if all(each.pod.store_ok for each in facts.live.values()):
        return ""
    incident_messages = facts.run.incident_messages
    return (
        incident_messages.get("StoreUnavailable")
        or incident_messages.get("SaveFailed")
        or "the store does not answer"
    )


def _saves_failing(facts: Facts) -> str:
    n = max((each.pod.consecutive_save_failures for each in facts.live.values()), default=0)
    text = f"{n} save{'s' * (n > 1)} failed since the last checkpoint"
    return "; ".join(filter(None, (text, facts.run.incident_messages.get("SaveFailed")))) if n else ""


def _stale(facts: Facts) -> str:
    progress, since_s = facts.run.progress, facts.run.training_since_s
    every_s = progress.policy.every_s
    if blocked := next((each.pod.save_blocked for each in facts.live.values() if each.pod.save_blocked), ""):
        return f"a save is due and does not happen: {blocked}; see the trainer's log and ckpt.doctor()"
    training = any(each.pod.phase is report.SidecarPhase.TRAINING for each in facts.live.values())
    limit_s = max(STALE_INTERVALS * every_s + progress.durable_s, MIN_STALE_S)
    recent = facts.now_s - max(progress.last_commit_at_s, since_s) <= limit_s
    if every_s <= 0 or not since_s or not training or not facts.has_reporter or recent:  # no timer is active
        return ""
    return (
        f"training continues, but the last checkpoint is older than {limit_s:.0f} s, with one due every "
        f"{every_s:.0f} s; see the sidecar's log and the events of this run"
    )


PROBLEMS: Mapping[str, Callable[[Facts], str]] = {
    "RunIdTaken": lambda facts: facts.run.run_id_conflict,
    "StuckOnLostNode": _stuck,
    "Fenced": lambda facts: facts.run.incident_messages.get("Fenced", ""),
    "TrackingFault": lambda facts: facts.run.incident_messages.get("TrackingFault", ""),
    "CrashLooping": _crash_looping,
    "GoalUnreachable": _unreachable,
    "FellBack": lambda facts: facts.run.incident_messages.get("FellBack", ""),
    "CredentialsMissing": _credentials_missing,
    "StoreUnavailable": _store_unavailable,
    "SavesFailing": _saves_failing,
    "Stale": _stale,
}
"""Condition type -> function that returns its message, or an empty string if the condition is False."""
UNSAFE = PROBLEMS.keys() - {"StuckOnLostNode", "CrashLooping", "GoalUnreachable", "FellBack"}
"""Problems that set the phase of a training run to Degraded."""
STICKY_PROBLEMS = frozenset({"SavesFailing", "CredentialsMissing", "StoreUnavailable"})
"""Problems repeated in every report. They keep their state while no sidecar that could report them is live."""
EVENT_REASONS = {
    "Stale": "CheckpointStale",
    **{each: each for each in ("StuckOnLostNode", "RunIdTaken", "CrashLooping", "GoalUnreachable")},
}
"""Event reasons of problems that begin. The other problems have the event of their incident."""


def _problems(facts: Facts) -> list[Condition]:
    before = {each.type: each for each in facts.run.conditions if each.status == "True"}
    found = []
    for type_, sentence in PROBLEMS.items():
        if text := sentence(facts):
            found.append(Condition(type=type_, status="True", reason=type_, message=text[:32768]))
        elif type_ in before and _is_sticky(type_, facts):
            found.append(before[type_])
    return found


def _is_sticky(type_: str, facts: Facts) -> bool:
    """Return whether no live sidecar could report that this problem has ended."""
    if type_ == "Stale":
        return not facts.has_reporter and facts.run.phase in phases.TRAINING_PHASES
    return type_ in STICKY_PROBLEMS and (not facts.live or not facts.known)


def _ready(run: WatchedRun, facts: Facts, problems: Iterable[Condition]) -> Condition:
    """Return the Ready condition. The first matching reason applies."""
    unsafe = next((each for each in problems if each.type in UNSAFE), None)
    progress, status = run.progress, "False"
    before = next((each for each in run.conditions if each.type == condition.READY), None)
    if run.finished:
        reason, text = run.finished, "the workload ended"
    elif run.phase not in phases.TRAINING_PHASES:
        reason, text = run.phase.value, "no step is being trained"
        if run.suspended:
            text += "; the workload is suspended"
        elif run.losses:
            text += f"; {run.losses[-1].message}"
        if progress.world_size > 1:
            text += f"; {progress.ranks_present} of {progress.world_size} ranks are present"
    elif unsafe is not None:
        reason, text = unsafe.type, unsafe.message
    elif not facts.live:
        if before is not None and facts.now_s - run.watched_since_s <= REPORTER_TIMEOUT_S:
            return before  # a new controller has not waited for one report interval yet
        status, reason = "Unknown", "NoReports"
        text = "no sidecar reports to the controller; training and checkpoints continue without it"
    elif not progress.last_commit_at_s:
        reason, text = "NoCheckpointYet", "training began; no checkpoint is committed yet"
    else:
        status, reason, text = "True", "Checkpointing", "training continues and its checkpoints are recent"
    return Condition(type=condition.READY, status=status, reason=reason, message=text[:32768])


CHANGE_REASONS = {"interval": "IntervalChanged", "bits": "BitsChanged"}


def _changes(before: Iterable[Decision], run: WatchedRun) -> Iterable[RunEvent]:
    known = {each.subject: each.value for each in before}
    for each in run.progress.decisions:
        value = known.get(each.subject, "")
        if value and each.value and each.value != value:
            text = f"{each.subject}: {value} -> {each.value}; {each.why}"
            yield RunEvent(reason=CHANGE_REASONS[each.subject], message=text, warning=False)
