"""What the chart asks of Prometheus: alerts, recording rules, and the dashboard's queries."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from tests.support.helm import CHART, render

ON = {
    "monitoring": {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "rules", "dashboard")}
}
RUN_NAME = "train"
"""The run that the dashboard shows alone."""


def rules() -> list[dict[str, Any]]:
    """All rules, in the order in which they are evaluated."""
    groups = render(ON).find("PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """By name without the prefix, which keeps them apart from others' in one Alertmanager."""
    return {rule["alert"].removeprefix("Deltashard"): rule for rule in rules() if "alert" in rule}


def records() -> list[tuple[str, str]]:
    """(name, expression) of what is recorded."""
    return [(rule["record"], rule["expr"]) for rule in rules() if "record" in rule]


def queries() -> list[str]:
    """All expressions of the dashboard, with Grafana's variables filled in."""
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
