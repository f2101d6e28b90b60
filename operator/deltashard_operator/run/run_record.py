"""A run as the API keeps it: the CheckpointRun's spec and status, written from a `Run` and read back. Pure.

The status is for people, and for the controller itself, which starts with nothing else: what is counted comes back from
`ledger`, what the run is at from the fields that people read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from deltashard_checkpoint.vocabulary import bits_of
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision, Measured
from google.protobuf.message import Message

from deltashard_operator.kube.cluster_name import RUN_ID, WORKLOAD_UID
from deltashard_operator.run import failure, ledger, phase
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.failure import Loss
from deltashard_operator.run.observed_object import PodView, Wish, Workload, seconds_of, timestamp
from deltashard_operator.run.reclaim import Reclaim, ReclaimState
from deltashard_operator.run.watched_run import NO_PART, NewestCheckpoint, Progress, Run, RunPart

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
        "failures",
        "losses",
        "ledger",
        "pods",
        "finishedAt",
        "intervalSeconds",
        "intervalMilliseconds",
        "encoding",
        "startedAt",
        "interruptions",
        "goal",
        "partialRecoveries",
        "reclaim",
    }
)
"""Fields whose change is worth a write of its own, soon."""
COMMIT = frozenset({"lastCommitSeq", "lastCommittedStep", "lastCommitTime", "ranks", "newestCheckpoints"})
"""... and those whose change is worth one within half a minute."""
Document = dict[str, Any]
M = TypeVar("M", bound=Message)


_COUNTS: Mapping[str, str] = {
    "step": "step",
    "attempt": "attempt",
    "worldSize": "world_size",
    "ranksPresent": "ranks_present",
    "partialRecoveries": "partial_recoveries",
    "lastCommittedStep": "last_step",
    "lastCommitSeq": "last_seq",
    "storedBytes": "stored_bytes",
    "checkpoints": "checkpoints",
}
"""Field of the status -> of `Progress`; 0 is left out."""
_TIMES: Mapping[str, str] = {
    "phaseSince": "phase_since_s",
    "trainingSince": "trains_since_s",
    "startedAt": "started_at_s",
    "finishedAt": "finished_at_s",
}
"""Field of the status -> of `Run`."""


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
    progress, policy = run.progress, run.progress.policy
    interval = next((each for each in progress.decisions if each.subject == "interval"), Decision())
    found: Document = {
        **{key: _time(getattr(run, name)) for key, name in _TIMES.items()},
        **{key: getattr(progress, name) or None for key, name in _COUNTS.items()},
        "observedTime": timestamp(now_s),
        "phase": run.phase.value,
        "ranks": f"{progress.ranks_present}/{progress.world_size}" if progress.world_size else None,
        "stallSeconds": f"{progress.stall_s:.3g}" if progress.stall_s else None,
        "lostSamplesShare": f"{progress.lost_share:.6g}" if progress.partial_recoveries else None,
        "lastCommitTime": _time(progress.last_commit_at_s),
        "intervalSeconds": math.ceil(policy.every_s) if policy.encoding else None,
        "intervalMilliseconds": _milliseconds(policy.every_s) if policy.encoding else None,
        "everySteps": policy.every_steps or None,
        "encoding": policy.encoding or None,
        "bits": bits_of(policy.encoding),
        "differential": policy.differential or None,
        "store": run.store or None,
        "stored": human_bytes(progress.stored_bytes) if progress.stored_bytes else None,
        "newestCheckpoints": list(map(_kept, run.parts.get("", NO_PART).kept)) or None,
        "restores": run.ledger.restores,
        "lostSteps": run.ledger.lost_steps,
        "failures": run.failures,
        "interruptions": [{"cause": cause, "count": n} for cause, n in sorted(run.ledger.causes.items())]
        or None,
        "trainedSeconds": int(run.trained_s),
        "decisions": [_stated(each) for each in progress.decisions] or None,
        "goal": interval.goal or policy.goal or None,
        "why": _short(interval.why) or None,
        "measured": _measured(progress.measured) if progress.measured is not None else None,
        "finishedReason": run.finished or None,
        "reclaim": _reclaim(run.reclaim) if run.reclaim is not None else None,
        "losses": [_loss(each) for each in failure.newest(run.ledger.tallies)] or None,
        "pods": _pods(run) or None,
        "conditions": [_condition(each) for each in run.conditions] or None,
        "ledger": run.ledger.text or None,
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
    kept = {  # sentences of troubles that no report repeats
        each["type"]: each.get("message") or each["reason"]
        for each in said.get("conditions") or ()
        if each["status"] == "True"
    }
    times: dict[str, Any] = {name: seconds_of(said.get(key)) for key, name in _TIMES.items()}
    progress, counted = _progress_of(said), ledger.decoded(said.get("ledger", ""))
    return replace(
        run,
        **times,
        ledger=counted,
        progress=progress,
        parts={} if run.per_pod or any(counted.tallies) else {"": _part_of(said, progress)},
        ranks={each["uid"]: tuple(each["ranks"]) for each in said.get("pods") or () if each.get("ranks")},
        phase=phase.Phase(said.get("phase", "Pending")),
        trained_s=float(said.get("trainedSeconds", 0)),
        seen_s=seconds_of(said.get("observedTime")),
        judged_s=seconds_of(said.get("observedTime")),
        reloaded_s=seconds_of(said.get("observedTime")),
        conditions=tuple(map(_condition_of, said.get("conditions") or ())),
        finished=said.get("finishedReason", ""),
        fenced=kept.get("Fenced", ""),
        tracking=kept.get("TrackingFault", ""),
        fell_back=kept.get("FellBack", ""),
        failing=kept.get("StoreUnavailable", ""),
        taken_by=kept.get("RunIdTaken", ""),
        store=said.get("store", ""),
        reclaim=_reclaim_of(said["reclaim"]) if said.get("reclaim") else None,
    )


def _part_of(said: Mapping[str, Any], progress: Progress) -> RunPart:
    """The one run of the workload, as far as it is known before its sidecars are heard."""
    return RunPart(
        attempt=progress.attempt,
        seq=progress.last_seq,
        committed_at_s=progress.last_commit_at_s,
        kept=tuple(map(_kept_of, said.get("newestCheckpoints") or ())),
    )


def _kept(kept: NewestCheckpoint) -> Document:
    found = {"seq": kept.seq, "step": kept.step, "time": timestamp(kept.at_s), "bytes": kept.bytes}
    return found | _clipped({"pins": list(kept.pins)})


def _kept_of(found: Mapping[str, Any]) -> NewestCheckpoint:
    return NewestCheckpoint(
        seq=int(found["seq"]),
        step=int(found["step"]),
        at_s=seconds_of(found["time"]),
        bytes=int(found.get("bytes", 0)),
        pins=tuple(found.get("pins") or ()),
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
        goal=said.get("goal", ""),
    )


def _progress_of(said: Mapping[str, Any]) -> Progress:
    counts: dict[str, Any] = {name: int(said.get(key, 0)) for key, name in _COUNTS.items()}
    return Progress(
        **counts,
        last_commit_at_s=seconds_of(said.get("lastCommitTime")),
        stall_s=float(said.get("stallSeconds", 0)),
        lost_share=float(said.get("lostSamplesShare", 0)),
        policy=_policy_of(said),
        measured=_measured_of(said["measured"]) if said.get("measured") else None,
        decisions=tuple(_known(Decision, each) for each in said.get("decisions") or ()),
    )


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
                "message": loss.message,
                "pod": loss.pod,
                "node": loss.node,
                "index": loss.run,
                "asked": loss.asked,
                "ending": loss.ending,
                "interruptions": loss.interruptions if loss.interruptions > 1 else None,
            }
        ),
    }


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
    heard = run.heard.get(pod.uid)
    ranks = run.ranks.get(pod.uid, ()) if heard is None else {each.rank for each in heard.pod.ranks}
    return {
        "name": pod.name,
        "uid": pod.uid,
        **_clipped(
            {"node": pod.node, "index": pod.index, "phase": pod.shown_phase, "ranks": sorted(ranks)[:1024]}
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
