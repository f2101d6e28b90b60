"""The release workflow names existing files, targets, repositories and versions."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.support.published import PUBLISHED
from tests.support.tool import ROOT

TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
WORKFLOW: dict[str, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def steps(job: str) -> list[dict[str, Any]]:
    found = JOBS[job]["steps"]
    assert isinstance(found, list)
    return found


def test_every_named_file_exists() -> None:
    named = set(re.findall(r"\b(?:tools|images|charts|tests)/[\w./-]*[\w/]", TEXT))
    assert {"tools/wheels.py", "images/requirements", "tests/unit/checkpoint/codecs"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    for name in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", TEXT):
        assert name[1] in JOBS[name[0]]["outputs"]


def test_images_match_chart_and_docs() -> None:
    assert JOBS["images"]["strategy"]["matrix"]["target"] == [each.target for each in PUBLISHED]
    (build,) = [each["with"] for each in steps("images") if "build-push" in each.get("uses", "")]
    registry = WORKFLOW["env"]["REGISTRY"]
    for each in PUBLISHED:
        assert each.repository == f"{registry}/deltashard-{each.target}"
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert build["tags"].startswith("${{ env.REGISTRY }}/deltashard-${{ matrix.target }}:")
    assert build["sbom"] is True


def test_publishing_requires_a_tag() -> None:
    for name, job in JOBS.items():
        for step in job["steps"]:
            text = yaml.safe_dump(step)
            publishes = re.search(r"login|helm\W+push|cosign|release create|pypi-publish", text)
            if publishes:
                condition = f"{job.get('if', '')} {step.get('if', '')}"
                assert "github.ref_type == 'tag'" in condition, (name, text)
    (build,) = [each["with"] for each in steps("images") if "build-push" in each.get("uses", "")]
    assert build["push"] == "${{ github.ref_type == 'tag' }}"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    writers = {name for name, job in JOBS.items() if "write" in (job.get("permissions") or {}).values()}
    assert writers == {"images", "chart", "publish"}
