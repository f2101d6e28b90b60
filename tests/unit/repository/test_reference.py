"""The generated pages in docs/reference are those that the code renders, and list all events."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import pytest
from deltashard_operator.controller import reclaimer, writer
from deltashard_operator.fleet.report import IncidentKind
from deltashard_operator.run.reconcile import CHANGE_REASONS, EVENT_REASONS
from deltashard_operator.run.report_change import event_reason
from deltashard_operator.run.watched_run import EVENTS

from tests.support.tool import ROOT
from tools import reference
from tools.reference_pages.log_events import OPERATOR, SIDECAR

LOGGED = re.compile(r'log(?:ger)?\.(info|warning|error|exception)\(\s*"(\w+\.\w+)"')
NAMED_INDIRECTLY = {"credentials.missing", "store.failing"}
"""Their calls have a variable."""


def test_reference_pages_are_up_to_date() -> None:
    assert reference.stale() == []


@pytest.mark.parametrize(("component", "listed"), [("sidecar", SIDECAR), ("operator", OPERATOR)])
def test_log_events_of_the_code_are_listed(component: str, listed: Mapping[str, tuple[str, str]]) -> None:
    logged = {
        (name, level.replace("exception", "error"))
        for path in (ROOT / component).rglob("*.py")
        for level, name in LOGGED.findall(path.read_text())
    }
    literal = {name for name in listed if name.islower()} - NAMED_INDIRECTLY
    assert logged == {(name, listed[name][0]) for name in literal}


def test_kubernetes_events_of_the_code_are_listed() -> None:
    reasons = [*EVENT_REASONS.values(), *CHANGE_REASONS.values(), *reclaimer._REASONS.values()]
    reasons += re.findall(r'reason="(\w+)"', inspect.getsource(writer))
    without_event = {IncidentKind.UNKNOWN, IncidentKind.TRAINER_LOST}
    reasons += map(event_reason, {*IncidentKind} - without_event)
    assert {*reasons} == EVENTS.keys()
