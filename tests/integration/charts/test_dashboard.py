"""What the dashboard asks, over the metrics page of a real controller that has a run of which everything is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from deltashard_operator.run import run_record
from deltashard_operator.run.observed_object import Workload
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.charts.monitoring import RUN_NAME, queries, records
from tests.integration.charts.promql import Samples, ask, recorded
from tests.support.eventually import eventually
from tests.support.operator.controller_process import MERGE, Cluster, ControllerProcess, now
from tests.support.operator.definition import serving
from tests.support.operator.full_run import full_run

SCRAPE_S = 60
SCRAPES = 61
ABSENT = {
    "max by (condition) (deltashard_run_condition": "it has no trouble",
    "count(max by (namespace, run) (deltashard_run_condition": "",
    "bottomk(": "it always had a fresh checkpoint",
    "sum by (condition) (deltashard_run_condition": "it has no trouble",
}
"""Beginnings of the queries that rightly give nothing, and why; an empty why: they give something all the same."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The controller's /metrics, after it read a CheckpointRun whose Job trains."""
    folder = tmp_path_factory.mktemp("controller")
    with serving(tmp_path_factory.mktemp("apiserver")) as apiserver, apiserver.http() as http:
        cluster = Cluster.make(http)
        job = cluster.job(RUN_NAME)
        workload = Workload(
            namespace=cluster.namespace,
            kind="Job",
            name=RUN_NAME,
            uid=job["metadata"]["uid"],
            api_version="batch/v1",
        )
        run = replace(full_run(), workload=workload, pods={})
        made = http("POST", cluster.path("checkpointruns"), run_record.document(run))
        assert made.status == 201, made.document
        status = run_record.status(run, now_s=run.judged_s) | {"trainingSince": now(-100)}
        status["lastCommitTime"] = now(-30)
        path = cluster.path("checkpointruns", made.document["metadata"]["name"]) + "/status"
        patched = http("PATCH", path, {"status": status}, content=MERGE)
        assert patched.status == 200, patched.document
        cluster.running_pod(job)
        controller = ControllerProcess(apiserver, folder)
        controller.start()
        try:
            eventually(
                lambda: controller.metric("deltashard_run_phase", phase="Training") == 1,
                what=lambda: controller.get("metrics")[1],
            )
            yield controller.get("metrics")[1]
        finally:
            controller.stop()


def scraped(page: str) -> Samples:
    """An hour of scrapes of the page, its counters rising."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            rises = family.type in {"counter", "histogram"} and not sample.name.endswith("_created")
            labels = ",".join(f'{key}="{_quoted(value)}"' for key, value in sample.labels.items())
            series = f'{sample.name}{{{labels + "," if labels else ""}pod="controller"}}'
            found[series] = [
                (float(at * SCRAPE_S), sample.value + (at if rises else 0)) for at in range(SCRAPES)
            ]
    return found


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def test_every_panel_on_runs_and_the_controller_shows_something(page: str) -> None:
    """Of the queries whose metrics the controller has, those that give nothing are known, with the reason."""
    series = scraped(page)
    names = {each.partition("{")[0] for each in series}
    end_s = float((SCRAPES - 1) * SCRAPE_S)
    anew = {key: points for key, points in series.items() if "timestamp" in key}
    offset_s = max(points[0][1] for key, points in anew.items() if "last_commit" in key) - end_s
    for key, points in anew.items():  # its times are of today, ours begin at 0
        series[key] = [(at, value - offset_s) for at, value in points]
    filled = recorded(records(), series, [end_s - SCRAPE_S, end_s])
    there = names | {each.partition("{")[0] for each in filled}
    asked = 0
    for query, answer in zip(queries(), ask(queries(), filled, at_s=end_s), strict=True):
        assert answer.error == "", query
        if not set(answer.metrics) <= there | {"deltashard_run_condition"}:
            continue  # of sidecars or the webhook
        asked += 1
        empty = [why for begin, why in ABSENT.items() if query.startswith(begin) or begin in query]
        assert bool(answer.result) != bool(empty and empty[0]), query
    assert asked >= 30
