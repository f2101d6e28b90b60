"""A run as the API keeps it: the CheckpointRun's spec and status, written from a `Run` and read back. Pure.

The status is for people and for the controller itself, which starts with nothing else: what is counted (failures,
restores, lost steps, which pods and incidents are in the counts, the newest directive) comes back from it. A pod that
is not listed and ended before the status was written is counted already.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from deltashard_checkpoint.deciding.evidence import Evidence
from deltashard_checkpoint.vocabulary import bits_of
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision
from google.protobuf.message import Message

from deltashard_operator.fleet.sidecar_report import Measured, timed
from deltashard_operator.kube.cluster_name import RUN_ID, WORKLOAD_UID
from deltashard_operator.run import failure, phase, roll_call
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.failure import Crash, Loss, LossCause, Point, Tally
from deltashard_operator.run.incident import Incidents, Pending, Times
from deltashard_operator.run.observed_object import PodView, Wish, Workload, seconds_of, timestamp
from deltashard_operator.run.reclaim import Reclaim, ReclaimState
from deltashard_operator.run.watched_run import HORIZON_S, Progress, Run, Taken

GROUP, VERSION, PLURAL = "deltashard.io", "v1alpha1", "checkpointruns"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "CheckpointRun"
MAX_PODS = 256
"""Pods listed in a status at most."""
MAX_WHY = 60
"""Characters of the column that says why."""
MATERIAL = frozenset(
    {
        "phase",
        "conditions",
        "attempt",
        "restores",
        "lostSteps",
        "savesFailed",
        "failures",
        "losses",
        "pods",
        "directiveGeneration",
        "finishedAt",
        "intervalSeconds",
        "intervalMilliseconds",
        "encoding",
        "startedAt",
        "interruptions",
        "goal",
        "directed",
        "partialRecoveries",
        "reclaim",
    }
)
"""Fields whose change is worth a write of its own, soon."""
URGENT = frozenset({"losses", "failures", "conditions"})
"""... of these, what goes before all else while there is much to write: something went wrong."""
COMMIT = frozenset({"lastCommitSeq", "lastCommittedStep", "lastCommitTime", "ranks"})
"""... and those whose change is worth one within half a minute."""
Document = dict[str, Any]
M = TypeVar("M", bound=Message)


def run_label(run_id: str) -> str:
    """A label's value for a run id: itself, or a part and a hash where it is too long for one."""
    if len(run_id) <= 63:
        return run_id
    return f"{run_id[:42].rstrip('-.')}-{hashlib.sha256(run_id.encode()).hexdigest()[:20]}"


def document(run: Run) -> Document:
    workload = run.workload
    names = {"kind": workload.kind, "name": workload.name, "uid": workload.uid}
    reference = names | _clipped({"apiVersion": workload.api_version})
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": run.name,
            "namespace": workload.namespace,
            "labels": {RUN_ID: run_label(run.run_id), WORKLOAD_UID: workload.uid},
        },
        "spec": {
            "runId": run.run_id,
            "policy": run.wish.policy,
            "workload": reference,
            **({"runs": run.wish.runs} if run.wish.runs else {}),
        },
    }


