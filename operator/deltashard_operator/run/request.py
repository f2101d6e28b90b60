"""The life of a CheckpointRequest: what it is now, and what follows from what is known. Pure; `_ROWS` is the table.

Pending becomes Ordered when the run is there, and both become Failed at the deadline at the latest. Completed and
Failed are for good. Nothing is remembered but what the status says: the order's id is the request's UID, so a
controller that starts anew orders the same save again, not another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from deltashard_operator.api import duration
from deltashard_operator.fleet.report import Outcome, SaveOrder, SaveOver
from deltashard_operator.run.observed_object import seconds_of, timestamp

COMPLETE = "Complete"
"""Type of its one condition."""
ANSWER_S = 15.0
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
OPEN = frozenset({PENDING, ORDERED})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """A CheckpointRequest."""

    namespace: str
    name: str
    uid: str
    run: str
    """Name of a CheckpointRun, or a run id."""
    until_s: float
    """Its deadline."""
    deadline: str = "10m"
    """The same as it is written."""
    urgent: bool = False
    pin: str = ""
    generation: int = 0
    phase: RequestPhase = PENDING
    reason: str = ""
    message: str = ""
    step: int = 0
    seq: int = 0
    since_s: float = 0.0
    """When the condition's status last changed."""
    started_s: float = 0.0
    finished_s: float = 0.0

    @property
    def open(self) -> bool:
        return self.phase in OPEN

    @property
    def order(self) -> SaveOrder:
        return SaveOrder(id=self.uid, reason="request", urgent=self.urgent, pin=self.pin)

    @property
    def answer_until_s(self) -> float:
        """Until when a sidecar is heard that made the save in time."""
        return self.until_s + ANSWER_S


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
    over: SaveOver | None = None
    """What a sidecar of the run reports of this order."""


class _Row(NamedTuple):
    before: frozenset[RequestPhase]
    when: Callable[[CheckpointRequest, RequestFacts], bool]
    after: RequestPhase
    reason: str
    message: str
    """With {words} of `_words`."""


def _ended(facts: RequestFacts, outcome: Outcome) -> bool:
    return facts.over is not None and facts.over.outcome is outcome


# The first row that holds counts.
_WAITS, _ASKED = frozenset({PENDING}), frozenset({ORDERED})
_LATE = "DeadlineExceeded"
_ROWS = tuple(
    _Row(*each)
    for each in (
        (
            _ASKED,
            lambda _, f: _ended(f, Outcome.COMMITTED),
            COMPLETED,
            "Saved",
            "saved at step {step}{pinned}",
        ),
        (
            _ASKED,
            lambda _, f: _ended(f, Outcome.EXPIRED),
            FAILED,
            _LATE,
            "nothing was saved in {deadline}: {cause}",
        ),
        (_ASKED, lambda _, f: f.over is not None, FAILED, "SaveFailed", "the save failed: {cause}"),
        (OPEN, lambda _, f: bool(f.finished), FAILED, "RunFinished", "run {run} is finished ({finished})"),
        (_WAITS, lambda _, f: f.per_pod, FAILED, "RunPerPod", "each pod of {run} trains a run of its own"),
        (
            _WAITS,
            lambda r, f: bool(f.run) and f.now_s >= r.until_s,
            FAILED,
            _LATE,
            "run {run} took no order in {deadline}",
        ),
        (
            _WAITS,
            lambda r, f: f.now_s >= r.until_s,
            FAILED,
            _LATE,
            "in {deadline} there was no CheckpointRun and no run id {name} in this namespace",
        ),
        (
            _ASKED,
            lambda r, f: f.now_s >= r.answer_until_s,
            FAILED,
            _LATE,
            "no sidecar of the run reported a save in {deadline}",
        ),
        (_ASKED, lambda _, f: not f.run, FAILED, "RunGone", "run {name} is gone"),
        (
            _WAITS,
            lambda _, f: bool(f.run) and f.room,
            ORDERED,
            "Ordered",
            "the sidecars of {run} are told to save",
        ),
        (_WAITS, lambda _, f: bool(f.run), PENDING, "TooManyOrders", "run {run} has too many open orders"),
        (
            _WAITS,
            lambda _, __: True,
            PENDING,
            "RunNotFound",
            "there is no CheckpointRun and no run id {name} in this namespace yet",
        ),
    )
)


def _words(request: CheckpointRequest, facts: RequestFacts) -> Mapping[str, object]:
    over = facts.over
    return {
        "name": request.run,
        "run": facts.run,
        "finished": facts.finished,
        "deadline": request.deadline,
        "step": over.step if over is not None else 0,
        "cause": (over.cause if over is not None else "") or "the sidecar gave no reason",
        "pinned": f", pinned as {request.pin}" if request.pin else "",
    }


def judged(request: CheckpointRequest, facts: RequestFacts) -> CheckpointRequest:
    """The request, with what follows from what is known now."""
    row = next((each for each in _ROWS if request.phase in each.before and each.when(request, facts)), None)
    if row is None:
        return request
    message = row.message.format_map(_words(request, facts))[:MAX_MESSAGE]
    found = replace(request, phase=row.after, reason=row.reason, message=message)
    if found.phase is COMPLETED and facts.over is not None:
        found = replace(found, step=facts.over.step, seq=facts.over.seq)
    return replace(
        found,
        since_s=found.since_s if found.open and found.since_s else facts.now_s,
        started_s=found.started_s or (facts.now_s if found.phase is ORDERED else 0.0),
        finished_s=0.0 if found.open else facts.now_s,
    )


def request_of(document: Mapping[str, Any]) -> CheckpointRequest:
    """A CheckpointRequest as the API has it; one without a status is Pending."""
    metadata, spec, status = document["metadata"], document["spec"], document.get("status") or {}
    condition: Mapping[str, Any] = next(iter(status.get("conditions") or ()), {})
    deadline = spec.get("deadline", "10m")
    return CheckpointRequest(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        run=spec["runRef"]["name"],
        until_s=seconds_of(metadata["creationTimestamp"]) + duration.seconds_of(deadline),
        deadline=deadline,
        urgent=spec.get("urgent", False),
        pin=spec.get("pin", ""),
        generation=metadata.get("generation", 0),
        phase=RequestPhase(status.get("phase", PENDING)),
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        step=status.get("step", 0),
        seq=status.get("seq", 0),
        since_s=seconds_of(condition.get("lastTransitionTime")),
        started_s=seconds_of(status.get("startedAt")),
        finished_s=seconds_of(status.get("finishedAt")),
    )


def status(request: CheckpointRequest) -> Document:
    """The whole status; a field without a value is left out."""
    found: Document = {"observedGeneration": request.generation, "phase": request.phase.value}
    if request.started_s:
        found["startedAt"] = timestamp(request.started_s)
    if request.finished_s:
        found["finishedAt"] = timestamp(request.finished_s)
    if request.phase is COMPLETED:
        found |= {"step": request.step, "seq": request.seq}
    found["conditions"] = [
        {
            "type": COMPLETE,
            "status": {COMPLETED: "True", FAILED: "False"}.get(request.phase, "Unknown"),
            "observedGeneration": request.generation,
            "lastTransitionTime": timestamp(request.since_s),
            "reason": request.reason,
            "message": request.message,
        }
    ]
    return found
