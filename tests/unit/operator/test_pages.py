"""The pages on workloads, runs and troubleshooting match the code: kinds, codes, conditions, phases."""

from __future__ import annotations

import re

import pytest
from deltashard_operator.admission.workload_kind import KINDS
from deltashard_operator.api.refusal import CODES
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.reconcile import PROBLEMS

from tests.support.operator.example import WORKLOADS, documents
from tests.support.server.minio_server import ROOT

PAGES = ROOT / "docs" / "kubernetes"
WORKLOADS_PAGE, TROUBLES_PAGE, RUNS_PAGE = (
    (PAGES / f"{name}.md").read_text() for name in ("workloads", "troubleshooting", "runs")
)


def rows(page: str, header: str) -> list[list[str]]:
    lines = page[page.index(header) :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def documented_names(page: str, header: str) -> set[str]:
    return {name for first, *_ in rows(page, header) for name in re.findall(r"`([^`]+)`", first)}


def test_page_lists_every_workload_kind_with_an_example() -> None:
    found = rows(WORKLOADS_PAGE, "| kind |")
    by_template = {"JobSet": "JobSet", "TrainingRuntime": "JobSet", "PyTorchJob": "PyTorchJob"}
    assert [row[:3] for row in found] == [
        [each.kind, f"`{each.annotate_at}`", f"the {by_template.get(each.kind, each.injected_as)}"]
        for each in KINDS
    ]
    by_file = {path.name: documents(path)[0]["kind"] for path in WORKLOADS}
    for kind, _, _, example in found:
        (name,) = re.findall(r"\[(\S+)\]\(\.\./\.\./examples/kubernetes/\1\)", example)
        assert by_file[name] == kind


def test_every_code_has_a_section() -> None:
    assert re.findall(r"(?m)^### (\w+)$", TROUBLES_PAGE) == list(CODES)
    examples = re.findall(r"```console\n(.*)\n```", TROUBLES_PAGE)
    assert [re.findall(r"\((\w+)\)$", each) for each in examples] == [[code] for code in CODES]


@pytest.mark.parametrize(
    ("page", "header", "names"),
    [
        (TROUBLES_PAGE, "| condition |", PROBLEMS),
        (RUNS_PAGE, "| phase | what it means |", Phase),
    ],
    ids=["conditions", "phases"],
)
def test_every_name_is_documented(page: str, header: str, names: tuple[str, ...]) -> None:
    assert documented_names(page, header) == set(names)


def test_links_resolve() -> None:
    for page in sorted(PAGES.glob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert "://" in target or file.exists(), f"{page.name}: {target}"
            if heading and "://" not in target:
                headings = re.findall(r"(?m)^#+ (.*)$", file.read_text())
                slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
                assert heading in slugs, f"{page.name}: {target}#{heading}"