def status(run: Run, now_s: float) -> Document:
    """The whole status; a field without a value is left out."""
    progress, tallies = run.progress, run.tallies
    policy = run.directed or progress.policy
    timers = policy if timed(policy) and not policy.goal else progress.policy
    seen, rates = run.incidents.evidence, run.rates
    begun = bool(run.started_at_s)
    roll = roll_call.of_run(run)
    found: Document = {
        "observedGeneration": 1,  # a spec never changes
        "observedTime": timestamp(now_s),
        "phase": run.phase.value,
        "phaseSince": _time(run.phase_since_s),
        "trainingSince": _time(run.trains_since_s),
        "step": progress.step or None,
        "ranks": roll.sentence or None,
        "worldSize": progress.world_size or None,
        "ranksPresent": roll.present if roll.expected else None,
        "stepSkew": roll.skew,
        "slowestRank": roll.slowest_rank if roll.slowest_pod else None,
        "slowestPod": roll.slowest_pod or None,
        "stallSeconds": f"{progress.stall_s:.3g}" if progress.stall_s else None,
        "lostSamplesShare": f"{progress.lost_share:.6g}" if progress.partial_recoveries else None,
        "partialRecoveries": progress.partial_recoveries or None,
        "lastCommittedStep": progress.last_step if progress.last_commit_at_s else None,
        "lastCommitTime": _time(progress.last_commit_at_s),
        "lastCommitSeq": progress.last_seq or None,
        "attempt": progress.attempt or None,
        "intervalSeconds": math.ceil(timers.every_s) if progress.policy.encoding else None,
        "intervalMilliseconds": _milliseconds(timers.every_s) if progress.policy.encoding else None,
        "everySteps": timers.every_steps or None,
        "encoding": policy.encoding or None,
        "bits": bits_of(policy.encoding),
        "differential": policy.differential or None,
        "directiveGeneration": run.generation or None,
        "store": run.store or None,
        "storedBytes": progress.stored_bytes or None,
        "stored": human_bytes(progress.stored_bytes) if progress.stored_bytes else None,
        "checkpoints": progress.checkpoints or None,
        "restores": run.restores,
        "lostSteps": run.lost_steps,
        "savesFailed": run.saves_failed,
        "failures": run.failures,
        "settledFailures": sum(each.settled + each.bursts for each in tallies.values()),
        "settledOpenings": tallies[""].openings if "" in tallies else 0,
        "settledOpeningsByPod": _openings_by_pod(run) or None,
        "mtbfSeconds": int(rates.mtbf_s) if begun else None,
        "expectedRestores": f"{HORIZON_S / rates.restores.mean_between_s:.2f}" if begun else None,
        "restoresExpected95": rates.restores.quantile(HORIZON_S) if begun else None,
        "trainedSeconds": int(run.trained_s),
        "exposureSeconds": int(seen.exposure_s),
        "lossyFailures": _decimal(seen.lossy),
        "restoresCounted": _decimal(seen.restores),
        "interruptions": _interruptions(run.incidents) or None,
        "pending": _pending(run.incidents) or None,
        "crashes": _crashes(run) or None,
        "widestPods": run.width or None,
        "decisions": [_stated(each) for each in run.decisions] or None,
        "goal": next((each.goal for each in run.decisions if each.subject == "interval"), policy.goal)
        or None,
        "why": next((_short(each.why) for each in run.decisions if each.subject == "interval"), None),
        "measured": _measured(run.measured) if run.measured is not None else None,
        "directed": _stated(run.directed) if run.directed is not None else None,
        "startedAt": _time(run.started_at_s),
        "finishedAt": _time(run.finished_at_s) if run.finished else None,
        "finishedReason": run.finished or None,
        "reclaim": _reclaim(run.reclaim) if run.reclaim is not None else None,
        "losses": [_loss(each) for each in failure.newest(tallies)] or None,
        "pods": _pods(run) or None,
        "conditions": [_condition(each) for each in run.conditions] or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Document:
    """The merge patch of a status, objects in it merged; empty when nothing but the time of writing changed."""
    changed: Document = {
        key: patch(before.get(key) or {}, value) if isinstance(value, dict) else value
        for key, value in after.items()
        if before.get(key) != value
    }
    changed.update((key, None) for key in before if key not in after)
    return changed if set(changed) - {"observedTime"} else {}


def run_of(found: Mapping[str, Any]) -> Run:
    spec, said = found["spec"], found.get("status") or {}
    reference = spec["workload"]
    workload = Workload(
        namespace=found["metadata"]["namespace"],
        kind=reference["kind"],
        name=reference["name"],
        uid=reference["uid"],
        api_version=reference.get("apiVersion", ""),
    )
    own = f"{workload.name}-{workload.uid}"
    run = Run(
        workload=workload,
        wish=Wish(
            policy=spec["policy"],
            run_id="" if spec["runId"] == own else spec["runId"],
            runs=spec.get("runs", ""),
        ),
    )
    if not said:
        return run
    losses = tuple(map(_loss_of, said.get("losses") or ()))
    numbered = {each["index"]: int(each["openings"]) for each in said.get("settledOpeningsByPod") or ()}
    pods = said.get("pods") or ()
    kept = {  # sentences of troubles that no heartbeat repeats
        each["type"]: each.get("message") or each["reason"]
        for each in said.get("conditions") or ()
        if each["status"] == "True"
    }
    return replace(
        run,
        restarts={each["uid"]: int(each.get("restarts", 0)) for each in pods if each.get("uid")},
        lost=frozenset(each["uid"] for each in pods if each.get("lost") and each.get("uid")),
        taken={
            each["uid"]: Taken(process=each["process"], incident=int(each.get("incident", 0)))
            for each in pods
            if each.get("uid") and each.get("process")
        },
        tallies=_tallies(said, losses, numbered),
        incidents=_incidents_of(said),
        width=int(said.get("widestPods", 0)),
        decisions=tuple(_known(Decision, each) for each in said.get("decisions") or ()),
        measured=_measured_of(said["measured"]) if said.get("measured") else None,
        progress=_progress_of(said, numbered, _policy_of(said)),
        restores=int(said.get("restores", 0)),
        lost_steps=int(said.get("lostSteps", 0)),
        saves_failed=int(said.get("savesFailed", 0)),
        phase=phase.Phase(said.get("phase", "Pending")),
        phase_since_s=seconds_of(said.get("phaseSince")),
        trains_since_s=seconds_of(said.get("trainingSince")),
        started_at_s=seconds_of(said.get("startedAt")),
        trained_s=float(said.get("trainedSeconds", 0)),
        seen_s=seconds_of(said.get("observedTime")),
        judged_s=seconds_of(said.get("observedTime")),
        conditions=tuple(map(_condition_of, said.get("conditions") or ())),
        finished=said.get("finishedReason", ""),
        finished_at_s=seconds_of(said.get("finishedAt")),
        generation=int(said.get("directiveGeneration", 0)),
        directed=_known(pb.Policy, said["directed"]) if "directed" in said else None,
        fenced=kept.get("Fenced", ""),
        tracking=kept.get("TrackingFault", ""),
        fell_back=kept.get("FellBack", ""),
        taken_by=kept.get("RunIdTaken", ""),
        store=said.get("store", ""),
        reclaim=_reclaim_of(said["reclaim"]) if said.get("reclaim") else None,
    )


def _reclaim(reclaim: Reclaim) -> Document:
    return {
        "state": reclaim.state.value,
        "since": timestamp(reclaim.since_s),
        "message": reclaim.message,
        **_clipped({"due": _time(reclaim.due_s), "tries": reclaim.tries}),
    }


def _reclaim_of(found: Mapping[str, Any]) -> Reclaim:
    state = found["state"]
    return Reclaim(
        # One of a newer controller's: nothing is removed for it.
        state=ReclaimState(state) if state in set(ReclaimState) else ReclaimState.KEPT,
        since_s=seconds_of(found["since"]),
        message=found.get("message", ""),
        due_s=seconds_of(found.get("due")),
        tries=int(found.get("tries", 0)),
    )


def _policy_of(said: Mapping[str, Any]) -> pb.Policy:
    return pb.Policy(
        every_s=said.get("intervalMilliseconds", 0) / 1000 or float(said.get("intervalSeconds", 0)),
        every_steps=int(said.get("everySteps", 0)),
        encoding=said.get("encoding", ""),
        differential=said.get("differential", ""),
    )


def _progress_of(said: Mapping[str, Any], numbered: Mapping[str, int], in_force: pb.Policy) -> Progress:
    return Progress(
        step=int(said.get("step", 0)),
        last_step=int(said.get("lastCommittedStep", 0)),
        last_commit_at_s=seconds_of(said.get("lastCommitTime")),
        last_seq=int(said.get("lastCommitSeq", 0)),
        # The attempts of pods that are runs of their own are at least these.
        attempts=numbered or ({"": int(said["attempt"])} if said.get("attempt") else {}),
        world_size=int(said.get("worldSize", 0)),
        stall_s=float(said.get("stallSeconds", 0)),
        lost_share=float(said.get("lostSamplesShare", 0)),
        partial_recoveries=int(said.get("partialRecoveries", 0)),
        stored_bytes=int(said.get("storedBytes", 0)),
        checkpoints=int(said.get("checkpoints", 0)),
        policy=in_force,
    )


def _openings_by_pod(run: Run) -> list[Document]:
    """Openings of pods that are runs of their own, where a fresh controller could not take them for the first."""
    told = [
        {"index": part, "openings": each.openings}
        for part, each in sorted(run.tallies.items())
        if part and each.openings and (each.openings > 1 or each.losses)
    ]
    return told[:MAX_PODS]


def _tallies(said: Document, losses: tuple[Loss, ...], numbered: Mapping[str, int]) -> dict[str, Tally]:
    """The tallies of a status; what was counted of pods that are runs of their own is kept as one sum."""
    openings, settled = int(said.get("settledOpenings", 0)), int(said.get("settledFailures", 0))
    crashes = {each.get("index", ""): _crash_of(each) for each in said.get("crashes") or ()}
    found = {
        part: Tally(
            openings=numbered.get(part, 0),
            losses=tuple(each for each in losses if each.run == part),
            crash=crashes.get(part),
        )
        for part in {*numbered, *crashes, *(each.run for each in losses)}
    }
    one = found.get("", Tally())
    found[""] = replace(
        one, settled=settled if openings else 0, bursts=0 if openings else settled, openings=openings
    )
    return found


def human_bytes(n: int) -> str:
    """A size for people: three digits and a binary unit."""
    value, unit = float(n), "B"
    for unit in ("B", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if value < 1000 or unit == "Pi":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.3g}{unit}"


def _time(at_s: float) -> str | None:
    return timestamp(at_s) if at_s else None


def _milliseconds(every_s: float) -> int | None:
    """An interval that is not of whole seconds; None for one that is. The policy's words are no finer than this."""
    return None if every_s.is_integer() else max(round(every_s * 1000), 1)


def _clipped(entries: Mapping[str, Any]) -> Document:
    return {key: value for key, value in entries.items() if value not in ("", None, 0, [], False)}


def _loss(loss: Loss) -> Document:
    return {
        "time": timestamp(loss.at_s),
        "cause": loss.cause.value,
        **_clipped(
            {
                "message": loss.message[:1024],
                "pod": loss.pod,
                "podUID": loss.pod_uid,
                "node": loss.node,
                "index": loss.run,
                "asked": loss.asked,
                "opening": loss.opening,
                "interruptions": loss.interruptions if loss.interruptions > 1 else None,
                "ending": loss.ending,
                "commitSeq": loss.at.seq if loss.ending else None,
                "trainedSeconds": int(loss.at.trained_s) if loss.ending else None,
            }
        ),
    }


def _loss_of(found: Mapping[str, Any]) -> Loss:
    cause = found["cause"]
    return Loss(
        at_s=seconds_of(found["time"]),
        cause=LossCause(cause) if cause in set(LossCause) else LossCause.FAILED,
        message=found.get("message", ""),
        pod=found.get("pod", ""),
        pod_uid=found.get("podUID", ""),
        node=found.get("node", ""),
        run=found.get("index", ""),
        opening=int(found.get("opening", 0)),
        interruptions=int(found.get("interruptions", 1)),
        ending=found.get("ending", ""),
        at=_point_of(found),
    )


def _point_of(found: Mapping[str, Any]) -> Point:
    return Point(seq=int(found.get("commitSeq", 0)), trained_s=float(found.get("trainedSeconds", 0)))


def _crashes(run: Run) -> list[Document]:
    """The newest interruption of each part of the run, where that was a crash."""
    found = [
        {
            "endings": list(each.crash.endings),
            "times": each.crash.times,
            **_clipped(
                {
                    "index": part,
                    "commitSeq": each.crash.at.seq,
                    "trainedSeconds": int(each.crash.at.trained_s),
                }
            ),
        }
        for part, each in sorted(run.tallies.items())
        if each.crash is not None
    ]
    return found[:MAX_PODS]


def _crash_of(found: Mapping[str, Any]) -> Crash:
    return Crash(endings=tuple(found["endings"]), at=_point_of(found), times=int(found["times"]))


def _decimal(value: float) -> str | None:
    """A faded count, with as many digits as it has a meaning; None: none, or forgotten."""
    return f"{value:.4f}" if value >= 0.00005 else None


def _interruptions(incidents: Incidents) -> list[Document]:
    return [
        {"cause": cause, "restores": each.restores, "lossy": each.lossy}
        for cause, each in sorted(incidents.causes.items())
    ]


def _pending(incidents: Incidents) -> list[Document]:
    found = [
        {
            "reachedStep": each.reached,
            **({} if each.replayed is None else {"replayedSteps": each.replayed}),
            **_clipped({"index": part, "doubted": each.doubted}),
        }
        for part, each in sorted(incidents.pending.items())
    ]
    return found[:MAX_PODS]


def _incidents_of(said: Document) -> Incidents:
    return Incidents(
        evidence=Evidence(
            exposure_s=float(said.get("exposureSeconds", 0)),
            lossy=float(said.get("lossyFailures", 0)),
            restores=float(said.get("restoresCounted", 0)),
        ),
        causes={
            each["cause"]: Times(restores=int(each["restores"]), lossy=int(each["lossy"]))
            for each in said.get("interruptions") or ()
        },
        pending={
            each.get("index", ""): Pending(
                reached=int(each["reachedStep"]),
                replayed=each.get("replayedSteps"),
                doubted=each.get("doubted", ""),
            )
            for each in said.get("pending") or ()
        },
    )


def _short(why: str) -> str:
    """The beginning of a reason, for a column."""
    return why if len(why) <= MAX_WHY else why[: MAX_WHY - 1] + "…"


_MEASURED = {
    "step_s": "stepSeconds",
    "stall_s": "stallSeconds",
    "slowdown_s": "slowdownSeconds",
    "cost_s": "costSeconds",
    "durable_s": "durableSeconds",
    "restore_s": "restoreSeconds",
    "reschedule_s": "rescheduleSeconds",
}


def _measured(measured: Measured) -> Document:
    found: Document = {
        key: f"{getattr(measured, name):.3g}" for name, key in _MEASURED.items() if getattr(measured, name)
    }
    return {**found, "saves": measured.saves}


def _measured_of(found: Mapping[str, Any]) -> Measured:
    seconds = {name: float(found.get(key, 0)) for name, key in _MEASURED.items()}
    return Measured(saves=int(found.get("saves", 0)), **seconds)


def _known(message: type[M], found: Mapping[str, Any]) -> M:
    """The message of what a status holds of it, by the names of its fields."""
    names = message.DESCRIPTOR.fields_by_name
    return message(**{name: value for name, value in found.items() if name in names})


def _stated(message: Message) -> Document:
    return {field.name: value for field, value in message.ListFields()}


def _pods(run: Run) -> list[Document]:
    ordered = sorted(run.pods.values(), key=lambda each: (not each.alive, each.index, each.name))
    return [_pod(run, each) for each in ordered[:MAX_PODS]]


def _pod(run: Run, pod: PodView) -> Document:
    report, taken = run.reports.get(pod.uid), run.taken.get(pod.uid)
    ranks = report.heartbeat.ranks if report is not None and report.heartbeat is not None else ()
    return {
        "name": pod.name,
        "uid": pod.uid,
        **_clipped(
            {
                "node": pod.node,
                "index": pod.index,
                "phase": pod.shown_phase,
                "ranks": sorted({each.rank for each in ranks})[:1024],
                "reporting": report is not None and report.connected,
                "lost": pod.uid in run.lost,
                "restarts": run.restarts.get(pod.uid, 0),
                "process": taken.process if taken is not None else None,
                "incident": taken.incident if taken is not None else None,
            }
        ),
    }


def _condition(condition: Condition) -> Document:
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": timestamp(condition.since_s),
    }


def _condition_of(found: Mapping[str, Any]) -> Condition:
    return Condition(
        type=found["type"],
        status=found["status"],
        reason=found["reason"],
        message=found.get("message", ""),
        since_s=seconds_of(found["lastTransitionTime"]),
    )
