"""Conclusions about a run: is it over, what phase, what is wrong, and what people should hear. Pure.

`judged` is called when something happened and every few seconds besides, because time alone makes a checkpoint stale
and a deletion stuck. It tells a trouble once, when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from deltashard_proto.v1.fleet_pb2 import Decision

from deltashard_operator.fleet import report
from deltashard_operator.kube import owner_reference
from deltashard_operator.run import condition, failure, rank_presence, watched_run
from deltashard_operator.run import phase as phases
from deltashard_operator.run.condition import Condition, fact
from deltashard_operator.run.observed_object import ABSENT_S, NodeView, PodView
from deltashard_operator.run.phase import Phase, Signs
from deltashard_operator.run.rank_presence import RankPresence
from deltashard_operator.run.watched_run import (
    NO_PART,
    SILENT_BEATS,
    SPEAKER_BEAT_S,
    Heard,
    Notice,
    Progress,
    Run,
    finished,
    with_tallies,
)

SETTLED_S = 60.0
"""A JobSet whose Jobs all ended, one of them Failed, is given so long to make new ones."""
STUCK_S = 10.0
"""A deletion on a lost node that is overdue for so long is stuck."""
HELD = frozenset({condition.SAVES_FAILING, condition.CREDENTIALS_MISSING, condition.STORE_UNAVAILABLE})
"""Told by every report; they stay as they are while those are not heard that could tell them."""


def judged(run: Run, nodes: Mapping[str, NodeView], now_s: float) -> tuple[Run, tuple[Notice, ...]]:
    """The run with phase, failures and conditions of now, and what people should hear of it."""
    run = _settled(replace(run, watched_since_s=run.watched_since_s or now_s), now_s)
    run = _ended(run, now_s)
    live = watched_run.heard(run, now_s, nodes)
    presence = rank_presence.of_run(run, now_s, nodes)
    decided = run.progress.decisions
    run = replace(run, progress=_progress(run, live, presence))
    facts = Facts(
        run=run,
        live=live,
        nodes=nodes,
        now_s=now_s,
        presence=presence,
        known=rank_presence.is_known(run, now_s, nodes),
    )
    troubles = () if run.finished else tuple(_troubles(facts))
    before = run.phase
    phase = phases.phase_of(
        Signs(
            finished=bool(run.finished),
            suspended=run.suspended,
            started=bool(run.progress.attempt or run.started_at_s),
            alive=any(_may_train(each, facts) for each in run.pods.values()),
            heard=rank_presence.phases(run, live, presence, known=facts.known),
            # Who was missing is not back before all are, whoever is heard meanwhile.
            missing=presence.missing or (before is Phase.RECOVERING and presence.present < presence.expected),
            unsafe=any(each.type in condition.UNSAFE for each in troubles),
            before=before,
        )
    )
    trains = phase in phases.TRAINS
    trained_s = max(now_s - run.judged_s, 0.0) if run.judged_s and trains and before in phases.TRAINS else 0.0
    run = replace(
        run,
        judged_s=now_s,
        trained_s=run.trained_s + trained_s,
        phase=phase,
        phase_since_s=run.phase_since_s if phase is before and run.phase_since_s else now_s,
        trains_since_s=(run.trains_since_s or now_s) if trains else 0.0,
        started_at_s=run.started_at_s or (now_s if trains else 0.0),
    )
    found, changed = condition.updated(run.conditions, (_ready(run, facts, troubles), *troubles), now_s)
    return replace(run, conditions=found), (*_notices(changed), *_changes(decided, run))


def _settled(run: Run, now_s: float) -> Run:
    """The run with the failures by what its parts tell of their openings."""
    ledger, changed = run.ledger, dict[str, failure.Tally]()
    over: list[failure.Interruption] = []
    # A part that was left out of the ledger begins with what it tells: its failures are in the sum.
    for part, told in run.parts.items():
        known = ledger.tallies.get(part)
        before = known or failure.Tally(openings=told.openings if ledger.clipped else 0)
        after, ended = failure.with_openings(before, told.openings, now_s, seq=told.seq, run=part)
        if after is not known and after.openings:
            changed[part] = after
            over += ended
    return with_tallies(run, changed, over) if changed else run


def _progress(run: Run, live: Mapping[str, Heard], presence: RankPresence) -> Progress:
    """How far the run is, by its parts together. What nobody tells stays as it was."""
    before = run.progress
    known = [each for each in run.parts.values() if each.state is not None]
    states = [each.state for each in known if each.state is not None]
    steps = [rank.step for each in live.values() for rank in each.pod.ranks]
    # Trainers that left say no step. They trained as far as they committed, which may be after they were last heard.
    own = [
        each.state.newest.step
        for each in known
        if each.state and each.state.newest and each.state.newest.attempt == each.attempt
    ]
    progress = replace(
        before,
        attempt=max((each.attempt for each in run.parts.values()), default=before.attempt),
        step=min(steps) if steps else max(before.step, min(own, default=0)),
        world_size=presence.expected,
        ranks_present=presence.present,
    )
    shown = min(known, key=lambda each: each.committed_at_s, default=NO_PART)
    state = shown.state
    if state is None:
        return progress
    progress = replace(
        progress,
        stall_s=state.stall_s or before.stall_s,
        stored_bytes=sum(each.stored_bytes for each in states) or before.stored_bytes,
        checkpoints=sum(each.checkpoint_count for each in states),
        policy=state.policy if state.policy.encoding else before.policy,
        measured=state.measured or before.measured,
        decisions=state.decisions or before.decisions,
    )
    if state.newest is None:
        return progress
    return replace(
        progress,
        lost_share=state.lost_share,
        partial_recoveries=state.partial_recoveries,
        last_step=state.newest.step,
        last_commit_at_s=shown.committed_at_s,
        last_seq=shown.seq,
        durable_s=state.newest.durable_s,
    )


def _may_train(pod: PodView, facts: Facts) -> bool:
    """Whether a pod can be at work: its sidecar is heard, or it runs on a node that is not known to be lost."""
    node = facts.nodes.get(pod.node)
    well = node is None or node.ready
    return pod.alive and (pod.uid in facts.live or (pod.phase == "Running" and well))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What conditions are read from."""

    run: Run
    live: Mapping[str, Heard]
    """Sidecars that are heard, by pod UID."""
    nodes: Mapping[str, NodeView]
    now_s: float
    presence: RankPresence
    known: bool
    """Whether all are heard that may hold a rank."""

    @property
    def saves_failed(self) -> int:
        """In a row."""
        return max((each.pod.saves_failed_in_a_row for each in self.live.values()), default=0)

    @property
    def spoken(self) -> bool:
        """Whether somebody is heard who knows how old the newest checkpoint is."""
        return any(each.speaks for each in self.live.values())

    @property
    def trains(self) -> bool:
        return any(each.pod.phase is report.Phase.TRAINING for each in self.live.values())


