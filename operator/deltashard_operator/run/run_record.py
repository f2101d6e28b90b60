"""Conversion between a `Run` and the spec and status of its CheckpointRun. Pure.

The status is for users and is the only state with which a controller starts: counters are restored from `ledger`, the
rest from the user-visible fields.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from deltashard_checkpoint.vocabulary import RUN_PER_POD, bits_of
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_proto.v1.fleet_pb2 import Decision
from google.protobuf.json_format import MessageToDict, ParseDict

from deltashard_operator.kube.cluster_name import RUN_ID, WORKLOAD_UID
from deltashard_operator.run import ledger, phase
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.failure import Loss
from deltashard_operator.run.observed_object import RequestedSettings, Workload, seconds_of, timestamp
from deltashard_operator.run.reclaim import Reclaim, ReclaimState
from deltashard_operator.run.watched_run import NO_PART, Progress, RunPart, WatchedRun

GROUP, VERSION, PLURAL = "deltashard.io", "v1alpha1", "checkpointruns"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "CheckpointRun"
MAX_PODS = 256
COMMIT_FIELDS = frozenset(
    {"lastCommitSeq", "lastCommittedStep", "lastCommitTime", "ranks", "newestCheckpoints"}
)
"""Fields whose change is written within half a minute."""
LOW_PRIORITY_FIELDS = frozenset(
    {
        "observedTime",
        "step",
        "stallSeconds",
        "lostSamplesShare",
        "stored",
        "storedBytes",
        "checkpoints",
        "trainedSeconds",
        "decisions",
    }
)
"""Fields whose change alone causes no write. Any other change is written soon."""
Document = dict[str, Any]


def _same_names(names: str) -> dict[str, str]:
    """Return a table of fields with equal names, mapped from the API's camelCase spelling."""
    return {re.sub("_(.)", lambda found: found[1].upper(), each): each.rstrip("?") for each in names.split()}


# Status field -> attribute. Attributes that end in `_s` are times. Empty values of fields with `?` are omitted.
_RUN = {
    "trainingSince?": "training_since_s",
    "finishedAt?": "finished_at_s",
    "finishedReason?": "finished",
    "store?": "store",
}
_PROGRESS = _same_names("step? attempt? partial_recoveries? stored_bytes? checkpoints?") | {
    "lastCommittedStep?": "last_step",
    "lastCommitSeq?": "last_seq",
    "lastCommitTime?": "last_commit_at_s",
}
_POLICY = _same_names("encoding? differential? goal? every_steps?")
_WORKLOAD = _same_names("kind name uid api_version?")
_POD = _same_names("name uid node? index?") | {"phase?": "shown_phase"}
_RECLAIM = _same_names("state message") | {"since": "since_s", "due?": "due_s"}
_CONDITION = _same_names("type status reason message") | {"lastTransitionTime": "since_s"}
_LOSS = _same_names("cause message? pod? node?") | {"time": "at_s"}


def _fields(value: object, names: Mapping[str, str]) -> Document:
    """Return the attributes of a value in API form, by such a table."""
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


