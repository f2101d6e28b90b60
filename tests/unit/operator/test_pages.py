"""The pages on workloads and on troubles say what the code says: kinds, keys, codes, and the very sentences."""

from __future__ import annotations

import re
from typing import Any

import pytest
from deltashard_operator.admission import run_holder, webhook
from deltashard_operator.admission.run_holder import RunClaim
from deltashard_operator.admission.workload_kind import KINDS
from deltashard_operator.api import annotation, policy_cache, workload_policy
from deltashard_operator.api.refusal import CODES
from deltashard_operator.run.judgement import TROUBLES
from deltashard_operator.run.observed_object import Workload

from tests.support.operator import sample
from tests.support.operator.example import WORKLOADS, documents
from tests.support.server.minio_server import ROOT

PAGES = ROOT / "docs" / "kubernetes"
WORKLOADS_PAGE = (PAGES / "workloads.md").read_text()
TROUBLES_PAGE = (PAGES / "troubleshooting.md").read_text()
TRAINER = {"name": "trainer", "image": "train"}


def _rows(page: str, header: str) -> list[list[str]]:
    lines = page[page.index(header) :].splitlines()
    found = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_table_of_kinds() -> None:
    """Where the line goes, for every kind, with an example that exists."""
    rows = _rows(WORKLOADS_PAGE, "| kind |")
    assert [row[:3] for row in rows] == [
        [each.kind, f"`{each.annotate_at[0]}`", f"the {each.injected_at or each.injected_as}"]
        for each in KINDS
    ]
    by_file = {path.name: documents(path)[0]["kind"] for path in WORKLOADS}
    for kind, _, _, example in rows:
        (name,) = re.findall(r"\[(\S+)\]\(\.\./\.\./examples/kubernetes/\1\)", example)
        assert by_file[name] == kind


def test_the_table_of_annotations() -> None:
    """Every key with what it takes, in the words of its refusal."""
    rows = _rows(WORKLOADS_PAGE, "| annotation |")
    assert rows == [[f"`{key}`", takes] for key, (_, _, takes) in annotation.KEYS.items()]


def test_every_code_has_its_section() -> None:
    """In the order of the code's own list, each with an example."""
    sections = re.findall(r"(?m)^### (\w+)$", TROUBLES_PAGE)
    assert sections == list(CODES)
    examples = re.findall(r"```console\n(.*)\n```", TROUBLES_PAGE)
    assert [re.findall(r"\((\w+)\)$", each) for each in examples] == [[code] for code in CODES]


def _job(
    notes: dict[str, str] | None = None, marks: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    template = sample.template(**spec)
    template["metadata"]["annotations"] = marks or {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "dlrm", "annotations": {"deltashard.io/policy": "default", **(notes or {})}},
        "spec": {"template": template},
    }


COPIED = sample.applied(
    _job({"deltashard.io/run-id": "nightly"}), sample.answer(_job({"deltashard.io/run-id": "nightly"}))
)
COPIED["metadata"]["annotations"]["deltashard.io/run-id"] = "weekly"
REFUSED = {
    "BadAnnotation": _job({"deltashard.io/encoding": "q5"}),
    "BadPolicy": _job(),
    "BadTemplate": _job(containers=[TRAINER, {"image": "x"}]),
    "ContainerNameTaken": _job(containers=[TRAINER, {"name": "deltashard-sidecar", "image": "x"}]),
    "CopiedManifest": COPIED,
    "MarkerWithoutSidecar": _job(marks={"deltashard.io/injected": "0.1.0"}),
    "MountTaken": _job(
        containers=[{**TRAINER, "volumeMounts": [{"name": "scratch", "mountPath": "/run/deltashard"}]}],
        volumes=[{"name": "scratch", "emptyDir": {}}],
    ),
    "PodResourcesTooSmall": _job(
        containers=[{**TRAINER, "resources": {"requests": {"memory": "3Gi"}}}],
        resources={"limits": {"memory": "4Gi"}},
    ),
    "VariableTaken": _job(
        containers=[{**TRAINER, "env": [{"name": "DELTASHARD_SOCKET", "value": "/tmp/s"}]}]
    ),
    "VolumeUnfit": _job(volumes=[{"name": "deltashard-shm", "emptyDir": {"medium": "Memory"}}]),
    "Unsupported": _job(os={"name": "windows"}),
}


@pytest.mark.parametrize("code", CODES)
def test_the_page_shows_what_is_really_said(code: str) -> None:
    """The example of each section is what a workload like it is answered."""
    if code == "PolicyNotFound":
        said = workload_policy.not_found("nightly", default=False).sentence
    elif code == "PolicyUnavailable":
        said = policy_cache.unavailable("nightly", "503").sentence
    elif code == "NamespaceNotWatched":
        said = webhook.not_watched("team-c").sentence
    elif code == "RunIdTaken":
        claim = RunClaim(namespace="n", run_id="nightly")
        held = claim.held_by(
            Workload(namespace="n", kind="Job", name="nightly-29012345", uid="u"), "nightly", per_pod=False
        )
        assert held is not None
        said = held.sentence
    elif code == "StoreMoved":
        record = {
            "metadata": {"name": "nightly-0b4f3c1e"},
            "spec": {"runId": "nightly"},
            "status": {"store": "s3://checkpoints/x?region=eu"},
        }
        moved = run_holder._moved(RunClaim(namespace="n", run_id="nightly"), record, "s3://new/x")
        assert moved is not None
        said = moved.sentence
    else:
        bad = {"interval": {"goal": {"type": "Auto"}, "atLeast": "2h", "atMost": "1h"}}
        response = sample.answer(REFUSED[code], bad if code == "BadPolicy" else None)
        assert response["status"]["reason"] == code
        said = response["status"]["message"]
    assert f"```console\n{said}\n```" in TROUBLES_PAGE


def test_every_trouble_of_a_run_is_explained() -> None:
    """The conditions that a CheckpointRun can have."""
    rows = _rows(TROUBLES_PAGE, "| condition |")
    assert {row[0] for row in rows} == {f"`{each}`" for each in TROUBLES}


def test_links_lead_somewhere() -> None:
    """Files and headings that the pages of Kubernetes point to exist."""
    for page in sorted(PAGES.glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", page.read_text()):
            assert not target or "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
        for target, heading in re.findall(r"\]\(([^)#\s]*)#([^)\s]*)\)", page.read_text()):
            text = (page.parent / target).read_text() if target else page.read_text()
            headings = re.findall(r"(?m)^#+ (.*)$", text)
            slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert heading in slugs, f"{page.name}: {target}#{heading}"
