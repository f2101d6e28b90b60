"""Paths of chart values and their places in a rendering, in the notation of value_cases.yaml."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.support.helm import CHART, Document, Rendering

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

WHOLE = {"resources", "labels", "annotations", "apiServerPorts"}
"""Values that are set as a whole."""


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the paths `a.b.c` of all values that a user may set."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(*many: Mapping[str, Any]) -> dict[str, Any]:
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


def _found(value: Any, path: list[str]) -> list[Any]:
    """Return the values at a path. A `*` in the path may match several."""
    if not path or value is None:
        return [value]
    key, rest = path[0], path[1:]
    if key == "#":
        return [len(value)]
    if key == "base64":
        return [base64.b64decode(value).decode()]
    if isinstance(value, dict):
        return _found(value.get(key.replace("|", ".")), rest)
    if key == "*":
        return [one for each in value for one in _found(each, rest)]
    if key.startswith("--"):
        texts = [each.partition("=")[2] for each in value if each.startswith(f"{key}=")]
        return [yaml.safe_load(texts[0]) if texts else None]
    if key.isdigit():
        return _found(value[int(key)] if int(key) < len(value) else None, rest)
    named = (each for each in value if key in (each.get("name"), each.get("alert")))
    return _found(next(named, None), rest)


def values_at(rendering: Rendering, place: str) -> list[Any]:
    where, _, path = place.partition(" ")
    kind, _, name = where.partition("/")
    documents: list[Any] = [
        each
        for each in rendering.documents
        if each["kind"] == kind and name in ("*", each["metadata"]["name"])
    ]
    if where == "pods":
        documents = pod_specs(rendering)
    elif where == "policy":
        documents = [policy(rendering)]
    elif where == "all":
        documents = [each for each in rendering.documents if each["kind"] != "CustomResourceDefinition"]
    elif not name:
        documents = [rendering.find("Deployment", f"deltashard-{where}")["spec"]["template"]]
        path = path.replace("container.", "spec.containers.0.")
    if path == "#":
        return [len(documents)]
    return [one for each in documents for one in _found(each, path.split("."))]


def pod_specs(rendering: Rendering) -> list[Document]:
    made = [values_at(rendering, f"{component} spec")[0] for component in ("webhook", "controller")]
    return [*made, rendering.find("Pod", "deltashard-test", hook=True)["spec"]]


def policy(rendering: Rendering) -> Any:
    return yaml.safe_load(rendering.find("ConfigMap", "deltashard-default-policy")["data"]["policy.yaml"])