def _stuck(facts: Facts) -> str:
    """Of a pod whose deletion cannot finish because its node is lost, and that nobody will replace before."""
    for pod in facts.run.pods.values():
        overdue = 0 < pod.terminating_at_s <= facts.now_s - STUCK_S
        node, job = facts.nodes.get(pod.node), facts.run.jobs.get(pod.job_uid)
        replaced = pod.job_uid and (job is None or job.replaces_lost)
        if not overdue or not pod.node or pod.over or (node is not None and node.ready) or replaced:
            continue
        return (
            f"pod {pod.name} cannot finish its deletion because node {pod.node} is lost, and it is not replaced before "
            f"(podReplacementPolicy Failed). If the machine is off for good: `kubectl delete node {pod.node}`, or "
            f"`kubectl taint node {pod.node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute`"
        )
    return ""


def _looping(facts: Facts) -> str:
    for part, tally in facts.run.ledger.tallies.items():
        loop = failure.crash_loop(tally, facts.run.at(part))
        if loop is not None:
            whose = f" of run {part}" if part else ""
            return (
                f"{' or '.join(loop.endings)}{whose} ended {loop.times} times with no commit between: restarts do not "
                "help; see the container's log (kubectl logs --previous)"
            )
    return ""


def _unreachable(facts: Facts) -> str:
    return next((each.unreachable for each in facts.run.progress.decisions if each.unreachable), "")


def _without_credentials(facts: Facts) -> str:
    if all(each.pod.credentials_ok for each in facts.live.values()):
        return ""
    return (
        "the store's credentials are absent or empty: create the Secret or the service account's role that the "
        "policy names; no restart is needed"
    )


def _without_store(facts: Facts) -> str:
    if all(each.pod.store_ok for each in facts.live.values()):
        return ""
    return facts.run.failing or "the store does not answer"


def _saves_fail(facts: Facts) -> str:
    n = facts.saves_failed
    text = f"{n} save{'s' * (n > 1)} failed since the last checkpoint"
    return "; ".join(filter(None, (text, facts.run.failing))) if n else ""


def _save_blocked(facts: Facts) -> str:
    blocked = next((each.pod.save_blocked for each in facts.live.values() if each.pod.save_blocked), "")
    if not blocked:
        return ""
    return (
        f"a save is due and does not happen: {blocked}; the trainer's log and ckpt.doctor() have the remedy"
    )


