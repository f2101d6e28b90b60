"""The lifecycle of a CheckpointRequest under any order of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.fleet.report import Outcome, SaveResult
from deltashard_operator.run import request as requests
from deltashard_operator.run.observed_object import timestamp
from deltashard_operator.run.request import (
    COMPLETED,
    FAILED,
    ORDERED,
    PENDING,
    RESULT_GRACE_S,
    CheckpointRequest,
    RequestFacts,
)
from hypothesis import given
from hypothesis import strategies as st

BASE_TIME_S = 1_700_000_000.0
RUN_EXISTS = RequestFacts(now_s=BASE_TIME_S, run="train-1")
COMMITTED = SaveResult(id="q-1", outcome=Outcome.COMMITTED, step=120, seq=7)


def document(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "n", "name": "now", "uid": "q-1", "generation": 1}
    return {
        "metadata": {**metadata, "creationTimestamp": timestamp(BASE_TIME_S)},
        "spec": {"runRef": {"name": "train-1"}, "deadline": "5m", **spec},
        "status": status or {},
    }


def after(*facts: RequestFacts, **spec: Any) -> CheckpointRequest:
    found = requests.request_of(document(**spec))
    for each in facts:
        found = requests.reconcile(found, each)
    return found


def save_ended(outcome: Outcome, cause: str = "") -> RequestFacts:
    return replace(RUN_EXISTS, save_result=SaveResult(id="q-1", outcome=outcome, cause=cause))


def after_seconds(facts: RequestFacts, seconds: float = 300.0) -> RequestFacts:
    return replace(facts, now_s=BASE_TIME_S + seconds)


NONE = RequestFacts(now_s=BASE_TIME_S)


@pytest.mark.parametrize(
    ("facts", "phase", "reason", "message"),
    [
        (
            (NONE,),
            PENDING,
            "RunNotFound",
            "no CheckpointRun has the name or run id train-1 in this namespace yet",
        ),
        ((NONE, RUN_EXISTS), ORDERED, "Ordered", "the sidecars of train-1 are ordered to save"),
        ((replace(RUN_EXISTS, room=False),), PENDING, "TooManyOrders", "too many open orders"),
        ((replace(RUN_EXISTS, room=False), RUN_EXISTS), ORDERED, "Ordered", "ordered to save"),
        ((after_seconds(NONE),), FAILED, "DeadlineExceeded", "in 5m there was no run train-1"),
        (
            (after_seconds(replace(RUN_EXISTS, room=False)),),
            FAILED,
            "DeadlineExceeded",
            "in 5m run train-1 accepted no order",
        ),
        ((after_seconds(RUN_EXISTS),), FAILED, "DeadlineExceeded", "in 5m run train-1 accepted no order"),
        ((RUN_EXISTS, after_seconds(RUN_EXISTS)), ORDERED, "Ordered", "ordered to save"),
        (
            (RUN_EXISTS, after_seconds(RUN_EXISTS, 300 + RESULT_GRACE_S)),
            FAILED,
            "DeadlineExceeded",
            "no sidecar of the run reported",
        ),
        (
            (RUN_EXISTS, after_seconds(replace(RUN_EXISTS, save_result=COMMITTED), 310)),
            COMPLETED,
            "Saved",
            "saved at step 120",
        ),
        ((RUN_EXISTS, save_ended(Outcome.EXPIRED)), FAILED, "DeadlineExceeded", "nothing was saved in 5m"),
        (
            (RUN_EXISTS, save_ended(Outcome.FAILED, "Full: no room")),
            FAILED,
            "SaveFailed",
            "failed: Full: no room",
        ),
        ((RUN_EXISTS, save_ended(Outcome.UNKNOWN)), FAILED, "SaveFailed", "the sidecar gave no reason"),
        ((replace(RUN_EXISTS, finished="Completed"),), FAILED, "RunFinished", "finished (Completed)"),
        ((RUN_EXISTS, replace(RUN_EXISTS, finished="Failed")), FAILED, "RunFinished", "finished (Failed)"),
        (
            (RUN_EXISTS, replace(RUN_EXISTS, finished="Failed", save_result=COMMITTED)),
            COMPLETED,
            "Saved",
            "step 120",
        ),
        ((RUN_EXISTS, NONE), FAILED, "RunGone", "run train-1 is gone"),
        (
            (replace(RUN_EXISTS, per_pod=True),),
            FAILED,
            "RunPerPod",
            "each pod of train-1 trains its own run",
        ),
    ],
)
def test_request_phase_and_message_follow_from_the_facts(
    facts: tuple[RequestFacts, ...], phase: requests.RequestPhase, reason: str, message: str
) -> None:
    found = after(*facts)
    assert (found.phase, found.reason) == (phase, reason)
    assert message in found.message


EVENTS = ("begin", "finish", "vanish", "save", "fail", "report", "write", "restart", "wait")


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_event_order_ends_once_with_the_true_outcome(events: list[str]) -> None:
    """Runs may start late, end or vanish. Reports and writes may be lost. The controller may restart at any time."""
    found, written = after(), document()
    facts = NONE
    made: SaveResult | None = None
    for each in events:
        match each:
            case "begin":
                facts = replace(facts, run="train-1")
            case "finish":
                facts = replace(facts, finished="Completed" if facts.run else "")
            case "vanish":
                facts = replace(facts, run="", finished="", save_result=None)
            case "save" | "fail" if found.phase is ORDERED and not facts.finished:
                made = made or (COMMITTED if each == "save" else replace(COMMITTED, outcome=Outcome.FAILED))
            case "report" if facts.run:
                facts = replace(facts, save_result=made)
            case "write":
                written = document(requests.status(found))
            case "restart":
                facts = replace(facts, save_result=None)
                found = requests.request_of(written)
            case "wait":
                facts = replace(facts, now_s=facts.now_s + 60)
        before, found = found, requests.reconcile(found, facts)
        assert before.open or found == before, "an ended request does not change"
        assert (found.phase is COMPLETED) <= (made is COMMITTED and (found.step, found.seq) == (120, 7))
        assert requests.request_of(document(requests.status(found))) == found, (
            "the status holds the whole request"
        )
        reported_in_time = facts.save_result is COMMITTED and before.phase is ORDERED
        assert found.phase is COMPLETED or not reported_in_time
    end = after_seconds(facts, 300 + RESULT_GRACE_S)
    assert not requests.reconcile(found, end).open, "a request ends at its deadline"
