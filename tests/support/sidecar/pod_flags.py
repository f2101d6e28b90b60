"""Sidecars as pods have them: their flags and directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pod(workload: str = "w-1", **more: object) -> dict[str, Any]:
    """Flags of a sidecar in a pod of this workload."""
    return {"run": "ns/job", "owner": "ns/job", "workload-uid": workload, "encoding": "fp32", **more}


def place(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path
