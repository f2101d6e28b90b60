"""Validation against policy.yaml, for specs that the API server has not validated.

These are the chart's default policy, objects accepted by an older definition, and the result of merging a policy with
the default. All rules except those in CEL are checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from deltashard_operator.api import duration
from deltashard_operator.kube import quantity

Schema = Mapping[str, Any]
POLICY: Schema = yaml.safe_load(Path(__file__).with_name("policy.yaml").read_text(encoding="utf-8"))["spec"]
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "duration": (str,),
    "integer": (int,),
    "quantity": (int, float, str),
}
_AMOUNTS: Mapping[str, Callable[[Any], Any]] = {"duration": duration.seconds_of, "quantity": quantity.parse}


def _matches(text: str, pattern: str) -> bool:
    return re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None


_KEYWORDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, words: value in words,
    "pattern": _matches,
    "minimum": lambda value, n: value >= n,
    "maximum": lambda value, n: value <= n,
    "minLength": lambda value, n: len(value) >= n,
    "maxLength": lambda value, n: len(value) <= n,
    "minItems": lambda value, n: len(value) >= n,
    "maxItems": lambda value, n: len(value) <= n,
    "maxProperties": lambda value, n: len(value) <= n,
    "names": lambda value, pattern: all(_matches(str(name), pattern) for name in value),
    "characters": lambda value, n: sum(len(f"{name}{value[name]}") + 2 for name in value) <= n,
    "anyOf": lambda value, each: any(_fits(one, value) for one in each),
    "oneOf": lambda value, each: sum(_fits(one, value) for one in each) == 1,
    "not": lambda value, one: not _fits(one, value),
}


def accepted_values(schema: Schema) -> str:
    """Describe the accepted values, for error messages."""
    if "accepts" in schema:
        return str(schema["accepts"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "min" in schema:
        low, high = schema["min"], schema.get("max")
        bounds = f"from {low} to {high}" if high else f"of at least {low}"
        such = ", such as 90s, 5m or 1h30m" if schema["format"] == "duration" else ""
        return f"a {schema['format']} {bounds}{such}"
    bounds = ", ".join(f"{word} {schema[word]}" for word in _KEYWORDS if word in schema)
    return f"{schema.get('type', 'a value')}{' with ' * bool(bounds)}{bounds}"


def violations(schema: Schema, value: Any, path: str = "spec") -> Iterator[str]:
    """Yield the violations of a schema as sentences, nested values first."""
    kind = schema.get("format", schema.get("type"))
    if value is None and schema.get("nullable"):
        return
    bad = f"{path} is {value!r:.80}; it must be {accepted_values(schema)}"
    if (
        kind in _TYPES
        and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"))
    ) or (kind in _AMOUNTS and not _within(schema, value, _AMOUNTS[kind])):
        yield bad
    else:
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name} is missing"
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from violations(inner, value[name], f"{path}.{name}")
        each_of = schema.get("items", schema.get("additionalProperties"))
        for name, each in (value.items() if kind == "object" else enumerate(value)) if each_of else ():
            yield from violations(each_of, each, f"{path}.{name}")
        if any(word in schema and not holds(value, schema[word]) for word, holds in _KEYWORDS.items()):
            yield bad
        if (key := schema.get("key")) and len({each[key] for each in value}) < len(value):
            yield f"{path} has one {key} twice"
        for rule in schema.get("rules", ()):
            if "then" in rule and _fits(rule.get("if", {}), value) and not _fits(rule["then"], value):
                yield f"{path}: {rule['message']}"


def _fits(schema: Schema, value: Any) -> bool:
    return next(violations(schema, value), None) is None


def _within(schema: Schema, value: Any, read: Callable[[Any], Any]) -> bool:
    try:
        amount = read(value)
    except ValueError:
        return False
    return bool(read(schema["min"]) <= amount and ("max" not in schema or amount <= read(schema["max"])))
