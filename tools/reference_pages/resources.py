"""The page on the custom resources, and the annotations of a workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from deltashard_operator import api
from deltashard_operator.api import workload_policy
from deltashard_operator.api.annotation import KEYS
from deltashard_operator.kube.cluster_name import CHECKPOINT_TIME, INJECTED

from tools.reference_pages.markdown import document, head, section, sentence, table

Schema = Mapping[str, Any]
API = Path(api.__file__).parent
BUILTIN: Schema = workload_policy._BUILTIN  # noqa: SLF001
DEFAULTS = {**BUILTIN, "sidecar": {**BUILTIN["sidecar"], "resources": workload_policy._RESOURCES}}  # noqa: SLF001
NO_BOUND = 1099511627776
"""A maximum that ends here is none for users."""
ABOUT_DEFAULTS = """
A field that a policy omits comes from the chart's `defaultPolicy`, else from the column *default*. If `interval` of
`defaultPolicy` has none of `every`, `everySteps` and `goal`, its goal is `Auto`.
"""


def page() -> str:
    return document(_lines())


def _lines() -> Iterator[str]:
    yield from head(
        "Custom resources and annotations",
        "For engineers who write manifests of policies and workloads, and read the status of runs.",
        "operator/deltashard_operator/api",
    )
    yield from section(
        "## Annotations",
        """
        Set these annotations on a [workload](../kubernetes/workloads.md), its pod template, or both with equal
        values. `deltashard.io/policy` enables checkpoints; the others need it, and override the field of the
        policy. The webhook rejects unknown keys and invalid values.
        """,
    )
    rows = [
        (f"`{key}`", sentence(accepted), f"`{field}`" if field.startswith("spec.") else "")
        for key, (field, _, accepted) in KEYS.items()
    ]
    yield from table(("annotation", "value", "overrides"), rows)
    yield from section("### Written by deltashard")
    marker = "On injected templates and pods: the version of the webhook that injected the sidecar."
    commit = "On pods, if the chart enables it: the commit time of the run's newest checkpoint."
    yield from table(("annotation", "meaning"), [(f"`{INJECTED}`", marker), (f"`{CHECKPOINT_TIME}`", commit)])
    yield from _kinds("policy", DEFAULTS, ABOUT_DEFAULTS)
    yield from _kinds("request", {})
    yield from _kinds("run", {})


def _kinds(source: str, defaults: Schema, about_defaults: str = "") -> Iterator[str]:
    schema = yaml.safe_load((API / f"{source}.yaml").read_text(encoding="utf-8"))
    kinds = schema["kinds"]
    yield from section(f"## {' and '.join(each['kind'] for each in kinds)}")
    rows = [(f"`{each['kind']}`", f"`{each['short']}`", each["scope"], each["description"]) for each in kinds]
    yield from table(("kind", "short name", "scope", "meaning"), rows)
    spec, status = schema["spec"], schema["status"]
    yield from section(f"### {kinds[0]['kind']}: spec", spec.get("description", "") + about_defaults)
    yield from table(("field", "type", "default", "meaning"), _fields(spec, defaults))
    yield from section(f"### {kinds[0]['kind']}: status", status["description"])
    rows = [(field, kind, meaning) for field, kind, _, meaning in _fields(status, {})]
    yield from table(("field", "type", "meaning"), rows)


def _fields(schema: Schema, defaults: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield the fields of an object, each with its own fields after it."""
    for name, field in schema["properties"].items():
        default = field.get("default", defaults.get(name) if isinstance(defaults, Mapping) else None)
        plain = str(default).lower() if isinstance(default, bool) else default
        shown = "" if isinstance(default, (Mapping, tuple)) or default in {None, ""} else f"`{plain}`"
        if "enum" in field and default not in field["enum"]:
            shown = ""
        if name in schema.get("required", ()):
            shown = "required"
        meaning = sentence(field.get("description") or field.get("accepts", ""))
        if rules := field.get("rules"):
            meaning += f"\n*Errors:* {'; '.join(rule['message'] for rule in rules)}."
        path, inner = f"{prefix}{name}", field
        if meaning or shown or "properties" not in field:
            yield f"`{path}`", _type(field), shown, meaning
        if "items" in field:
            path, inner = f"{path}[]", field["items"]
        if "properties" in inner:
            yield from _fields(inner, default, f"{path}.")


def _type(field: Schema) -> str:
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    kind = str(field.get("format", field.get("type")))
    low, high = (field.get(f"{word}imum", field.get(word)) for word in ("min", "max"))
    if low in {None, 0}:
        return kind if high in {None, NO_BOUND} else f"{kind} to {high}"
    return f"{kind}, {low} or more" if high in {None, NO_BOUND} else f"{kind}, {low} to {high}"
