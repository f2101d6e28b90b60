"""The programs that tests run: servers and their clients, built by `tools/build` before pytest begins (`make servers`).

A test builds nothing: a build takes minutes, and a test's limit would end it. With CI=true a missing program fails
the test; elsewhere its tests are skipped with a warning.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = re.compile(r"no (\S+): `make servers`")
"""Why a test was skipped."""


@functools.cache
def found(tool: str) -> Path | None:
    """Return the path of the built program (of kubernetes: the folder of its five); None when it is not built."""
    done = subprocess.run(
        [str(ROOT / "tools" / "build"), "--where", tool], check=False, capture_output=True, text=True
    )
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def require_tool(tool: str) -> Path:
    """Return the path of the built program; fail or skip the test when it is missing."""
    path = found(tool)
    if path is None:
        name = {"minio": "MinIO", "kubernetes": "apiserver"}.get(tool, tool)
        needs = "npm of Node 20 or newer" if tool == "azurite" else "Go 1.25 or newer"
        why = f"no {name}: `make servers` builds what tests need, once per machine ({needs})"
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(f"{why}; it is required in CI", pytrace=False)
        pytest.skip(why)
    return path
