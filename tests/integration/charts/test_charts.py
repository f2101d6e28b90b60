"""The chart as a package: lint, its version, and a README that says what the values say."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import yaml

from tests.support.helm import CHART, VERSION, run
from tests.support.server.minio_server import ROOT


def test_lint() -> None:
    """Helm's own, strict."""
    assert "0 chart(s) failed" in run("lint", "--strict", "--kube-version", VERSION, CHART)


def test_versions_match_package() -> None:
    """One version for all: chart, images and wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_readme_is_up_to_date() -> None:
    """Its table of values. Here the tool only compares."""
    command = [sys.executable, str(ROOT / "tools" / "chart_readme.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
