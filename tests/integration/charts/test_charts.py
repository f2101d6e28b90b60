"""The chart as a package: lint, its version, and a README that says what the values say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from deltashard_operator.api import workload_policy

from tests.support.helm import CHART, VERSION, render, run
from tests.support.server.minio_server import ROOT
from tools.chart_readme import Unfit, rendered

PLACE = "before\n<!-- values -->\nold\n<!-- end of values -->\nafter\n"


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


def test_what_is_packaged(tmp_path: Path) -> None:
    """The schema, the dashboard and the README travel with the templates."""
    run("package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.glob("*.tgz")
    listed = subprocess.run(["tar", "-tzf", str(archive)], capture_output=True, text=True, check=True).stdout
    packed = {name.partition("/")[2] for name in listed.splitlines()}
    files = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    assert packed == files - {".helmignore"} | ({".helmignore"} & packed)


@pytest.mark.parametrize("tool", ["chart_readme.py", "crds.py"])
def test_what_a_tool_makes_is_up_to_date(tool: str) -> None:
    """The README's table; the custom resources and the default policy's schema. Here it only compares."""
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_and_sections() -> None:
    """A map with comments inside is a section; one without is a value."""
    values = "# One.\na: {b: 1}\n\n# Not of c.\n\n# Two\n# lines | bar.\nc:\n  # Inner.\n  d: []\n# Plain.\ne:\n  f: 1\n"
    wanted = [
        "| value | default | meaning |",
        "|---|---|---|",
        '| `a` | `{"b": 1}` | One. |',
        "| **`c`** | | Two lines \\| bar. |",
        "| `c.d` | `[]` | Inner. |",
        '| `e` | `{"f": 1}` | Plain. |',
    ]
    made = rendered(PLACE, values)
    assert [line for line in made.splitlines() if line.startswith("|")] == wanted
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert rendered(made, values) == made


@pytest.mark.parametrize(
    ("readme", "values", "said"),
    [
        (PLACE, "# One.\na: 1\nb: 2\n", "b has no comment"),
        (PLACE, "# One.\na:\n  # Two.\n  b: 1\n  c: 1\n", "a.c has no comment"),
        ("no place", "# One.\na: 1\n", "README.md has no <!-- values -->"),
    ],
)
def test_what_is_unfit(readme: str, values: str, said: str) -> None:
    """A value without a comment, a README without a place."""
    with pytest.raises(Unfit, match=said):
        rendered(readme, values)
