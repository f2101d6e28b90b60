"""Alerts and dashboard queries, evaluated by Prometheus' own engine over metrics that the code exports."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from deltashard_operator.admission.metric import WebhookMetrics
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet.metric import FleetMetrics
from deltashard_operator.kube.cluster_name import MANAGED_BY, MANAGED_BY_VALUE, METRICS_PORT_NAME
from deltashard_operator.run.condition import Condition
from deltashard_operator.tls.authority import Authority
from deltashard_operator.tls.certificate import Certificate
from deltashard_sidecar.telemetry.metric import Metrics
from prometheus_client.registry import Collector

from tests.integration.charts.promql import Samples, evaluate, evaluate_rules
from tests.support.helm import CHART, render
from tests.support.operator.full_run import NOW_S as FULL_S
from tests.support.operator.full_run import full_run
from tests.support.server.minio_server import ROOT

ON = {
    "monitoring": {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "rules", "dashboard")}
}
RUN_NAME = "train"
"""The only run that the dashboard shows."""


def rules() -> list[dict[str, Any]]:
    groups = render(ON).find("PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """Return alerts by name without the `Deltashard` prefix."""
    return {rule["alert"].removeprefix("Deltashard"): rule for rule in rules() if "alert" in rule}


def records() -> list[tuple[str, str]]:
    """Return (name, expression) of each recording rule."""
    return [(rule["record"], rule["expr"]) for rule in rules() if "record" in rule]


def queries() -> list[str]:
    dashboard = json.loads((CHART / "dashboards" / "deltashard.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    for variable in dashboard["templating"]["list"]:
        match = (
            re.fullmatch(r"label_values\((.+), \w+\)", variable["query"].get("query", ""))
            if isinstance(variable["query"], dict)
            else None
        )
        found += [match[1]] if match else []
    values = {"$__rate_interval": "5m", "$namespace": ".*", "$run": RUN_NAME}
    filled = [
        functools.reduce(lambda text, name: text.replace(name, values[name]), values, each) for each in found
    ]
    assert not [each for each in filled if "$" in each]
    return filled


RUNBOOKS = ROOT / "docs" / "kubernetes" / "runbooks"
FOREIGN = {"apiserver_admission_webhook_rejection_count"}
"""Metrics of the API server. `test_webhook` tests that they exist with these labels."""
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def exported(collector: Collector) -> Iterator[str]:
    for family in collector.collect():
        for suffix in SUFFIXES[family.type]:
            yield family.name + suffix


def all_series() -> Iterator[str]:
    controller = ControllerMetrics()
    stale = Condition(type="Stale", status="True", reason="Stale", message="m", since_s=1.0)
    controller.register_runs(lambda: (replace(full_run(), conditions=(stale,)),))
    FleetMetrics(controller.registry)
    Authority(Mock(), "n", controller.registry)
    webhook = WebhookMetrics()
    for server, registry in (("fleet", controller.registry), ("webhook", webhook.registry)):
        Certificate(ROOT, server, registry)
    sidecar = Metrics()
    sidecar.has_rank0 = True
    for collector in (sidecar, webhook.registry, controller.registry):
        yield from exported(collector)


EXPORTED_SERIES = set(all_series())


def test_alerts_and_panels_use_exported_metrics() -> None:
    """Each expression parses and uses deltashard's metrics or known API server metrics only."""
    expressions = [rule["expr"] for rule in rules()] + queries()
    names = {name for name, _ in records()}
    assert len(names) == len(records())
    assert len(expressions) > 60
    for expression, answer in zip(expressions, evaluate(expressions), strict=True):
        assert answer.error == "", expression
        assert answer.metrics, expression
        assert set(answer.metrics) <= EXPORTED_SERIES | FOREIGN | names, expression


def gauge_series(value: float, *, until_s: int = 3600) -> list[tuple[float, float]]:
    return [(float(at), value) for at in range(0, until_s + 1, 30)]


def counter_series(*, begins_s: int, times: int = 60) -> list[tuple[float, float]]:
    """Return a counter that is absent before its first event and then counts one event each minute, read every 30 s."""
    risen = rising_counter(begins_s=begins_s - 60)
    return [(at, min(value, float(times))) for at, value in risen if value]