def _stale(facts: Facts) -> str:
    progress = facts.run.progress
    limit_s = condition.stale_after_s(progress.policy.every_s, progress.durable_s)
    if limit_s is None or not facts.run.trains_since_s or not facts.trains or not facts.spoken:
        return ""
    if facts.now_s - max(progress.last_commit_at_s, facts.run.trains_since_s) <= limit_s:
        return ""
    return (
        f"training goes on, but the last checkpoint is older than {limit_s:.0f} s, with one due every "
        f"{progress.policy.every_s:.0f} s; see the sidecar's log and the events of this run"
    )


TROUBLES: tuple[tuple[str, str, Callable[[Facts], str]], ...] = (
    (condition.RUN_ID_TAKEN, "HeldByAnotherWorkload", lambda facts: facts.run.taken_by),
    (condition.STUCK, "DeletionCannotFinish", _stuck),
    (condition.FENCED, "Fenced", lambda facts: facts.run.fenced),
    (condition.TRACKING_FAULT, "TrackingFault", lambda facts: facts.run.tracking),
    (condition.CRASH_LOOPING, "CrashLooping", _looping),
    (condition.GOAL_UNREACHABLE, "GoalUnreachable", _unreachable),
    (condition.FELL_BACK, "NewerOnesDamaged", lambda facts: facts.run.fell_back),
    (condition.CREDENTIALS_MISSING, "Absent", _without_credentials),
    (condition.STORE_UNAVAILABLE, "StoreUnavailable", _without_store),
    (condition.SAVES_FAILING, "SavesFail", _saves_fail),
    (condition.STALE, "SaveBlocked", _save_blocked),
    (condition.STALE, "CheckpointStale", _stale),
)
"""(type, reason, sentence that is empty where it is not so); the first row of a type that holds counts."""


def _troubles(facts: Facts) -> Iterable[Condition]:
    """Troubles of a run that is not finished."""
    found: dict[str, Condition] = {}
    for type_, reason, sentence in TROUBLES:
        if type_ not in found and (text := sentence(facts)):
            found[type_] = fact(type_, reason, text)
    for each in facts.run.conditions:
        if each.status == "True" and each.type not in found and _is_held(each.type, facts):
            found[each.type] = each
    return found.values()


def _is_held(type_: str, facts: Facts) -> bool:
    """Whether nobody who is heard could say that this trouble is over."""
    if type_ == condition.STALE:
        return not facts.spoken and facts.run.phase in phases.TRAINS
    return type_ in HELD and (not facts.live or not facts.known)


def _ready(run: Run, facts: Facts, troubles: Iterable[Condition]) -> Condition:
    """Whether newer checkpoints keep coming, by the first of these that holds."""
    unsafe = next((each for each in troubles if each.type in condition.UNSAFE), None)
    presence = facts.presence
    if run.finished:
        status, reason, text = "False", run.finished, "the workload ended"
    elif run.phase not in phases.TRAINS:
        there = (
            f"; {presence.present} of {presence.expected} ranks are there" if presence.expected > 1 else ""
        )
        status, reason, text = "False", run.phase.value, f"no step is being trained{there}"
    elif unsafe is not None:
        status, reason, text = "False", unsafe.type, unsafe.message
    elif not facts.live and (ready := _still_ready(facts)) is not None:
        return ready
    elif not facts.live:
        status, reason = "Unknown", "NotHeard"
        text = "no sidecar reports to the controller; training and its checkpoints need none"
    elif not run.progress.last_commit_at_s:
        status, reason, text = "False", "NoCheckpointYet", "training began; its first checkpoint is to come"
    else:
        status, reason, text = "True", "Checkpointing", "training goes on and its checkpoints are fresh"
    return fact(condition.READY, reason, text, status=status)


def _still_ready(facts: Facts) -> Condition | None:
    """The condition as it was, while a controller that starts has not waited for a beat yet."""
    if facts.now_s - facts.run.watched_since_s > SILENT_BEATS * SPEAKER_BEAT_S:
        return None
    return next((each for each in facts.run.conditions if each.type == condition.READY), None)


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
_CHANGED = {"interval": "IntervalChanged", "bits": "BitsChanged"}


def _notices(changed: Iterable[Condition]) -> Iterable[Notice]:
    for each in changed:
        if each.status == "True" and each.type in _EVENTS:
            yield Notice(reason=_EVENTS[each.type], message=each.message)


def _changes(before: Iterable[Decision], run: Run) -> Iterable[Notice]:
    known = {each.subject: each.value for each in before}
    for each in run.progress.decisions:
        value = known.get(each.subject, "")
        if value and each.value and each.value != value:
            text = f"{each.subject}: {value} -> {each.value}; {each.why}"
            yield Notice(reason=_CHANGED[each.subject], message=text, warning=False)
