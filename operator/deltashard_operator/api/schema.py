"""Reads a policy by its one schema, policy.yaml, from which `tools/crds.py` makes the custom resources and the values.

The API server has judged a CheckpointPolicy by the same schema. The default policy comes from a file, and what is read
here is one over the other: so every value is held against the schema once more, and a wrong one is refused by its path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import yaml

from deltashard_operator.api import duration
from deltashard_operator.kube import quantity

Schema = Mapping[str, Any]
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": Mapping,
}
_FORMATS: Mapping[str, Callable[[Any], Any]] = {"quantity": quantity.parse, "duration": duration.seconds_of}


class Unfit(ValueError):
    """A value that its schema does not take: which and why, and what to write instead."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy

    @classmethod
    def at(cls, path: str, value: Any, takes: str) -> Unfit:
        """Of a value that cannot be."""
        said = "is missing" if value is None else f"is {str(value)[:80]!r}"
        return cls(f"{path} {said}", f"it takes {takes}")


@functools.cache
def spec() -> Schema:
    """The schema of a policy's spec."""
    text = resources.files(__package__).joinpath("policy.yaml").read_text(encoding="utf-8")
    found: Schema = yaml.safe_load(text)["spec"]
    return found


def check(schema: Schema, value: Any, path: str) -> None:
    """Raises `Unfit` where a value is not what its schema takes, whatever is inside it included."""
    if value is None and schema.get("nullable"):
        return
    if not _is_one(schema, value) or not fits(schema, value):
        raise Unfit.at(path, value, takes(schema))
    if isinstance(value, Mapping):
        _check_fields(schema, value, path)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            check(schema["items"], each, f"{path}[{number}]")
        key = schema.get("key")
        if key and len({each[key] for each in value}) < len(value):
            raise Unfit(f"{path}: each {key} stands there once")
    for rule in schema.get("rules", ()):
        if "then" in rule and fits(rule.get("if", {}), value) and not fits(rule["then"], value):
            raise Unfit(f"{path}: {rule['message']}")


def _check_fields(schema: Schema, value: Mapping[str, Any], path: str) -> None:
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            raise Unfit.at(f"{path}.{key}", None, takes(known[key]))
    for key, each in value.items():
        inner = known.get(key, schema.get("additionalProperties"))
        if inner is None:
            raise Unfit(f"{path}.{key}: there is no such field", f"known are {', '.join(known)}")
        check(inner, each, f"{path}.{key}")


def _is_one(schema: Schema, value: Any) -> bool:
    """Whether it is of the schema's type, and within the bounds of its format."""
    parse = _FORMATS.get(schema.get("format", ""))
    if parse is None:
        kind = _TYPES[schema["type"]]
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    try:
        number = parse(value)
        return all(
            (number - parse(schema[bound])) * sign >= 0
            for bound, sign in (("least", 1), ("most", -1))
            if bound in schema
        )
    except (TypeError, ValueError):
        return False


def fits(schema: Schema, value: Any) -> bool:
    """Whether a value of the right type fits the words of JSON Schema that policy.yaml uses."""
    if isinstance(value, str):
        return (
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            and _matches(schema.get("pattern"), value)
            and value in schema.get("enum", (value,))
            and _combined(schema, value)
        )
    if isinstance(value, int):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        return bool(low <= value <= high) and value in schema.get("enum", (value,))
    if isinstance(value, list):
        some = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        # A full schema's items are checked one by one.
        return bool(some) and ("type" in schema or all(fits(schema.get("items", {}), each) for each in value))
    if "type" in schema or not isinstance(value, Mapping):  # its fields are checked one by one
        names = schema.get("names")
        return len(value) <= schema.get("maxProperties", len(value)) and all(
            isinstance(key, str) and _matches(names, key) for key in value
        )
    return (
        all(key in value for key in schema.get("required", ()))
        and all(
            fits(inner, value[key]) for key, inner in schema.get("properties", {}).items() if key in value
        )
        and _combined(schema, value)
    )


def _combined(schema: Schema, value: Any) -> bool:
    return (
        ("anyOf" not in schema or any(fits(each, value) for each in schema["anyOf"]))
        and ("oneOf" not in schema or sum(fits(each, value) for each in schema["oneOf"]) == 1)
        and not ("not" in schema and fits(schema["not"], value))
    )


def _matches(pattern: str | None, text: str) -> bool:
    return pattern is None or re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None


def takes(schema: Schema) -> str:
    """What a field takes, for a refusal."""
    if "takes" in schema:
        return str(schema["takes"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    least, most = (schema.get("least", schema.get("minimum")), schema.get("most", schema.get("maximum")))
    bounds = (f" from {least} to {most}" if most is not None else f" of at least {least}") if least else ""
    match schema.get("format", schema.get("type", "")):
        case "quantity":
            return f"a quantity{bounds}"
        case "duration":
            return f"a duration{bounds}, such as 90s, 5m or 1h30m"
        case "integer":
            return f"an integer from {least} to {most}"
        case "boolean":
            return "true or false"
        case "array":
            return f"a list of at most {schema['maxItems']}"
        case "object":
            return "an object"
    return f"text of at most {schema['maxLength']} characters"
