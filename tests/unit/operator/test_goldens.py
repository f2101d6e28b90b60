"""Golden specs: what a workload of each kind and shape looks like before and after its admission.

A case is `tests/golden/pods/<case>.in.yaml` (where the kind has a controller: the user's manifest, then the Job or pod
its controller creates), `<case>.policy.yaml` where a policy matters, and `<case>.out.yaml`. `DELTASHARD_GOLDEN=write` writes the outputs anew: read the diff.
"""

from __future__ import annotations

import os

import pytest
import yaml
from deltashard_operator.admission.workload_kind import KINDS

from tests.support.operator import sample
from tests.support.operator.golden import CASES, FOLDER, annotated, documents, policy


@pytest.mark.parametrize("case", CASES)
def test_admission_gives_the_golden_object(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch, applied by a library of others, makes the object on record."""
    monkeypatch.setattr("deltashard_operator.admission.injection.VERSION", "0.1.0")
    document = documents(case)[-1]
    response = sample.answer(document, policy(case))
    assert response["allowed"], response
    result = sample.applied(document, response)
    path = FOLDER / f"{case}.out.yaml"
    if os.environ.get("DELTASHARD_GOLDEN") == "write":
        path.write_text(yaml.safe_dump(result, sort_keys=False, width=110))
    assert result == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_has_its_line_where_the_table_says(case: str) -> None:
    """Each kind's manifest is annotated at the first place `KINDS` names, unless it shows another of them."""
    manifest = documents(case)[0]
    kind = next(each for each in KINDS if each.kind == manifest["kind"])
    found = [place for place in kind.annotate_at if annotated(manifest, place.split("."))]
    assert found
    assert documents(case)[-1]["kind"] == kind.injected_as


def test_every_kind_has_a_golden_case() -> None:
    """No kind is documented that is not tested."""
    assert {each.kind for each in KINDS} == {documents(case)[0]["kind"] for case in CASES}
