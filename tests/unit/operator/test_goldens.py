"""Golden specs: what a workload of each kind and shape looks like before and after its admission.

A case is `tests/golden/pods/<case>.in.yaml` (where the kind has a controller: the user's manifest, then the Job or pod
its controller creates) and `<case>.out.yaml`. `DELTASHARD_GOLDEN=write` writes the outputs anew: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_operator.admission.workload_kind import KINDS
from deltashard_operator.kube import cluster_name

from tests.support.operator import sample

FOLDER = Path(__file__).parents[2] / "golden" / "pods"
CASES = sorted(path.name.removesuffix(".in.yaml") for path in FOLDER.glob("*.in.yaml"))


def _documents(case: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{case}.in.yaml").read_text()))


@pytest.mark.parametrize("case", CASES)
def test_admission_gives_the_golden_object(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch, applied by a library of others, makes the object on record."""
    monkeypatch.setattr("deltashard_operator.admission.injection.VERSION", "0.1.0")
    document = _documents(case)[-1]
    response = sample.answer(document)
    assert response["allowed"], response
    result = sample.applied(document, response)
    path = FOLDER / f"{case}.out.yaml"
    if os.environ.get("DELTASHARD_GOLDEN") == "write":
        path.write_text(yaml.safe_dump(result, sort_keys=False, width=110))
    assert result == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_has_its_line_where_the_table_says(case: str) -> None:
    """Each kind's manifest is annotated at the first place `KINDS` names, unless it shows another of them."""
    manifest = _documents(case)[0]
    kind = next(each for each in KINDS if each.kind == manifest["kind"])
    found = [place for place in kind.annotate_at if _annotated(manifest, place.split("."))]
    assert found
    assert _documents(case)[-1]["kind"] == kind.injected_as


def _annotated(document: Any, path: list[str]) -> bool:
    if not path:
        return cluster_name.POLICY in (document.get("annotations") or {})
    key, inner = path[0].removesuffix("[]"), (document or {}).get(path[0].removesuffix("[]"))
    if path[0] != key:
        return all(_annotated(each, path[1:]) for each in inner)
    return inner is not None and _annotated(inner, path[1:])


def test_every_kind_has_a_golden_case() -> None:
    """No kind is documented that is not tested."""
    assert {each.kind for each in KINDS} == {_documents(case)[0]["kind"] for case in CASES}