def rising_counter(
    *, begins_s: int, each: float = 1.0, until_s: int = 3600, every_s: int = 60
) -> list[tuple[float, float]]:
    """Return a counter that rises by `each` every `every_s` from a given time on, read every 30 s."""
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
AUTHORITY = 'deltashard_authority_not_after_timestamp_seconds{namespace="deltashard-system"}'
RECLAIMS = 'deltashard_controller_reclaims_total{outcome="%s"}'
SERVING = 'deltashard_fleet_serving{pod="deltashard-controller-%s"}'
REPORTS = 'deltashard_fleet_reports_total{outcome="%s"}'
NUDGES = 'deltashard_fleet_nudges_total{outcome="%s"}'
HOUR = 3600
DAY = 86400

COMMITTED, BEGUN, NEVER = {LAST: gauge_series(1.0)}, {SINCE: gauge_series(0.5)}, {INTERVAL: gauge_series(0)}
EVERY_5_MIN = {INTERVAL: gauge_series(300)}
JUST_STARTED = {SINCE: gauge_series(HOUR - 60)}
FAILS = {FAILURES % "unavailable": counter_series(begins_s=2400)}
SAVES_FAIL, STALE_RUN = {CONDITION % "SavesFailing": gauge_series(1)}, {CONDITION % "Stale": gauge_series(1)}
LASTING = {NOT_AFTER % "webhook": gauge_series(HOUR + 80 * DAY)}
SENT, UNSENT = NUDGES % "sent", NUDGES % "failed"

