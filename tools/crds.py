"""Generates the chart's custom resources, and the schema of its value `defaultPolicy`, from the API's one schema.

The schema is operator/deltashard_operator/api/*.yaml. It has conditions in JSON Schema; the generated files have them
as CEL with the message that the API server returns. `--check` only compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from deltashard_operator.api.duration import PATTERN
from deltashard_operator.api.schema import Schema, accepted_values

ROOT = Path(__file__).parent.parent
API = ROOT / "operator" / "deltashard_operator" / "api"
CHART = ROOT / "charts" / "deltashard"
GROUP, VERSION = "deltashard.io", "v1alpha1"
_SAME: tuple[str, ...] = (
    "description",
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
)
_SAME += ("minItems", "maxItems", "maxProperties", "default", "required")
CRDS_CONDITION = "# {{- if .Values.crds.enabled }}\n"
"""A comment for readers of the YAML file."""
MAX_SCALAR = 32
"""Maximum characters of a quantity or a duration."""


def cel(condition: Schema, name: str = "self") -> str:
    """Translate a condition in JSON Schema into an expression about `name`."""
    found = [f"has({name}.{key})" for key in condition.get("required", ())]
    for key, inner in condition.get("properties", {}).items():
        rule = cel(inner, f"{name}.{key}")
        found.append(rule if key in condition.get("required", ()) else f"(!has({name}.{key}) || {rule})")
    if "pattern" in condition:
        found.append(f"{name}.matches(r'{condition['pattern']}')")
    if "enum" in condition:
        found.append(f"{name} in {json.dumps(condition['enum'])}".replace('"', "'"))
    if "minimum" in condition:
        found.append(f"{name} >= {condition['minimum']}")
    if "anyOf" in condition:
        found.append("(" + " || ".join(cel(each, name) for each in condition["anyOf"]) + ")")
    if "oneOf" in condition:
        each = ", ".join(cel(one, name) for one in condition["oneOf"])
        found.append(f"[{each}].filter(x, x).size() == 1")
    if "items" in condition:
        found.append(f"{name}.all(item, {cel(condition['items'], 'item')})")
    if "not" in condition:
        found.append(f"!({cel(condition['not'], name)})")
    return " && ".join(found) if len(found) == 1 else "(" + " && ".join(found) + ")"


def _rules(schema: Schema) -> Iterator[dict[str, str]]:
    """Return the API server's CEL rules with their messages."""
    kind = schema.get("format")
    if kind == "quantity":
        bounds = [
            f"quantity(string(self)).compareTo(quantity('{schema[word]}')) {sign} 0"
            for word, sign in (("min", ">="), ("max", "<="))
            if word in schema
        ]
        yield {
            "rule": " && ".join(["isQuantity(string(self))", *bounds]),
            "message": f"it must be {accepted_values(schema)}",
        }
    if kind == "duration":
        low, high = schema["min"], schema["max"]
        bounds = [f"duration(self) >= duration('{low}')", f"duration(self) <= duration('{high}')"]
        rule = " && ".join([f"self.matches('^{PATTERN}$')", *bounds])
        yield {"rule": rule, "message": f"it must be {accepted_values(schema)}"}
    if "pattern" in schema and "accepts" in schema:
        yield {"rule": f"self.matches(r'{schema['pattern']}')", "message": f"it must be {schema['accepts']}"}
    if "names" in schema:
        rule = f"self.all(name, name.matches(r'{schema['names']}'))"
        yield {"rule": rule, "message": f"it must be {schema['accepts']}"}
    if "characters" in schema:
        rule = f"self.map(name, name.size() + self[name].size() + 2).sum() <= {schema['characters']}"
        yield {"rule": rule, "message": f"it must have at most {schema['characters']} characters in all"}
    for rule in schema.get("rules", ()):
        expression = rule.get("cel") or (f"!({cel(rule['if'])}) || " if "if" in rule else "") + cel(
            rule["then"]
        )
        yield {"rule": expression, "message": rule["message"]}


