"""The life of a CheckpointRequest: what it is now, and what follows from what is known. Pure.

Pending becomes Ordered when the run is there, and both become Failed at the deadline at the latest. Completed and
Failed are for good. Nothing is remembered but what the status says: the order's id is the request's UID, so a
controller that starts anew orders the same save again, not another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from deltashard_operator.api import duration
from deltashard_operator.fleet.report import Outcome, SaveOrder, SaveOver
from deltashard_operator.run.observed_object import seconds_of, timestamp

COMPLETE = "Complete"
"""Type of its one condition."""
RESULT_GRACE_S = 15.0
"""After the deadline a sidecar may still report the save that it has just made."""
MAX_MESSAGE = 1024
Document = dict[str, Any]


class RequestPhase(StrEnum):
    """Phase of a CheckpointRequest."""

    PENDING = "Pending"
    ORDERED = "Ordered"
    COMPLETED = "Completed"
    FAILED = "Failed"


PENDING, ORDERED, COMPLETED, FAILED = RequestPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """A CheckpointRequest."""

    namespace: str
    name: str
    uid: str
    run: str
    """Name of a CheckpointRun, or a run id."""
    created_s: float
    deadline: str = "10m"
    urgent: bool = False
    pin: str = ""
    generation: int = 0
    phase: RequestPhase = PENDING
    reason: str = ""
    message: str = ""
    step: int = 0
    seq: int = 0
    finished_s: float = 0.0

    @property
    def open(self) -> bool:
        return self.phase in {PENDING, ORDERED}

    @property
    def until_s(self) -> float:
        return self.created_s + duration.seconds_of(self.deadline)

    @property
    def order(self) -> SaveOrder:
        return SaveOrder(id=self.uid, reason="request", urgent=self.urgent, pin=self.pin)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is known besides the request."""

    now_s: float
    run: str = ""
    """Name of its CheckpointRun; empty: there is none."""
    finished: str = ""
    """How the run ended; empty: it has not."""
    per_pod: bool = False
    """Whether the workload's pods train a run each."""
    room: bool = True
    """Whether the run takes another order."""
    save_result: SaveOver | None = None
    """What a sidecar of the run reports of this order."""


_LATE = "DeadlineExceeded"


def _next_phase(request: CheckpointRequest, facts: RequestFacts) -> tuple[RequestPhase, str, str] | None:
    """The phase that an open request comes to, why in one word, and in a sentence; None: nothing changes."""
    run, deadline, ordered = facts.run, request.deadline, request.phase is ORDERED
    late = facts.now_s - request.until_s
    if ordered and facts.save_result is not None:
        cause = facts.save_result.cause or "the sidecar gave no reason"
        if facts.save_result.outcome is Outcome.COMMITTED:
            pinned = f", pinned as {request.pin}" if request.pin else ""
            return COMPLETED, "Saved", f"saved at step {facts.save_result.step}{pinned}"
        if facts.save_result.outcome is Outcome.EXPIRED:
            return FAILED, _LATE, f"nothing was saved in {deadline}: {cause}"
        return FAILED, "SaveFailed", f"the save failed: {cause}"
    if facts.finished:
        return FAILED, "RunFinished", f"run {run} is finished ({facts.finished})"
    if ordered:
        if late >= RESULT_GRACE_S:
            return FAILED, _LATE, f"no sidecar of the run reported a save in {deadline}"
        return None if run else (FAILED, "RunGone", f"run {request.run} is gone")
    if facts.per_pod:
        return FAILED, "RunPerPod", f"each pod of {run} trains a run of its own"
    if late >= 0:
        why = f"run {run} took no order" if run else f"there was no run {request.run} in this namespace"
        return FAILED, _LATE, f"in {deadline} {why}"
    if not run:
        return (
            PENDING,
            "RunNotFound",
            f"no CheckpointRun and no run id is {request.run} in this namespace yet",
        )
    if facts.room:
        return ORDERED, "Ordered", f"the sidecars of {run} are told to save"
    return PENDING, "TooManyOrders", f"run {run} has too many open orders"


def reconcile(request: CheckpointRequest, facts: RequestFacts) -> CheckpointRequest:
    """The request, with what follows from what is known now."""
    found = _next_phase(request, facts) if request.open else None
    if found is None:
        return request
    phase, reason, message = found
    request = replace(request, phase=phase, reason=reason, message=message[:MAX_MESSAGE])
    if phase is COMPLETED and facts.save_result is not None:
        request = replace(request, step=facts.save_result.step, seq=facts.save_result.seq)
    return request if request.open else replace(request, finished_s=facts.now_s)


def request_of(document: Mapping[str, Any]) -> CheckpointRequest:
    """A CheckpointRequest as the API has it; one without a status is Pending."""
    metadata, spec, status = document["metadata"], document["spec"], document.get("status") or {}
    condition: Mapping[str, Any] = next(iter(status.get("conditions") or ()), {})
    return CheckpointRequest(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        run=spec["runRef"]["name"],
        created_s=seconds_of(metadata["creationTimestamp"]),
        deadline=spec.get("deadline", "10m"),
        urgent=spec.get("urgent", False),
        pin=spec.get("pin", ""),
        generation=metadata.get("generation", 0),
        phase=RequestPhase(status.get("phase", PENDING)),
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        step=status.get("step", 0),
        seq=status.get("seq", 0),
        finished_s=seconds_of(status.get("finishedAt")),
    )


def status(request: CheckpointRequest) -> Document:
    """The whole status; a field without a value is left out."""
    found: Document = {"observedGeneration": request.generation, "phase": request.phase.value}
    if request.finished_s:
        found["finishedAt"] = timestamp(request.finished_s)
    if request.phase is COMPLETED:
        found |= {"step": request.step, "seq": request.seq}
    found["conditions"] = [
        {
            "type": COMPLETE,
            "status": {COMPLETED: "True", FAILED: "False"}.get(request.phase, "Unknown"),
            "observedGeneration": request.generation,
            "lastTransitionTime": timestamp(request.finished_s or request.created_s),
            "reason": request.reason,
            "message": request.message,
        }
    ]
    return found