CASES: list[tuple[str, str, Samples, bool]] = [
    ("CheckpointStale", "a commit an hour ago", COMMITTED | BEGUN | EVERY_5_MIN, True),
    ("CheckpointStale", "10 min ago", {LAST: gauge_series(HOUR - 600)} | BEGUN | EVERY_5_MIN, False),
    ("CheckpointStale", "every half an hour", COMMITTED | BEGUN | {INTERVAL: gauge_series(1800)}, False),
    ("CheckpointStale", "never committed", BEGUN | EVERY_5_MIN, True),
    ("CheckpointStale", "never committed, new", JUST_STARTED | EVERY_5_MIN, False),
    ("CheckpointStale", "continued after a long pause", COMMITTED | JUST_STARTED | EVERY_5_MIN, False),
    ("CheckpointStale", "suspended", COMMITTED | EVERY_5_MIN, False),
    ("CheckpointStale", "no timer", COMMITTED | BEGUN | NEVER, False),
    ("SavesFailing", "the controller and the pod report failures: one alert", SAVES_FAIL | FAILS, True),
    ("SavesFailing", "only the controller reports failures", SAVES_FAIL, True),
    ("SavesFailing", "another condition", STALE_RUN, False),
    ("SavesFailing", "every save fails", FAILS, True),
    (
        "SavesFailing",
        "four failed, with no earlier sample",
        {FAILURES % "full": counter_series(begins_s=3000, times=4)},
        True,
    ),
    ("SavesFailing", "some fail, some commit", FAILS | {COMMITS: counter_series(begins_s=2400)}, False),
    ("SavesFailing", "one failed", {FAILURES % "unavailable": counter_series(begins_s=3500)}, False),
    (
        "SavesFailing",
        "fenced: another pod trains",
        {FAILURES % "fenced": counter_series(begins_s=2400)},
        False,
    ),
    ("RestoresFallingBack", "one fell back", {CONDITION % "FellBack": gauge_series(1)}, True),
    ("RestoresFallingBack", "other conditions", STALE_RUN, False),
    ("TrackingFault", "one", {CONDITION % "TrackingFault": gauge_series(1)}, True),
    ("TrackingFault", "other conditions", STALE_RUN, False),
    ("StuckOnLostNode", "one run", {CONDITION % "StuckOnLostNode": gauge_series(1)}, True),
    ("StuckOnLostNode", "other conditions", STALE_RUN, False),
    (
        "WebhookErrors",
        "no replica",
        {REJECTED % "calling_webhook_error": rising_counter(begins_s=3300)},
        True,
    ),
    ("WebhookErrors", "refusals", {REJECTED % "no_error": rising_counter(begins_s=3300)}, False),
    ("WebhookErrors", "failed admissions", {ADMITTED % "failed": rising_counter(begins_s=3300)}, True),
    (
        "WebhookErrors",
        "a wrong annotation is refused",
        {ADMITTED % "BadAnnotation": rising_counter(begins_s=3300)},
        False,
    ),
    ("CertificateNearExpiry", "of the webhook", {NOT_AFTER % "webhook": gauge_series(HOUR + 13 * DAY)}, True),
    (
        "CertificateNearExpiry",
        "one of two is near expiry",
        LASTING | {NOT_AFTER % "fleet": gauge_series(HOUR + DAY)},
        True,
    ),
    ("CertificateNearExpiry", "of the authority", {AUTHORITY: gauge_series(HOUR + 80 * DAY)}, True),
    ("CertificateNearExpiry", "in 15 days", {NOT_AFTER % "webhook": gauge_series(HOUR + 15 * DAY)}, False),
    ("CertificateNearExpiry", "no certificate is loaded", {NOT_AFTER % "webhook": gauge_series(0)}, False),
    ("ReclaimFailing", "one failed", {RECLAIMS % "failed": rising_counter(begins_s=3000, every_s=500)}, True),
    ("ReclaimFailing", "runs are removed", {RECLAIMS % "removed": rising_counter(begins_s=3000)}, False),
    (
        "ReclaimFailing",
        "runs are kept for a reason",
        {RECLAIMS % "kept": rising_counter(begins_s=3000)},
        False,
    ),
    ("ControllerDown", "no replica", {}, True),
    ("ControllerDown", "none leads", {SERVING % "a": gauge_series(0), SERVING % "b": gauge_series(0)}, True),
    ("ControllerDown", "one leads", {SERVING % "a": gauge_series(0), SERVING % "b": gauge_series(1)}, False),
    (
        "ReportsRefused",
        "permanently",
        {REPORTS % "unsupported_protocol": rising_counter(begins_s=0, every_s=300)},
        True,
    ),
    ("ReportsRefused", "by a standby", {REPORTS % "not_leading": rising_counter(begins_s=0)}, False),
    (
        "ReportsRefused",
        "of a deleted pod",
        {REPORTS % "wrong_pod": rising_counter(begins_s=0, every_s=3300)},
        False,
    ),
    (
        "NudgesFailing",
        "most",
        {UNSENT: rising_counter(begins_s=0), SENT: rising_counter(begins_s=2700)},
        True,
    ),
    (
        "NudgesFailing",
        "some",
        {SENT: rising_counter(begins_s=0), UNSENT: rising_counter(begins_s=2700)},
        False,
    ),
    ("NudgesFailing", "none sent", {SENT: gauge_series(0), UNSENT: gauge_series(0)}, False),
]


