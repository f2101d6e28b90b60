"""Alerts and dashboard: by Prometheus' own parser and engine, over metrics that the code really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.kube.cluster_name import MANAGED_BY, MANAGED_BY_VALUE, METRICS_PORT_NAME
from deltashard_operator.run.watched_run import Run
from deltashard_operator.tls.metric import AuthorityMetrics
from deltashard_sidecar.telemetry.metric import Metrics
from prometheus_client import CollectorRegistry

from tests.integration.charts.helm import CHART, render
from tests.integration.charts.promql import Samples, ask
from tests.support.server.minio_server import ROOT

RUNBOOKS = ROOT / "docs" / "kubernetes" / "runbooks"
ON = {
    "monitoring": {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "rules", "dashboard")}
}
FOREIGN = {"apiserver_admission_webhook_rejection_count"}
"""Metrics of the API server; that it has them, and with which labels, is a test of `test_releases`."""
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def exported(registry: CollectorRegistry) -> Iterator[str]:
    """Names of all series of a registry."""
    for family in registry.collect():
        for suffix in SUFFIXES[family.type]:
            yield family.name + suffix


class NoRuns:
    """A controller that has none."""

    def runs(self) -> Iterator[Run]:
        return iter(())

    def unwritten(self) -> int:
        return 0


def everything() -> Iterator[str]:
    """Names of all series of ours."""
    controller = ControllerMetrics()
    controller.follow(NoRuns())
    FleetMetrics(controller.registry)
    AuthorityMetrics(controller.registry)
    for metrics in (Metrics(), WebhookMetrics(), controller):
        yield from exported(metrics.registry)


EXPORTED = set(everything())


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by the alert's name."""
    groups = render(ON).find("PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def queries() -> list[str]:
    """All expressions of the dashboard, with Grafana's variables filled in."""
    dashboard = json.loads((CHART / "dashboards" / "deltashard.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    for variable in dashboard["templating"]["list"]:
        match = (
            re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"].get("query", ""))
            if isinstance(variable["query"], dict)
            else None
        )
        found += [match[1]] if match else []
    filled = [each.replace("$__rate_interval", "5m").replace("$namespace", ".*") for each in found]
    assert not [each for each in filled if "$" in each]
    return filled


def test_alerts_and_panels_read_what_is_exported() -> None:
    """Each expression parses, and each metric in it is one of ours or a known one of the API server."""
    expressions = [rule["expr"] for rule in alerts().values()] + queries()
    assert len(expressions) > 30
    for expression, answer in zip(expressions, ask(expressions), strict=True):
        assert answer.error == "", expression
        assert answer.metrics, expression
        assert set(answer.metrics) <= EXPORTED | FOREIGN, expression


def test_a_metric_that_is_not_there_would_be_seen() -> None:
    """And so would an expression that does not parse."""
    unknown, broken = ask(["sum(deltashard_no_such_metric)", "sum(("])
    assert not set(unknown.metrics) <= EXPORTED | FOREIGN
    assert broken.error


def steady(value: float, *, until_s: int = 3600) -> list[tuple[float, float]]:
    """A gauge, read every 30 s."""
    return [(float(at), value) for at in range(0, until_s + 1, 30)]


def rising(
    *, begins_s: int, each: float = 1.0, until_s: int = 3600, every_s: int = 60
) -> list[tuple[float, float]]:
    """A counter that rises by `each` every `every_s` from a time on, read every 30 s."""
    return [(float(at), each * max(0, (at - begins_s) // every_s)) for at in range(0, until_s + 1, 30)]


RUN = '{namespace="team-a",run="train"}'
POD = 'namespace="team-a",pod="train-0"'
LAST = f"deltashard_run_last_commit_timestamp_seconds{RUN}"
INTERVAL = f"deltashard_run_interval_seconds{RUN}"
FAILURES = f'deltashard_save_failures_total{{{POD},cause="%s"}}'
COMMITS = f'deltashard_commits_total{{{POD},kind="delta"}}'
SINCE = f"deltashard_run_training_since_timestamp_seconds{RUN}"
CONDITION = 'deltashard_run_condition{namespace="team-a",run="train",condition="%s"}'
REJECTED = 'apiserver_admission_webhook_rejection_count{name="jobs.deltashard.io",error_type="%s",operation="CREATE"}'
ADMITTED = 'deltashard_webhook_admissions_total{kind="Job",outcome="%s"}'
NOT_AFTER = 'deltashard_%s_certificate_not_after_timestamp_seconds{namespace="deltashard-system"}'
HOUR = 3600
DAY = 86400

CASES: list[tuple[str, str, Samples, bool]] = [
    (
        "CheckpointStale",
        "a commit an hour ago, every 5 min",
        {LAST: steady(1.0), SINCE: steady(0.5), INTERVAL: steady(300)},
        True,
    ),
    (
        "CheckpointStale",
        "a commit 10 min ago",
        {LAST: steady(HOUR - 600), SINCE: steady(0.5), INTERVAL: steady(300)},
        False,
    ),
    (
        "CheckpointStale",
        "half an hour is the interval",
        {LAST: steady(1.0), SINCE: steady(0.5), INTERVAL: steady(1800)},
        False,
    ),
    ("CheckpointStale", "never committed", {SINCE: steady(0.5), INTERVAL: steady(300)}, True),
    ("CheckpointStale", "never committed, new", {SINCE: steady(HOUR - 60), INTERVAL: steady(300)}, False),
    (
        "CheckpointStale",
        "went on a moment ago after a long pause",
        {LAST: steady(1.0), SINCE: steady(HOUR - 60), INTERVAL: steady(300)},
        False,
    ),
    ("CheckpointStale", "suspended", {LAST: steady(1.0), INTERVAL: steady(300)}, False),
    ("CheckpointStale", "no timer", {LAST: steady(1.0), SINCE: steady(0.5), INTERVAL: steady(0)}, False),
    ("CheckpointStale", "finished: no series", {}, False),
    ("SavesFailing", "the controller says so", {CONDITION % "SavesFailing": steady(1)}, True),
    ("SavesFailing", "another trouble", {CONDITION % "Stale": steady(1)}, False),
    (
        "SavesFailing",
        "both say so: told once",
        {CONDITION % "SavesFailing": steady(1), FAILURES % "unavailable": rising(begins_s=2400)},
        True,
    ),
    ("SavesFailing", "every save fails", {FAILURES % "unavailable": rising(begins_s=2400)}, True),
    (
        "SavesFailing",
        "some fail, some do not",
        {FAILURES % "unavailable": rising(begins_s=2400), COMMITS: rising(begins_s=2400)},
        False,
    ),
    ("SavesFailing", "one failed", {FAILURES % "unavailable": rising(begins_s=3500)}, False),
    ("SavesFailing", "fenced: another pod trains", {FAILURES % "fenced": rising(begins_s=2400)}, False),
    ("RestoresFallingBack", "one did", {CONDITION % "FellBack": steady(1)}, True),
    ("RestoresFallingBack", "other troubles", {CONDITION % "Stale": steady(1)}, False),
    ("TrackingFault", "one", {CONDITION % "TrackingFault": steady(1)}, True),
    ("TrackingFault", "other troubles", {CONDITION % "Stale": steady(1)}, False),
    ("StuckOnLostNode", "one run", {CONDITION % "StuckOnLostNode": steady(1)}, True),
    ("StuckOnLostNode", "other troubles", {CONDITION % "Stale": steady(1)}, False),
    ("WebhookErrors", "no replica", {REJECTED % "calling_webhook_error": rising(begins_s=3300)}, True),
    ("WebhookErrors", "refusals of ours", {REJECTED % "no_error": rising(begins_s=3300)}, False),
    ("WebhookErrors", "it fails", {ADMITTED % "failed": rising(begins_s=3300)}, True),
    ("WebhookErrors", "it refuses what is wrong", {ADMITTED % "BadAnnotation": rising(begins_s=3300)}, False),
    ("CertificateNearExpiry", "of the webhook", {NOT_AFTER % "webhook": steady(HOUR + 13 * DAY)}, True),
    ("CertificateNearExpiry", "of the controller", {NOT_AFTER % "fleet": steady(HOUR + 13 * DAY)}, True),
    (
        "CertificateNearExpiry",
        "one of two",
        {NOT_AFTER % "webhook": steady(HOUR + 80 * DAY), NOT_AFTER % "fleet": steady(HOUR + DAY)},
        True,
    ),
    ("CertificateNearExpiry", "long to go", {NOT_AFTER % "webhook": steady(HOUR + 15 * DAY)}, False),
    ("CertificateNearExpiry", "none loaded yet", {NOT_AFTER % "webhook": steady(0)}, False),
    ("ControllerDown", "gone", {}, True),
    ("ControllerDown", "its port is closed", {"deltashard_fleet_serving": steady(0)}, True),
    ("ControllerDown", "there", {"deltashard_fleet_serving": steady(1)}, False),
]


def test_every_alert_has_cases_of_both_kinds() -> None:
    """One in which it fires, and one in which it does not."""
    for name in alerts():
        assert {fires for alert, _, _, fires in CASES if alert == name} == {True, False}, name


@pytest.mark.parametrize(
    ("alert", "situation", "series", "fires"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_an_alert_fires_when_it_should(alert: str, situation: str, series: Samples, fires: bool) -> None:
    """By Prometheus' engine, an hour in."""
    (answer,) = ask([alerts()[alert]["expr"]], series, at_s=HOUR)
    assert answer.error == ""
    assert bool(answer.result) == fires, (situation, answer)


def test_alerts_name_what_they_are_about() -> None:
    """The labels that the texts use are in what the expressions give."""
    for name, situation, series, fires in CASES:
        if not fires:
            continue
        rule = alerts()[name]
        text = json.dumps(rule["annotations"])
        either = re.findall(r"\{\{ or \$labels\.(\w+) \$labels\.(\w+) \}\}", text)
        used = set(re.findall(r"\{\{ \$labels\.(\w+)", text))
        result = ask([rule["expr"]], series, at_s=HOUR)[0].result
        assert len(result) == 1, (name, situation)
        for labels, _ in result:
            assert used <= set(labels), (name, situation)
            assert all(set(pair) & set(labels) for pair in either), (name, situation)


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    """A page for each: what it means, what it costs, how to look, what to do."""
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    assert {f"{name}.md" for name in alerts()} == pages
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/kubernetes/runbooks/{name}.md")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
        assert re.findall(r"^#+ (.*)$", text, re.MULTILINE) == [
            name,
            "Meaning",
            "Impact",
            "Diagnosis",
            "Remedy",
        ]
        assert "```" in text.partition("## Diagnosis")[2].partition("## Remedy")[0]


def test_runbooks_name_metrics_that_exist() -> None:
    """Whatever looks like a metric of ours is one."""
    named = re.compile(r"\bdeltashard_[a-z_]+\b")
    for path in RUNBOOKS.glob("*.md"):
        for name in named.findall(path.read_text(encoding="utf-8")):
            assert {name, f"{name}_count"} & EXPORTED, (path.name, name)  # a histogram goes by its name


def test_monitors_find_what_injection_makes() -> None:
    """The sidecar's port and label, by the names that are for good."""
    spec = render(ON).find("PodMonitor")["spec"]
    assert spec["selector"]["matchLabels"] == {MANAGED_BY: MANAGED_BY_VALUE}
    assert [each["port"] for each in spec["podMetricsEndpoints"]] == [METRICS_PORT_NAME]


def test_the_dashboard_is_whole() -> None:
    """What the ConfigMap holds is the file, and panels have ids and places of their own."""
    text = render(ON).find("ConfigMap", "deltashard-dashboard")["data"]["deltashard.json"]
    dashboard = json.loads(text)
    assert dashboard == json.loads((CHART / "dashboards" / "deltashard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