def _parse_fields(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return constructor arguments parsed from API form, the inverse of `_fields`. Missing fields are omitted."""
    known = {name: found.get(key.removesuffix("?")) for key, name in names.items()}
    return {
        name: seconds_of(each) if name.endswith("_s") else tuple(each) if isinstance(each, list) else each
        for name, each in known.items()
        if each is not None
    }


def run_label(run_id: str) -> str:
    """Return the label value for a run id: the id, or a prefix and a hash if it exceeds 63 characters."""
    if len(run_id) <= 63:
        return run_id
    return f"{run_id[:42].rstrip('-.')}-{hashlib.sha256(run_id.encode()).hexdigest()[:20]}"


def document(run: WatchedRun) -> Document:
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
            "policy": run.requested.policy,
            "workload": _fields(workload, _WORKLOAD),
            **({"runs": run.requested.runs} if run.requested.runs else {}),
        },
    }


def status(run: WatchedRun, now_s: float) -> Document:
    """Return the complete status. Empty fields are omitted."""
    progress, policy = run.progress, run.progress.policy
    interval = next((each for each in progress.decisions if each.subject == "interval"), Decision())
    pods = sorted(run.pods.values(), key=lambda each: (not each.alive, each.index, each.name))
    always = {
        "observedTime": timestamp(now_s),
        "phase": run.phase.value,
        "restores": run.ledger.restores,
        "lostSteps": run.ledger.lost_steps,
        "failures": run.ledger.failures,
        "trainedSeconds": int(run.trained_s),
    }
    if policy.encoding:
        always["intervalSeconds"] = math.ceil(policy.every_s)
    known: Document = {
        **_fields(run, _RUN),
        **_fields(progress, _PROGRESS),
        **_fields(policy, _POLICY),
        "goal": interval.goal or policy.goal,
        "ranks": f"{progress.ranks_present}/{progress.world_size}" if progress.world_size else "",
        "stallSeconds": f"{progress.stall_s:.3g}" if progress.stall_s else "",
        "lostSamplesShare": f"{progress.lost_share:.6g}" if progress.partial_recoveries else "",
        "bits": bits_of(policy.encoding),
        "stored": f"{-(-progress.stored_bytes >> 20)}Mi" if progress.stored_bytes else "",
        "newestCheckpoints": list(run.parts.get("", NO_PART).kept),
        "decisions": [MessageToDict(each, preserving_proto_field_name=True) for each in progress.decisions],
        "reclaim": _fields(run.reclaim, _RECLAIM) if run.reclaim is not None else {},
        "losses": [_fields(each, _LOSS) for each in run.losses],
        "pods": [_fields(each, _POD) for each in pods[:MAX_PODS]],
        "conditions": [_fields(each, _CONDITION) for each in run.conditions],
        "ledger": run.ledger.text,
    }
    return always | {key: value for key, value in known.items() if value}


def patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Document:
    """Return the merge patch between two statuses, empty if only `observedTime` changed."""
    changed: Document = {
        key: patch(before.get(key) or {}, value) if isinstance(value, dict) else value
        for key, value in after.items()
        if before.get(key) != value
    }
    changed.update((key, None) for key in before if key not in after)
    return changed if set(changed) - {"observedTime"} else {}


def run_of(found: Mapping[str, Any]) -> WatchedRun:
    spec, status_fields = found["spec"], found.get("status") or {}
    workload = Workload(
        namespace=found["metadata"]["namespace"], **_parse_fields(spec["workload"], _WORKLOAD)
    )
    own = f"{workload.name}-{workload.uid}"
    run_id = "" if spec["runId"] == own else spec["runId"]
    requested = RequestedSettings(policy=spec["policy"], run_id=run_id, runs=spec.get("runs", ""))
    conditions = tuple(
        Condition(**_parse_fields(each, _CONDITION)) for each in status_fields.get("conditions") or ()
    )
    # Messages of conditions that reports do not repeat.
    messages = {each.type: each.message or each.reason for each in conditions if each.status == "True"}
    progress, counted = _progress_of(status_fields), ledger.decoded(status_fields.get("ledger", ""))
    written_s = seconds_of(status_fields.get("observedTime"))
    per_pod = requested.runs == RUN_PER_POD or any(counted.attempts_opened)
    only = RunPart(
        attempt=progress.attempt,
        seq=progress.last_seq,
        committed_at_s=progress.last_commit_at_s,
        kept=tuple(status_fields.get("newestCheckpoints") or ()),
    )
    return WatchedRun(
        workload=workload,
        requested=requested,
        **_parse_fields(status_fields, _RUN),
        ledger=counted,
        losses=tuple(Loss(**_parse_fields(each, _LOSS)) for each in status_fields.get("losses") or ()),
        progress=progress,
        parts={} if per_pod else {"": only},
        phase=phase.Phase(status_fields.get("phase", "Pending")),
        trained_s=float(status_fields.get("trainedSeconds", 0)),
        last_seen_s=written_s,
        reconciled_s=written_s,
        loaded_status_s=written_s,
        conditions=conditions,
        incident_messages=messages,
        run_id_conflict=messages.get("RunIdTaken", ""),
        reclaim=_reclaim_of(status_fields["reclaim"]) if status_fields.get("reclaim") else None,
    )


def _reclaim_of(found: Mapping[str, Any]) -> Reclaim:
    # An unknown state of a newer controller is treated as Kept, so nothing is removed.
    state = ReclaimState(found["state"]) if found["state"] in set(ReclaimState) else ReclaimState.KEPT
    return Reclaim(**_parse_fields(found, _RECLAIM) | {"state": state})


def _progress_of(status_fields: Mapping[str, Any]) -> Progress:
    present, _, size = status_fields.get("ranks", "0/0").partition("/")
    decisions = status_fields.get("decisions") or ()
    return Progress(
        **_parse_fields(status_fields, _PROGRESS),
        world_size=int(size),
        ranks_present=int(present),
        stall_s=float(status_fields.get("stallSeconds", 0)),
        lost_share=float(status_fields.get("lostSamplesShare", 0)),
        policy=pb.Policy(
            every_s=status_fields.get("intervalSeconds", 0), **_parse_fields(status_fields, _POLICY)
        ),
        decisions=tuple(ParseDict(each, Decision(), ignore_unknown_fields=True) for each in decisions),
    )
