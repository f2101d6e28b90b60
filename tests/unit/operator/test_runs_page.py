"""docs/kubernetes/runs.md says what the controller does: phases, causes, Events and metrics, neither more nor fewer."""

from __future__ import annotations

import re
from pathlib import Path

import deltashard_operator
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet.report import IncidentKind
from deltashard_operator.run.failure import CAUSES
from deltashard_operator.run.judgement import CHANGED, EVENTS
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.report_change import event_of
from prometheus_client.metrics_core import Metric

from tests.support.server.minio_server import ROOT

PAGE = (ROOT / "docs" / "kubernetes" / "runs.md").read_text()


def words(header: str) -> set[str]:
    """The words in code quotes of the first column of the table with this header."""
    rows = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_every_phase_is_on_the_page() -> None:
    assert words("| phase | what it means |") == set(Phase)


def test_every_cause_of_a_loss_is_on_the_page() -> None:
    assert words("| cause | read from |") == set(CAUSES)


def test_every_event_is_on_the_page() -> None:
    folder = Path(deltashard_operator.__file__).parent
    sources = "".join(
        (folder / name).read_text()
        for name in (
            "run/report_change.py",
            "run/watched_run.py",
            "controller/reclaimer.py",
            "controller/writer.py",
        )
    )
    told = set(re.findall(r'(?:Notice\(reason=|(?=.Reclaim))"(\w+)"', sources))
    told |= {event_of(each) for each in {*IncidentKind} - {IncidentKind.UNKNOWN, IncidentKind.TRAINER_LOST}}
    assert words("| reason | type | when |") == told | {*EVENTS.values(), *CHANGED.values()}


def exposed(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def test_every_metric_of_the_controller_is_on_the_page() -> None:
    said = set(re.findall(r"`(deltashard_(?:controller|node)_\w+)", PAGE))
    of_every_program = "deltashard_build_info"
    assert said | {of_every_program} == {exposed(each) for each in ControllerMetrics().registry.collect()}
