"""Every value of values.yaml changes the rendering as its comment describes. Each value needs a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.charts.value import VALUES, default, leaves, merged, nested, values_at
from tests.support.helm import CHART, Rendering, render

Case = dict[str, Any]
TABLE = yaml.safe_load(Path(__file__).with_name("value_cases.yaml").read_text(encoding="utf-8"))


def cases() -> dict[str, Case]:
    """Return cases by value path. Values that both components share occur twice."""
    found: dict[str, Case] = {}
    for path, case in TABLE["values"].items():
        head, _, rest = path.partition(".")
        for component in ("webhook", "controller") if head == "both" else (head,):
            own = json.loads(json.dumps(case).replace("<it>", component)) if head == "both" else case
            found[f"{component}.{rest}" if rest else component] = own
    return found


CASES = cases()


def prerequisites(path: str) -> dict[str, Any]:
    more: Case = next((values for begins, values in TABLE["given"].items() if path.startswith(begins)), {})
    together = {name: value for name, value in more.items() if name != path} | CASES[path].get("given", {})
    return merged(*(nested(*each) for each in together.items()))


def contains(shown: Any, value: Any) -> bool:
    """Return whether the expected value is contained, entry by entry in maps and item by item in lists."""
    if isinstance(value, dict) and isinstance(shown, dict):
        return all(contains(shown.get(key), each) for key, each in value.items())
    if isinstance(value, list) and isinstance(shown, list):
        return all(each in shown for each in value)
    if isinstance(value, list) and isinstance(shown, str):
        return shown == ",".join(value)
    return bool(shown == value)


def test_every_value_has_a_case() -> None:
    """No case exists for a removed value."""
    assert sorted(CASES) == sorted(leaves(VALUES))


@pytest.mark.parametrize("path", [path for path, case in CASES.items() if "at" in case])
def test_value_is_rendered(path: str) -> None:
    """The default at this place is the documented one."""
    value, place, begun = CASES[path]["set"], CASES[path]["at"], default(path)
    before, after = (
        values_at(render(merged(prerequisites(path), more)), place) for more in ({}, nested(path, value))
    )
    if "*" in place.partition(" ")[2]:  # one list of all namespaces
        before, after = ([each] if isinstance(value, list) else each for each in (before, after))
    assert not any(contains(shown, value) for shown in before)
    assert begun in ("", 0, [], {}) or all(contains(shown, begun) for shown in before)
    wanted = merged(begun, value) if isinstance(value, dict) else value
    assert after
    assert all(contains(shown, wanted) for shown in after), (after, wanted)


@pytest.mark.parametrize("path", [path for path, case in CASES.items() if "switches" in case])
def test_switch_toggles_named_objects(path: str) -> None:
    """No other object of the kind exists without the switch."""
    kind, _, name = CASES[path]["switches"].partition("/")
    named = nested(CASES[path]["named"], name) if "named" in CASES[path] else {}
    without, there = (
        render(merged(prerequisites(path), named, nested(path, on))).all(kind, name or None)
        for on in (False, True)
    )
    assert not without
    assert there


@pytest.mark.parametrize("path", [path for path, case in CASES.items() if "changes" in case])
def test_value_is_rendered_in_special_form(path: str) -> None:
    rendered = (
        render(prerequisites(path)),
        render(merged(prerequisites(path), nested(path, CASES[path]["set"]))),
    )
    for place, wanted in CASES[path]["changes"].items():
        assert_rendered(rendered[0], place, wanted[0])
        assert_rendered(rendered[1], place, wanted[1])


def assert_rendered(rendering: Rendering, place: str, wanted: Any) -> None:
    found = values_at(rendering, place)
    if isinstance(wanted, str) and wanted.startswith("..."):
        assert found
        assert all(wanted[3:] in each for each in found), (place, found)
    else:
        alike = [each for number, each in enumerate(found) if each not in found[:number]]
        assert (alike[0] if len(alike) == 1 else alike or None) == wanted, place


def test_controller_surges_before_old_pod_stops() -> None:
    """A new replica is ready without the Lease, so Helm waits for it. The old one then releases the Lease."""
    for replicas in (1, 2):
        found = values_at(
            render({"controller": {"replicas": replicas}}), "Deployment/deltashard-controller spec.strategy"
        )
        assert found == [{"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}]


def test_all_templates_are_rendered() -> None:
    """Hooks of the uninstall render on a cluster only."""
    some = [*TABLE["given"].values(), {"extraObjects": TABLE["values"]["extraObjects"]["set"]}]
    seen = frozenset[str]().union(
        *(render(merged(*(nested(*one) for one in each.items()))).sources for each in some)
    )
    written = {
        str(path.relative_to(CHART)) for path in (CHART / "templates").rglob("*") if path.suffix == ".yaml"
    }
    assert seen == written - {"templates/webhook/uninstall.yaml"}
