"""A run as the API keeps it: the CheckpointRun's spec and status, written from a `Run` and read back. Pure.

The status is for people, and for the controller itself, which starts with nothing else: what is counted comes back from
`ledger`, what the run is at from the fields that people read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from deltashard_checkpoint.vocabulary import bits_of
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision, Measured
from google.protobuf.json_format import MessageToDict, ParseDict

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


# Field of the status -> of the value that has it: a time where that ends in `_s`. With `?` what is empty is left out.
_RUN = {
    "phaseSince?": "phase_since_s",
    "trainingSince?": "trains_since_s",
    "startedAt?": "started_at_s",
    "finishedAt?": "finished_at_s",
    "finishedReason?": "finished",
    "store?": "store",
}
_PROGRESS = {
    "step?": "step",
    "attempt?": "attempt",
    "worldSize?": "world_size",
    "ranksPresent?": "ranks_present",
    "partialRecoveries?": "partial_recoveries",
    "lastCommittedStep?": "last_step",
    "lastCommitSeq?": "last_seq",
    "lastCommitTime?": "last_commit_at_s",
    "storedBytes?": "stored_bytes",
    "checkpoints?": "checkpoints",
}
_WORKLOAD = {"kind": "kind", "name": "name", "uid": "uid", "apiVersion?": "api_version"}
_POD = {"name": "name", "uid": "uid", "node?": "node", "index?": "index", "phase?": "shown_phase"}
_CHECKPOINT = {"seq": "seq", "step": "step", "time": "at_s", "bytes": "bytes", "pins?": "pins"}
_RECLAIM = {"state": "state", "since": "since_s", "message": "message", "due?": "due_s", "tries?": "tries"}
_CONDITION = {
    "type": "type",
    "status": "status",
    "reason": "reason",
    "message": "message",
    "lastTransitionTime": "since_s",
}
_LOSS = {
    "time": "at_s",
    "cause": "cause",
    "message?": "message",
    "pod?": "pod",
    "node?": "node",
    "index?": "run",
    "asked?": "asked",
    "ending?": "ending",
}


def _fields(value: object, names: Mapping[str, str]) -> Document:
    """Fields of a value as the API has them, by such a table."""
    found: Document = {}
    for key, name in names.items():
        each = getattr(value, name)
        if key.endswith("?") and not each:
            continue
        if name.endswith("_s"):
            each = timestamp(each)
        elif isinstance(each, tuple):
            each = list(each)
        elif isinstance(each, StrEnum):
            each = each.value
        found[key.removesuffix("?")] = each
    return found


def _read(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a value that `_fields` told; what is not there is left to its default."""
    known = {name: found.get(key.removesuffix("?")) for key, name in names.items()}
    return {
        name: seconds_of(each) if name.endswith("_s") else tuple(each) if isinstance(each, list) else each
        for name, each in known.items()
        if each is not None
    }


def run_label(run_id: str) -> str:
    """A label's value for a run id: itself, or a part and a hash where it is too long for one."""
    if len(run_id) <= 63:
        return run_id
    return f"{run_id[:42].rstrip('-.')}-{hashlib.sha256(run_id.encode()).hexdigest()[:20]}"


def document(run: Run) -> Document:
    workload = run.workload
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
            "workload": _fields(workload, _WORKLOAD),
            **({"runs": run.wish.runs} if run.wish.runs else {}),
        },
    }


