"""Lifecycle of a CheckpointRequest. Pure.

Pending becomes Ordered when the run exists. Both become Failed after the deadline. Completed and Failed are final. The
status is the only state: the order's id is the request's UID, so a new controller repeats the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from deltashard_operator.api import duration
from deltashard_operator.fleet.report import Outcome, SaveOrder, SaveResult
from deltashard_operator.run.observed_object import seconds_of, timestamp

COMPLETE = "Complete"
"""Type of the only condition."""
RESULT_GRACE_S = 15.0
"""Time after the deadline in which a sidecar may report a save that has just finished."""
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
    """CheckpointRequest as the controller uses it."""

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
    """Input of `reconcile` other than the request."""

    now_s: float
    run: str = ""
    """Name of its CheckpointRun; empty if it does not exist."""
    finished: str = ""
    per_pod: bool = False
    room: bool = True
    save_result: SaveResult | None = None


_LATE = "DeadlineExceeded"


def _next_phase(request: CheckpointRequest, facts: RequestFacts) -> tuple[RequestPhase, str, str] | None:
    """Return the next phase of an open request with its reason and message, or None if nothing changes."""
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
        return FAILED, "RunPerPod", f"each pod of {run} trains its own run"
    if late >= 0:
        why = f"run {run} accepted no order" if run else f"there was no run {request.run} in this namespace"
        return FAILED, _LATE, f"in {deadline} {why}"
    if not run:
        return (
            PENDING,
            "RunNotFound",
            f"no CheckpointRun has the name or run id {request.run} in this namespace yet",
        )
    if facts.room:
        return ORDERED, "Ordered", f"the sidecars of {run} are ordered to save"
    return PENDING, "TooManyOrders", f"run {run} has too many open orders"


def reconcile(request: CheckpointRequest, facts: RequestFacts) -> CheckpointRequest:
    """Return the request in the phase that follows from the facts."""
    found = _next_phase(request, facts) if request.open else None
    if found is None:
        return request
    phase, reason, message = found
    request = replace(request, phase=phase, reason=reason, message=message[:MAX_MESSAGE])
    if phase is COMPLETED and facts.save_result is not None:
        request = replace(request, step=facts.save_result.step, seq=facts.save_result.seq)
    return request if request.open else replace(request, finished_s=facts.now_s)


def request_of(document: Mapping[str, Any]) -> CheckpointRequest:
    """Read a CheckpointRequest. Without a status it is Pending."""
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
    """Return the complete status. Empty fields are omitted."""
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