def resource(schema: Schema) -> dict[str, Any]:
    """Return a schema in the form of a custom resource."""
    found = {key: schema[key] for key in _SAME if key in schema}
    if "accepts" in schema:
        found.pop("pattern", None)
    match schema.get("format", schema.get("type")):
        case "quantity":
            found |= {"anyOf": [{"type": "integer"}, {"type": "string"}], "maxLength": MAX_SCALAR}
            found["x-kubernetes-int-or-string"] = True
        case "duration":
            found |= {"type": "string", "maxLength": MAX_SCALAR}
        case "date-time":
            found["format"] = "date-time"
        case "integer":
            found["format"] = "int64"
        case "array":
            key = schema.get("key")
            found["x-kubernetes-list-type"] = "map" if key else "atomic"
            found |= {"x-kubernetes-list-map-keys": [key]} if key else {}
            found["items"] = resource(schema["items"])
    if schema.get("nullable"):
        found["nullable"] = True
    if rules := list(_rules(schema)):
        found["x-kubernetes-validations"] = rules
    if "additionalProperties" in schema:
        found["additionalProperties"] = resource(schema["additionalProperties"])
    if "properties" in schema:
        found["properties"] = {key: resource(each) for key, each in schema["properties"].items()}
    return found


def definition(api: Schema, kind: Schema) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "deltashard", "app.kubernetes.io/part-of": "deltashard"}
    plain: Schema = {"type": "string"}
    parts = {"apiVersion": plain, "kind": plain, "metadata": {"type": "object"}}
    parts |= {part: resource(api[part]) for part in ("spec", "status")}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": api["columns"],
        "schema": {
            "openAPIV3Schema": {
                "description": kind["description"],
                "type": "object",
                "required": ["spec"],
                "properties": parts,
            }
        },
    }
    name = kind["kind"]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind['plural']}.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": labels,
        },
        "spec": {
            "group": GROUP,
            "scope": kind["scope"],
            "names": {
                "kind": name,
                "listKind": f"{name}List",
                "plural": kind["plural"],
                "singular": name.lower(),
                "shortNames": [kind["short"]],
                "categories": ["deltashard"],
            },
            "versions": [version],
        },
    }


def value(schema: Schema) -> dict[str, Any]:
    """Return a schema in the form of the chart's values: without unknown fields and rules."""
    found = {key: schema[key] for key in _SAME if key in schema and key != "default"}
    match schema.get("format", schema.get("type")):
        case "quantity":
            return {"$ref": "#/definitions/quantity", **found}
        case "duration":
            found |= {"type": "string", "pattern": f"^{PATTERN}$"}
        case "array":
            found["items"] = value(schema["items"])
        case "object":
            found["additionalProperties"] = False
    if schema.get("nullable"):
        found["type"] = [schema["type"], "null"]
    if "names" in schema:
        found["propertyNames"] = {"pattern": schema["names"]}
    if "additionalProperties" in schema:
        found["additionalProperties"] = value(schema["additionalProperties"])
    if "properties" in schema:
        found["properties"] = {key: value(each) for key, each in schema["properties"].items()}
    rules = [
        {k: rule[k] for k in ("if", "then") if k in rule}
        for rule in schema.get("rules", ())
        if "then" in rule
    ]
    if rules:
        found["allOf"] = [rule if "if" in rule else rule["then"] for rule in rules]
    return found


class _Plain(yaml.SafeDumper):
    """A dumper without anchors: each field is written in full."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - of all
        return True


def files() -> dict[Path, str]:
    """Return every generated file with its text."""
    found = {}
    for source in sorted(API.glob("*.yaml")):
        api = yaml.safe_load(source.read_text(encoding="utf-8"))
        for kind in api["kinds"]:
            text = yaml.dump(
                definition(api, kind), Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True
            )
            made = f"# Made by tools/crds.py from operator/deltashard_operator/api/{source.name}.\n"
            found[CHART / "templates" / "crds" / f"{kind['plural']}.yaml"] = (
                f"{CRDS_CONDITION}{made}{text}# {{{{- end }}}}\n"
            )
    path = CHART / "values.schema.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    policy = yaml.safe_load((API / "policy.yaml").read_text(encoding="utf-8"))["spec"]
    description = values["properties"]["defaultPolicy"]["description"]  # generated by chart_readme.py
    values["properties"]["defaultPolicy"] = {"description": description, **value(policy)}
    found[path] = json.dumps(values, indent=2) + "\n"
    return found


def main() -> int:
    made = files()
    stale = [
        path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" not in sys.argv[1:]:
        for path in stale:
            path.write_text(made[path], encoding="utf-8")
        return 0
    for path in stale:
        sys.stderr.write(f"{path.relative_to(ROOT)} is not what the API's schema makes: run tools/crds.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
