"""The golden cases: manifests before their admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "golden" / "pods"


CASES = sorted(path.name.removesuffix(".in.yaml") for path in FOLDER.glob("*.in.yaml"))


def manifests(case: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{case}.in.yaml").read_text()))


def policy(case: str) -> dict[str, Any]:
    """Return the policy's spec, over the samples' defaults; empty unless the case has a policy file."""
    path = FOLDER / f"{case}.policy.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.exists() else {}
