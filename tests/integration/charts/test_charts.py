"""The chart as a package: lint, its version, and a README that says what the values say."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
import yaml
from deltashard_operator.api import workload_policy

from tests.support.helm import CHART, VERSION, render, run
from tests.support.server.minio_server import ROOT


def test_lint() -> None:
    """Helm's own, strict."""
    assert "0 chart(s) failed" in run("lint", "--strict", "--kube-version", VERSION, CHART)


def test_versions_are_the_package_s() -> None:
    """One version for all: chart, images and wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_artifact_hub_is_told_what_the_chart_has() -> None:
    """Its images and resources are those of a rendering, its example is a policy of ours, and its icon is in the chart."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    found = {
        name.removeprefix("artifacthub.io/"): yaml.safe_load(text)
        for name, text in chart["annotations"].items()
    }
    made = render()
    policy = yaml.safe_load(made.find("ConfigMap", "deltashard-default-policy")["data"]["policy.yaml"])
    spec = made.find("Deployment", "deltashard-webhook")["spec"]["template"]["spec"]
    images = [spec["containers"][0]["image"], policy["sidecar"]["image"]]
    assert [each["image"] for each in found["images"]] == images
    definitions = {
        (each["spec"]["names"]["kind"], version["name"], each["metadata"]["name"])
        for each in made.all("CustomResourceDefinition")
        for version in each["spec"]["versions"]
    }
    assert {(each["kind"], each["version"], each["name"]) for each in found["crds"]} == definitions
    for example in found["crdsExamples"]:
        workload_policy.read("default", {**policy, **example["spec"]})
    assert (CHART / chart["icon"].rpartition("/")[2]).exists()
    assert {"category", "changes", "links", "license"} <= set(found)


@pytest.mark.parametrize("tool", ["chart_readme.py", "crds.py"])
def test_what_a_tool_makes_is_up_to_date(tool: str) -> None:
    """The README's table; the custom resources and the default policy's schema. Here it only compares."""
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
