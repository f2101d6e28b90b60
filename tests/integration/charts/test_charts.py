"""The chart as a package: lint, version, and the README's table of values."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import yaml

from tests.support.helm import CHART, VERSION, run
from tests.support.server.minio_server import ROOT


def test_lint() -> None:
    assert "0 chart(s) failed" in run("lint", "--strict", "--kube-version", VERSION, CHART)


def test_versions_match_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_readme_is_up_to_date() -> None:
    """The tool compares the table and does not write it."""
    command = [sys.executable, str(ROOT / "tools" / "chart_readme.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