def status(run: Run, now_s: float) -> Document:
    """The whole status; a field without a value is left out."""
    progress, policy = run.progress, run.progress.policy
    interval = next((each for each in progress.decisions if each.subject == "interval"), Decision())
    found: Document = {
        **_fields(run, _RUN),
        **_fields(progress, _PROGRESS),
        "observedTime": timestamp(now_s),
        "phase": run.phase.value,
        "ranks": f"{progress.ranks_present}/{progress.world_size}" if progress.world_size else None,
        "stallSeconds": f"{progress.stall_s:.3g}" if progress.stall_s else None,
        "lostSamplesShare": f"{progress.lost_share:.6g}" if progress.partial_recoveries else None,
        "intervalSeconds": math.ceil(policy.every_s) if policy.encoding else None,
        "intervalMilliseconds": _milliseconds(policy.every_s) if policy.encoding else None,
        "everySteps": policy.every_steps or None,
        "encoding": policy.encoding or None,
        "bits": bits_of(policy.encoding),
        "differential": policy.differential or None,
        "stored": human_bytes(progress.stored_bytes) if progress.stored_bytes else None,
        "newestCheckpoints": [_fields(each, _CHECKPOINT) for each in run.parts.get("", NO_PART).kept] or None,
        "restores": run.ledger.restores,
        "lostSteps": run.ledger.lost_steps,
        "failures": run.failures,
        "interruptions": [{"cause": cause, "count": n} for cause, n in sorted(run.ledger.causes.items())]
        or None,
        "trainedSeconds": int(run.trained_s),
        "decisions": [MessageToDict(each, preserving_proto_field_name=True) for each in progress.decisions]
        or None,
        "goal": interval.goal or policy.goal or None,
        "why": _short(interval.why) or None,
        "measured": _measured(progress.measured) if progress.measured is not None else None,
        "reclaim": _fields(run.reclaim, _RECLAIM) if run.reclaim is not None else None,
        "losses": [_loss(each) for each in failure.newest(run.ledger.tallies)] or None,
        "pods": _pods(run) or None,
        "conditions": [_fields(each, _CONDITION) for each in run.conditions] or None,
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
    workload = Workload(namespace=found["metadata"]["namespace"], **_read(spec["workload"], _WORKLOAD))
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
    progress, counted = _progress_of(said), ledger.decoded(said.get("ledger", ""))
    written_s = seconds_of(said.get("observedTime"))
    return replace(
        run,
        **_read(said, _RUN),
        ledger=counted,
        progress=progress,
        parts={} if run.per_pod or any(counted.tallies) else {"": _part_of(said, progress)},
        ranks={each["uid"]: tuple(each["ranks"]) for each in said.get("pods") or () if each.get("ranks")},
        phase=phase.Phase(said.get("phase", "Pending")),
        trained_s=float(said.get("trainedSeconds", 0)),
        seen_s=written_s,
        judged_s=written_s,
        reloaded_s=written_s,
        conditions=tuple(Condition(**_read(each, _CONDITION)) for each in said.get("conditions") or ()),
        fenced=kept.get("Fenced", ""),
        tracking=kept.get("TrackingFault", ""),
        fell_back=kept.get("FellBack", ""),
        failing=kept.get("StoreUnavailable", ""),
        taken_by=kept.get("RunIdTaken", ""),
        reclaim=_reclaim_of(said["reclaim"]) if said.get("reclaim") else None,
    )


def _part_of(said: Mapping[str, Any], progress: Progress) -> RunPart:
    """The one run of the workload, as far as it is known before its sidecars are heard."""
    return RunPart(
        attempt=progress.attempt,
        seq=progress.last_seq,
        committed_at_s=progress.last_commit_at_s,
        kept=tuple(
            NewestCheckpoint(**_read(each, _CHECKPOINT)) for each in said.get("newestCheckpoints") or ()
        ),
    )


def _reclaim_of(found: Mapping[str, Any]) -> Reclaim:
    # A state of a newer controller's: nothing is removed for it.
    state = ReclaimState(found["state"]) if found["state"] in set(ReclaimState) else ReclaimState.KEPT
    return Reclaim(**_read(found, _RECLAIM) | {"state": state})


def _policy_of(said: Mapping[str, Any]) -> pb.Policy:
    return pb.Policy(
        every_s=said.get("intervalMilliseconds", 0) / 1000 or float(said.get("intervalSeconds", 0)),
        every_steps=int(said.get("everySteps", 0)),
        encoding=said.get("encoding", ""),
        differential=said.get("differential", ""),
        goal=said.get("goal", ""),
    )


def _progress_of(said: Mapping[str, Any]) -> Progress:
    return Progress(
        **_read(said, _PROGRESS),
        stall_s=float(said.get("stallSeconds", 0)),
        lost_share=float(said.get("lostSamplesShare", 0)),
        policy=_policy_of(said),
        measured=_measured_of(said["measured"]) if said.get("measured") else None,
        decisions=tuple(
            ParseDict(each, Decision(), ignore_unknown_fields=True) for each in said.get("decisions") or ()
        ),
    )


def human_bytes(n: int) -> str:
    """A size for people: three digits and a binary unit."""
    value, unit = float(n), "B"
    for unit in ("B", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if value < 1000 or unit == "Pi":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.3g}{unit}"


def _milliseconds(every_s: float) -> int | None:
    """An interval that is not of whole seconds; None for one that is. The policy's words are no finer than this."""
    return None if every_s.is_integer() else max(round(every_s * 1000), 1)


def _loss(loss: Loss) -> Document:
    more = {"interruptions": loss.interruptions} if loss.interruptions > 1 else {}
    return _fields(loss, _LOSS) | more


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


def _pods(run: Run) -> list[Document]:
    ordered = sorted(run.pods.values(), key=lambda each: (not each.alive, each.index, each.name))
    return [_pod(run, each) for each in ordered[:MAX_PODS]]


def _pod(run: Run, pod: PodView) -> Document:
    heard = run.heard.get(pod.uid)
    ranks = run.ranks.get(pod.uid, ()) if heard is None else {each.rank for each in heard.pod.ranks}
    return _fields(pod, _POD) | ({"ranks": sorted(ranks)[:1024]} if ranks else {})
