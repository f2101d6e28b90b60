"""Values of the chart: their paths, and what stands where in a rendering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from tests.support.helm import CHART, Document, Rendering

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

WHOLE = {"resources", "labels", "annotations", "apiServerPorts"}
"""Values that are set as a whole."""


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all values that a user may set, `a.b.c`."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(*many: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm does it."""
    result: dict[str, Any] = {}
    for values in many:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def default(path: str) -> Any:
    value: Any = VALUES
    for key in path.split("."):
        value = value[key]
    return value


def found(value: Any, path: list[str]) -> Any:
    """What is at a place: keys, indexes, names of list items, `*` for all items, `--flag` for an argument's value."""
    if not path or value is None:
        return value
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        return found(value.get(key.replace("|", ".")), rest)
    if key == "*":
        return [found(each, rest) for each in value]
    if key.startswith("--"):
        texts = [each.partition("=")[2] for each in value if each.startswith(f"{key}=")]
        return yaml.safe_load(texts[0]) if texts else None
    if key.isdigit():
        return found(value[int(key)], rest)
    return found(next((each for each in value if each.get("name") == key), None), rest)


def at(place: str) -> Callable[[Rendering], list[Any]]:
    """What stands at `Kind/name path.to.it` in each such object (`*`: any name); `webhook` and so on are pods."""
    where, _, path = place.partition(" ")
    kind, _, name = where.partition("/")

    def look(rendering: Rendering) -> list[Any]:
        if where == "pods":
            return [found(each, path.split(".")) for each in pod_specs(rendering)]
        if not name:
            template = rendering.find("Deployment", f"deltashard-{where}")["spec"]["template"]
            return [found(template, path.replace("container.", "spec.containers.0.").split("."))]
        objects = rendering.all(kind, None if name == "*" else name)
        assert objects, place
        return [found(each, path.split(".")) for each in objects]

    return look


def chart_test_pod(rendering: Rendering) -> Document:
    return rendering.find("Pod", "deltashard-test", hook=True)


def pod_specs(rendering: Rendering) -> list[Document]:
    """Of all pods of the chart."""
    made = [at(f"{component} spec")(rendering)[0] for component in ("webhook", "controller")]
    return [*made, chart_test_pod(rendering)["spec"]]


def policy(rendering: Rendering) -> Any:
    return yaml.safe_load(rendering.find("ConfigMap", "deltashard-default-policy")["data"]["policy.yaml"])
