"""The golden cases: manifests before their admission, and where they carry the annotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from deltashard_operator.kube import cluster_name

FOLDER = Path(__file__).parents[2] / "golden" / "pods"


CASES = sorted(path.name.removesuffix(".in.yaml") for path in FOLDER.glob("*.in.yaml"))


def documents(case: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{case}.in.yaml").read_text()))


def policy(case: str) -> dict[str, Any]:
    """The policy's spec, over the samples' defaults; empty unless the case has one of its own."""
    path = FOLDER / f"{case}.policy.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.exists() else {}


def annotated(document: Any, path: list[str]) -> bool:
    if not path:
        return cluster_name.POLICY in (document.get("annotations") or {})
    if path[0] == "*":
        return all(annotated(each, path[1:]) for each in document.values())
    key, inner = path[0].removesuffix("[]"), (document or {}).get(path[0].removesuffix("[]"))
    if path[0] != key:
        return all(annotated(each, path[1:]) for each in inner)
    return inner is not None and annotated(inner, path[1:])
