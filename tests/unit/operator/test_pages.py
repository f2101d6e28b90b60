"""The pages on workloads and on troubles say what the code says: kinds, keys, codes, conditions."""

from __future__ import annotations

import re

from deltashard_operator.admission.workload_kind import KINDS
from deltashard_operator.api import annotation
from deltashard_operator.api.refusal import CODES
from deltashard_operator.run.judgement import TROUBLES

from tests.support.operator.example import WORKLOADS, documents
from tests.support.server.minio_server import ROOT

PAGES = ROOT / "docs" / "kubernetes"
WORKLOADS_PAGE = (PAGES / "workloads.md").read_text()
TROUBLES_PAGE = (PAGES / "troubleshooting.md").read_text()


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
    by_template = {"JobSet": "JobSet", "TrainingRuntime": "JobSet", "PyTorchJob": "PyTorchJob"}
    assert [row[:3] for row in rows] == [
        [each.kind, f"`{each.annotate_at}`", f"the {by_template.get(each.kind, each.injected_as)}"]
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