@pytest.mark.parametrize(
    ("alert", "situation", "series", "fires"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_alert_fires_when_expected(alert: str, situation: str, series: Samples, fires: bool) -> None:
    """Each alert fires once, one hour after the start."""
    rule = alerts()[alert]
    (answer,) = evaluate([rule["expr"]], series, at_s=HOUR)
    assert answer.error == ""
    assert len(answer.result) == fires, (situation, answer)
    text = json.dumps(rule["annotations"])
    either = re.findall(r"\{\{ or \$labels\.(\w+) \$labels\.(\w+) \}\}", text)
    used = set(re.findall(r"\{\{ \$labels\.(\w+)", text))
    for labels, _ in answer.result:  # with the labels that the texts use
        assert used <= set(labels)
        assert all(set(pair) & set(labels) for pair in either)


OTHER = RUN.replace("train", "other")
PHASE = 'deltashard_run_phase{namespace="team-a",run="train",phase="%s"}'
TRAINED = f"deltashard_run_trained_seconds_total{RUN}"
STEP = 'deltashard_trainer_step{namespace="team-a",pod="train-%d",run="team-a/train",rank="%d"}'
EVERY_S = 240


def sampled(value: Callable[[float], float | None]) -> list[tuple[float, float]]:
    """Sample a function of time for a day. None means that there is no sample."""
    points = ((float(at), value(at)) for at in range(0, DAY + 1, EVERY_S))
    return [(at, found) for at, found in points if found is not None]


def constant(value: float) -> list[tuple[float, float]]:
    return sampled(lambda _: value)


def phases(lost_from_s: float, lost_until_s: float) -> Samples:
    def recovers(at_s: float) -> bool:
        return lost_from_s <= at_s < lost_until_s

    return {
        PHASE % "Training": sampled(lambda at: None if recovers(at) else 1.0),
        PHASE % "Recovering": sampled(lambda at: 1.0 if recovers(at) else None),
        TRAINED: sampled(lambda at: at - max(0.0, min(at, lost_until_s) - lost_from_s)),
    }


def lost_steps(steps: float, *, from_s: float) -> Samples:
    """Return the counter of steps trained again and the duration of one step."""
    return {
        f"deltashard_run_lost_steps_total{RUN}": sampled(lambda at: steps if at >= from_s else 0.0),
        f"deltashard_run_step_seconds{RUN}": constant(2.0),
    }


RETRAINED = lost_steps(0.1 * 0.75 * DAY / 2, from_s=DAY / 2)
"""A tenth of the steps of three quarters of a day."""
RECOVERY = phases(0.25 * DAY, 0.5 * DAY)
SAVING = {f"deltashard_run_save_cost_seconds{RUN}": constant(3.0), INTERVAL: constant(300)}
FRESH = {LAST: sampled(lambda at: at - at % 300), SINCE: constant(0.0), INTERVAL: constant(300)}
STALE = FRESH | {LAST: sampled(lambda at: min(at, DAY / 2) - min(at, DAY / 2) % 300)}
STEPPED = {
    f"deltashard_run_save_cost_seconds{RUN}": constant(1.0),
    INTERVAL: constant(0),
    LAST: sampled(lambda at: at - at % 1200),
    TRAINED: sampled(lambda at: at),
}
OTHER_RUN = {
    f"deltashard_run_trained_seconds_total{OTHER}": sampled(lambda at: at / 3),
    'deltashard_run_phase{namespace="team-a",run="other",phase="Training"}': constant(1.0),
}
"""A second run, a third as long and without lost steps."""

RECORDS: list[tuple[str, str, Samples, float | None]] = [
    ("run_step_skew:steps", "two pods", {STEP % (0, 0): constant(12), STEP % (1, 8): constant(9)}, 3.0),
    ("run_step_skew:steps", "one restores", {STEP % (0, 0): constant(12), STEP % (1, 8): constant(0)}, 0.0),
    ("run_step_skew:steps", "none trains", {STEP % (0, 0): constant(0)}, None),
    (
        "run_slowest_rank:step",
        "one is behind",
        {STEP % (0, 0): constant(12), STEP % (1, 8): constant(9)},
        9.0,
    ),
    ("run_slowest_rank:step", "1 step", {STEP % (0, 0): constant(12), STEP % (1, 8): constant(11)}, None),
    ("pod_saves_failed:increase1d", "some", {FAILURES % "full": sampled(lambda at: at // 900)}, DAY / 900),
    ("pod_saves_failed:increase1d", "fenced", {FAILURES % "fenced": sampled(lambda at: at)}, None),
    ("run_checkpoint_fresh:bool", "young", FRESH, 1.0),
    ("run_checkpoint_fresh:bool", "old", STALE, 0.0),
    ("run_checkpoint_fresh:bool", "by steps alone", FRESH | {INTERVAL: constant(0)}, None),
    ("run_checkpoint_fresh:bool", "does not train", {LAST: constant(1.0), INTERVAL: constant(300)}, None),
    ("run_checkpoint_available:ratio1d", "all day", FRESH, 1.0),
    ("run_checkpoint_available:ratio1d", "until noon", STALE, 23 / 47),
    ("run_trained_seconds:increase1d", "three quarters", RECOVERY, 0.75 * DAY),
    ("run_trained_seconds:increase1d", "no run", {}, None),
    ("run_recovering:ratio1d", "a quarter", RECOVERY, 0.25),
    ("run_recovering:ratio1d", "never", phases(DAY, DAY), 0.0),
    ("run_recovering:ratio1d", "waits to be scheduled", {PHASE % "Pending": constant(1.0)}, None),
    ("run_retrained:ratio1d", "a tenth", RECOVERY | RETRAINED, 0.1),
    ("run_retrained:ratio1d", "more than all", RECOVERY | lost_steps(1e9, from_s=DAY / 2), 1.0),
    ("run_retrained:ratio1d", "a step is not measured", RECOVERY, None),
    ("run_lost_to_failures:ratio1d", "both", RECOVERY | RETRAINED, 0.25 + 0.75 * 0.1),
    ("run_lost_to_failures:ratio1d", "recovery alone", RECOVERY, 0.25),
    ("run_lost_to_failures:ratio1d", "none", phases(DAY, DAY), 0.0),
    ("run_lost_to_saves:ratio", "3 s of 300", SAVING, 0.01),
    ("run_lost_to_saves:ratio", "1 s of 1200, by steps", STEPPED, 1 / 1200),
    ("run_lost_to_saves:ratio", "not measured", {INTERVAL: constant(300)}, None),
    ("run_lost_to_saves:ratio1d", "all day", SAVING, 0.01),
    ("run_lost_to_saves:ratio1d", "not measured", {INTERVAL: constant(300)}, None),
    ("fleet_lost_to_failures:ratio1d", "one run", RECOVERY | RETRAINED, 0.325),
    (
        "fleet_lost_to_failures:ratio1d",
        "of two",
        RECOVERY | RETRAINED | OTHER_RUN,
        0.325 * 0.75 / (0.75 + 1 / 3),
    ),
    ("fleet_lost_to_failures:ratio1d", "no run", {}, None),
    ("fleet_lost_to_saves:ratio1d", "one of two runs is measured", SAVING | RECOVERY | OTHER_RUN, 0.01),
    ("fleet_lost_to_saves:ratio1d", "no run", {}, None),
    ("fleet_checkpoint_available:ratio1d", "until noon", STALE | phases(DAY, DAY), 23 / 47),
    ("fleet_checkpoint_available:ratio1d", "no run", {}, None),
]


def test_recording_rules_are_documented() -> None:
    page = (ROOT / "docs" / "kubernetes" / "installing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(deltashard:\w+:\w+)`", page)) == {name for name, _ in records()}


@pytest.mark.parametrize(
    ("name", "situation", "series", "wanted"), RECORDS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_recording_rule_values(name: str, situation: str, series: Samples, wanted: float | None) -> None:
    """Prometheus' engine evaluates a day. Rules that read other rules get their recorded values."""
    needed = [(record, expression) for record, expression in records()]
    last = next(at for at, (record, _) in enumerate(needed) if record == f"deltashard:{name}")
    times = [float(at) for at in range(HOUR, DAY + 1, HOUR // 2)]
    found = evaluate_rules(needed[: last + 1], series, times)
    ends = [
        points[-1][1]
        for key, points in found.items()
        if key.startswith(f"deltashard:{name}{{") and points[-1][0] == DAY and "other" not in key
    ]
    if wanted is None:
        assert ends == [], situation
    else:
        assert ends == [pytest.approx(wanted, rel=0.03, abs=1e-9)], situation


def test_controller_restart_keeps_time_shares() -> None:
    """After a restart the series have another pod's labels and continue with the counts."""
    whole = RECOVERY | RETRAINED

    def of_pod(name: str, key: str) -> str:
        return key.replace("{", f'{{pod="{name}",')

    cut = 0.6 * DAY
    split = {of_pod("a", key): [each for each in points if each[0] < cut] for key, points in whole.items()}
    split |= {of_pod("b", key): [each for each in points if each[0] >= cut] for key, points in whole.items()}
    name = "deltashard:run_lost_to_failures:ratio1d"
    upto = [name for name, _ in records()].index(name) + 1
    shares = []
    for series in (whole, {key: points for key, points in split.items() if points}):
        found = evaluate_rules(records()[:upto], series, [float(DAY)])
        ((_, points),) = [each for each in found.items() if each[0].startswith(name)]
        shares.append(points[-1][1])
    assert shares[0] == pytest.approx(shares[1], rel=0.01)


def test_alerts_and_runbooks_match() -> None:
    """Each alert has a page that describes its meaning, impact, diagnosis and remedy."""
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    assert {f"{name}.md" for name in alerts()} == pages
    assert set(alerts()) == {alert for alert, *_ in CASES}, "each alert has a case"
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    known = schema["properties"]["monitoring"]["properties"]["rules"]["properties"]["alerts"]["propertyNames"]
    assert [rule["alert"] for rule in alerts().values()] == known["enum"]
    for name, rule in alerts().items():
        assert rule["alert"] == f"Deltashard{name}"
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/kubernetes/runbooks/{name}.md")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
        assert re.findall(r"^#+ (.*)$", text, re.MULTILINE) == [
            rule["alert"],
            "Meaning",
            "Impact",
            "Diagnosis",
            "Remedy",
        ]
        assert "```" in text.partition("## Diagnosis")[2].partition("## Remedy")[0]


def test_runbook_metrics_exist() -> None:
    named = re.compile(r"\bdeltashard_[a-z_]+\b")
    for path in RUNBOOKS.glob("*.md"):
        for name in named.findall(path.read_text(encoding="utf-8")):
            assert {name, f"{name}_count"} & EXPORTED_SERIES, (
                path.name,
                name,
            )  # a histogram is documented by its base name


def test_monitors_select_injected_sidecars() -> None:
    """The sidecar's port and label have names that never change."""
    spec = render(ON).find("PodMonitor")["spec"]
    assert spec["selector"]["matchLabels"] == {MANAGED_BY: MANAGED_BY_VALUE}
    assert [each["port"] for each in spec["podMetricsEndpoints"]] == [METRICS_PORT_NAME]


ABSENT = {
    "max by (condition) (deltashard_run_condition": "no condition is set",
    "count(max by (namespace, run) (deltashard_run_condition": "",
    "bottomk(": "a fresh checkpoint always existed",
    "deltashard_node_failures_total": "no node failed since the controller started",
    "sum by (condition) (deltashard_run_condition": "no condition is set",
}
"""Prefixes of queries that correctly return no data, with the reason. With an empty reason they return data."""


def scraped() -> Samples:
    """Scrape a controller for an hour. Its run has a value for every metric, and its counters rise."""
    controller = ControllerMetrics()
    FleetMetrics(controller.registry)
    controller.register_runs(lambda: (full_run(),))
    found: Samples = {}
    for family in controller.registry.collect():
        for sample in family.samples:
            rises = family.type in {"counter", "histogram"} and not sample.name.endswith("_created")
            labels = "".join(f"{key}={json.dumps(value)}," for key, value in sample.labels.items())
            begins = sample.value + HOUR - FULL_S if "timestamp" in sample.name else sample.value
            points = [(float(at), begins + (at / 60 if rises else 0)) for at in range(0, HOUR + 1, 60)]
            found[f'{sample.name}{{{labels}pod="controller"}}'] = points
    return found


def test_run_and_controller_panels_return_data() -> None:
    """The list of queries without data is complete and has a reason for each."""
    filled = evaluate_rules(records(), scraped(), [HOUR - 60.0, float(HOUR)])
    there = {each.partition("{")[0] for each in filled} | {"deltashard_run_condition"}
    asked = 0
    for query, answer in zip(queries(), evaluate(queries(), filled, at_s=HOUR), strict=True):
        assert answer.error == "", query
        if set(answer.metrics) <= there:  # and does not scrape sidecars or the webhook
            asked += 1
            empty = [why for begin, why in ABSENT.items() if begin in query]
            assert bool(answer.result) != bool(empty and empty[0]), query
    assert asked >= 30
