"""Reports keep their guarantees under random schedules, and each of their rules is needed: the model fails without it.

A failing seed repeats by `run_schedule(SEED)`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from deltashard_operator.controller import status, writer
from deltashard_operator.run import directive, ledger, report_change
from deltashard_sidecar import save_orders

from tests.crash.report_model import ReportViolation, run_schedule

CHUNKS, CHUNK = 4, 25
BOUND = 150
"""Number of schedules in which the model must find each mutant."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_events_are_counted_and_handled_once(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            run_schedule(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


def _acknowledge_all(_durable: Any, _recorded: Any, report: Any, _part: str) -> int:
    return max((each.id for each in report.incidents), default=0)


def _acknowledge_with_gaps(durable: Any, recorded: Any, report: Any, part: str) -> int:
    kept = [
        _acknowledged(durable, recorded, replace(report, incidents=(each,)), part)
        for each in report.incidents
    ]
    return max(kept, default=0)


async def _write_over(call: Any, path: str, known: Any, change: Any) -> Any:
    return await _write(call, path, {**known, "resourceVersion": ""}, change)


def _restored_by_process(run: Any, report: Any, incident: Any, part: str, **more: Any) -> Any:
    known = replace(run.ledger, restored={}) if more["is_new"] else run.ledger
    return _with_incident(replace(run, ledger=known), report, incident, part, **more)


def _named_randomly(about: Any, notice: Any, _digest: str, now_s: float) -> Any:
    return _event(about, notice, uuid.uuid4().hex, now_s)


def _due_once() -> Callable[..., Any]:
    sent: dict[int, int] = {}

    def due(wanted: Any, *state: Any) -> Any:
        found = _due(wanted, *state)
        return found if found is not None and sent.setdefault(found.id, id(found)) == id(found) else None

    return due


_acknowledged, _due, _event = ledger.acknowledged_id, directive.due, writer.event
_write, _with_incident = status.write, report_change._with_incident
MUTANTS: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "acknowledged before it is durable": (ledger, "acknowledged_id", lambda: _acknowledge_all),
    "acknowledged past one that is not durable": (ledger, "acknowledged_id", lambda: _acknowledge_with_gaps),
    "a status is patched in any version": (status, "write", lambda: _write_over),
    "a restore is counted by process, not by attempt": (
        report_change,
        "_with_incident",
        lambda: _restored_by_process,
    ),
    "an Event's name does not depend on its incident": (writer, "event", lambda: _named_randomly),
    "a late report is applied": (report_change, "_is_late", lambda: lambda *_: False),
    "a directive is sent once": (directive, "due", _due_once),
    "an order is not searched for in the log": (save_orders, "ORDERS_KEY", lambda: "elsewhere"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_model_detects_removed_rule(name: str) -> None:
    where, attribute, make = MUTANTS[name]
    for seed in range(BOUND):
        with mock.patch.object(where, attribute, make()):
            try:
                run_schedule(seed)
            except ReportViolation as found:
                print(f"{name}: found after {seed + 1} schedules: {found}")
                return
    pytest.fail(f"no violation in {BOUND} schedules: {name}")
