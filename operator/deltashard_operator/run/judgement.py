"""Conclusions about a run: is it over, what phase, what is wrong, and what people should hear. Pure.

`judged` is called when something happened and every few seconds besides, because time alone makes a checkpoint stale
and a deletion stuck. It tells a trouble once, when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deltashard_operator.fleet import sidecar_report
from deltashard_operator.fleet.sidecar_report import Heartbeat
from deltashard_operator.kube import owner_reference
from deltashard_operator.run import condition, failure, incident, roll_call
from deltashard_operator.run import phase as phases
from deltashard_operator.run.condition import Condition, fact
from deltashard_operator.run.observed_object import ABSENT_S, NodeView, PodView
from deltashard_operator.run.phase import Signs
from deltashard_operator.run.roll_call import RollCall
from deltashard_operator.run.watched_run import Notice, Run, finished, with_tally

SETTLED_S = 60.0
"""A JobSet whose Jobs all ended, one of them Failed, is given so long to make new ones."""
HELD = frozenset({condition.SAVES_FAILING, condition.CREDENTIALS_MISSING, condition.STORE_UNAVAILABLE})
"""Told by every heartbeat; they stay as they are while no sidecar is heard."""
STUCK_S = 10.0
"""A deletion on a lost node that is overdue for so long is stuck."""


def judged(run: Run, nodes: Mapping[str, NodeView], now_s: float) -> tuple[Run, tuple[Notice, ...]]:
    """The run with phase, failures and conditions of now, and what people should hear of it."""
    for part, openings in run.progress.openings.items():
        tally = run.tallies.get(part, failure.Tally())
        tally, over = failure.with_openings(tally, openings, now_s, seq=run.at(part).seq, run=part)
        run = with_tally(run, part, tally, over)
    run = _spread(_ended(run, now_s))
    live = run.live
    roll = roll_call.of_run(run, nodes)
    facts = list(_facts(run, live, nodes, now_s))
    before = run.phase
    phase = phases.phase_of(
        Signs(
            finished=bool(run.finished),
            suspended=run.suspended,
            started=bool(run.progress.attempt or run.started_at_s),
            alive=any(_may_train(run, each, nodes) for each in run.pods.values()),
            heard=_phases(live, roll),
            # Who was missing is not back before all are, whoever is heard meanwhile.
            missing=roll.missing or (before is phases.Phase.RECOVERING and roll.present < roll.expected),
            unsafe=any(each.type in condition.UNSAFE for each in facts),
            before=before,
        )
    )
    trains = phase in phases.TRAINS
    if run.judged_s and trains and before in phases.TRAINS:
        trained_s = max(now_s - run.judged_s, 0.0)
        run = replace(
            run, trained_s=run.trained_s + trained_s, incidents=incident.trained(run.incidents, trained_s)
        )
    run = replace(
        run,
        judged_s=now_s,
        phase=phase,
        phase_since_s=run.phase_since_s if phase is before and run.phase_since_s else now_s,
        trains_since_s=(run.trains_since_s or now_s) if trains else 0.0,
        started_at_s=run.started_at_s or (now_s if trains else 0.0),
    )
    facts.append(_ready(run, live, facts, roll))
    found, changed = condition.updated(run.conditions, facts, now_s)
    return replace(run, conditions=found), tuple(_notices(changed))


def _phases(live: tuple[Heartbeat, ...], roll: RollCall) -> frozenset[sidecar_report.Phase]:
    """Phases of the sidecars that count: where all ranks are there, one without a trainer waits for nobody."""
    if not roll.complete:
        return frozenset(each.phase for each in live)
    return frozenset(each.phase for each in live if each.ranks) or frozenset(each.phase for each in live)


def _spread(run: Run) -> Run:
    """The run with how many pods it has at once."""
    width = max(run.width, sum(each.alive for each in run.pods.values()))
    return run if width == run.width else replace(run, width=width)


def _may_train(run: Run, pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """Whether a pod can be at work: its sidecar is heard, or it runs on a node that is not known to be lost."""
    report = run.reports.get(pod.uid)
    if not pod.alive:
        return False
    if report is not None and report.connected:
        return True
    node = nodes.get(pod.node)
    return pod.phase == "Running" and (node is None or node.ready)


def _ended(run: Run, now_s: float) -> Run:
    """Whether the workload is over, or has begun anew."""
    alive = any(each.alive for each in run.pods.values())
    outcomes = {each.outcome for each in run.jobs.values()}
    if run.finished:
        # The pods of a StatefulSet or a JobSet may come back long after.
        if alive and not run.workload.native and "" in (outcomes or {""}):
            return replace(run, finished="", finished_at_s=0.0)
        return run
    if run.workload.native == "Pod":
        phase = next((each.phase for each in run.pods.values()), "")
        outcome = {"Succeeded": "Completed", "Failed": "Failed"}.get(phase)
        return finished(run, outcome, now_s) if outcome else run
    if run.jobs and "" not in outcomes:
        ended_at_s = max(each.ended_at_s for each in run.jobs.values()) or now_s
        if "Failed" not in outcomes:
            return finished(run, "Completed", ended_at_s)
        if run.workload.native == "Job" or now_s - ended_at_s >= SETTLED_S:
            return finished(run, "Failed", ended_at_s)
        return run
    if run.workload.group_kind == owner_reference.PYTORCH_JOB and run.pods:
        # Whether a pod that failed is made anew, its controller alone knows.
        done = all(each.phase == "Succeeded" for each in run.pods.values())
        return finished(run, "Completed", now_s) if done else run
    if not run.workload.native and not run.jobs and not run.pods:
        return finished(run, "Deleted", now_s) if now_s - run.seen_s >= ABSENT_S else run
    return run


def _facts(  # noqa: C901
    run: Run, live: tuple[Heartbeat, ...], nodes: Mapping[str, NodeView], now_s: float
) -> Iterable[condition.Fact]:
    if run.finished:
        return
    if run.taken_by:
        yield fact(condition.RUN_ID_TAKEN, "HeldByAnotherWorkload", run.taken_by)
    stuck = stuck_pod(run, nodes, now_s)
    if stuck is not None:
        yield fact(condition.STUCK, "DeletionCannotFinish", _stuck_sentence(stuck))
    if run.fenced:
        yield fact(condition.FENCED, "Fenced", run.fenced)
    if run.tracking:
        yield fact(condition.TRACKING_FAULT, "TrackingFault", run.tracking)
    for part, tally in run.tallies.items():
        loop = failure.crash_loop(tally, run.at(part))
        if loop is not None:
            yield fact(condition.CRASH_LOOPING, "CrashLooping", _loop_sentence(loop, part))
            break
    unreachable = next((each.unreachable for each in run.decisions if each.unreachable), "")
    if unreachable:
        yield fact(condition.GOAL_UNREACHABLE, "GoalUnreachable", unreachable)
    if run.fell_back:
        yield fact(condition.FELL_BACK, "NewerOnesDamaged", run.fell_back)
    if not live:  # nobody says that it is over, and nobody that it goes on
        held = HELD | ({condition.STALE} if run.phase in phases.TRAINS else frozenset())
        for each in run.conditions:
            if each.type in held and each.status == "True":
                yield fact(each.type, each.reason, each.message)
    if any(not each.credentials_ok for each in live):
        yield fact(
            condition.CREDENTIALS_MISSING,
            "Absent",
            "the store's credentials are absent or empty: create the Secret or the service account's role that the "
            "policy names; no restart is needed",
        )
    if any(not each.store_ok for each in live):
        yield fact(
            condition.STORE_UNAVAILABLE, "StoreUnavailable", run.failing or "the store does not answer"
        )
    row = max((each.saves_failed_in_a_row for each in live), default=0)
    if row:
        text = f"{row} save{'s' * (row > 1)} failed since the last checkpoint"
        yield fact(condition.SAVES_FAILING, "SavesFail", f"{text}; {run.failing}" if run.failing else text)
    blocked = next((each.save_blocked for each in live if each.save_blocked), "")
    limit_s = condition.stale_after_s(run.progress.policy.every_s, run.progress.durable_s)
    if blocked:
        yield fact(
            condition.STALE,
            "SaveBlocked",
            f"a save is due and does not happen: {blocked}; the trainer's log and ckpt.doctor() have the remedy",
        )
    elif (
        limit_s is not None
        and run.trains_since_s
        and any(each.phase in {sidecar_report.Phase.TRAINING, sidecar_report.Phase.SAVING} for each in live)
    ):
        age_s = now_s - max(run.progress.last_commit_at_s, run.trains_since_s)
        if age_s > limit_s:
            yield fact(
                condition.STALE,
                "CheckpointStale",
                f"training goes on, but the last checkpoint is older than {limit_s:.0f} s, with one due every "
                f"{run.progress.policy.every_s:.0f} s; see the sidecar's log and the events of this run",
            )


def stuck_pod(run: Run, nodes: Mapping[str, NodeView], now_s: float) -> PodView | None:
    """A pod whose deletion cannot finish because its node is lost, and that nobody will replace before."""
    for pod in run.pods.values():
        if not pod.terminating_at_s or now_s < pod.terminating_at_s + STUCK_S or not pod.node:
            continue
        if pod.phase in {"Succeeded", "Failed"}:
            continue
        node = nodes.get(pod.node)
        if node is not None and node.ready:
            continue
        job = run.jobs.get(pod.job_uid)
        if pod.job_uid and (job is None or job.replaces_lost):
            continue
        return pod
    return None


def _loop_sentence(loop: failure.Crash, part: str) -> str:
    whose = f" of run {part}" if part else ""
    return (
        f"{' or '.join(loop.endings)}{whose} ended {loop.times} times with no commit between: restarts do not "
        "help; see the container's log (kubectl logs --previous)"
    )


def _stuck_sentence(pod: PodView) -> str:
    return (
        f"pod {pod.name} cannot finish its deletion because node {pod.node} is lost, and it is not replaced before "
        f"(podReplacementPolicy Failed). If the machine is off for good: `kubectl delete node {pod.node}`, or `kubectl "
        f"taint node {pod.node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute`"
    )


def _ready(
    run: Run, live: tuple[Heartbeat, ...], facts: Iterable[condition.Fact], roll: RollCall
) -> condition.Fact:
    if run.finished:
        return fact(condition.READY, run.finished, "the workload ended", status="False")
    if run.phase not in phases.TRAINS:
        there = f"; {roll.present} of {roll.expected} ranks are there" if roll.expected > 1 else ""
        return fact(condition.READY, run.phase.value, f"no step is being trained{there}", status="False")
    unsafe = [each for each in facts if each.type in condition.UNSAFE]
    if unsafe:
        return fact(condition.READY, unsafe[0].type, unsafe[0].message, status="False")
    if not live:
        return fact(
            condition.READY,
            "NotHeard",
            "no sidecar is connected to the controller; training and its checkpoints need none",
            status="Unknown",
        )
    if not run.progress.last_commit_at_s:
        return fact(
            condition.READY,
            "NoCheckpointYet",
            "training began; its first checkpoint is to come",
            status="False",
        )
    return fact(condition.READY, "Checkpointing", "training goes on and its checkpoints are fresh")


_EVENTS = {
    condition.STALE: "CheckpointStale",
    condition.CREDENTIALS_MISSING: "CredentialsMissing",
    condition.STORE_UNAVAILABLE: "StoreUnavailable",
    condition.STUCK: "StuckOnLostNode",
    condition.RUN_ID_TAKEN: "RunIdTaken",
    condition.CRASH_LOOPING: "CrashLooping",
    condition.GOAL_UNREACHABLE: "GoalUnreachable",
}
"""Troubles that are told when they begin; the others are told by the incident itself."""


def _notices(changed: Iterable[Condition]) -> Iterable[Notice]:
    for each in changed:
        if each.status == "True" and each.type in _EVENTS:
            yield Notice(reason=_EVENTS[each.type], message=each.message)
