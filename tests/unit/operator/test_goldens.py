"""Golden objects: a workload of each kind and shape, and each example, after admission.

A case is `tests/golden/pods/<case>.in.yaml` (for a kind with a controller, the user's manifest and the Job or pod that
its controller creates), an optional `<case>.policy.yaml`, and `<case>.out.yaml`. For a manifest in
examples/kubernetes the output is `tests/golden/examples/<manifest>.out.yaml`. `DELTASHARD_GOLDEN=write` rewrites the
outputs; review the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.operator import sample
from tests.support.operator.example import EXAMPLES, WORKLOADS, documents, injected
from tests.support.operator.golden import CASES, FOLDER, manifests, policy


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltashard_operator.admission.injection.VERSION", "0.1.0")


def assert_recorded(result: dict[str, Any], path: Path) -> None:
    if os.environ.get("DELTASHARD_GOLDEN") == "write":
        path.write_text(yaml.safe_dump(result, sort_keys=False, width=110))
    assert result == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_admission_produces_the_golden_object(case: str) -> None:
    document = manifests(case)[-1]
    response = sample.answer(document, policy(case))
    assert response["allowed"], response
    assert_recorded(sample.applied(document, response), FOLDER / f"{case}.out.yaml")


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_example_injection_matches_the_golden_object(path: Path) -> None:
    """The input is the object that the controller creates, with the example's policy and the chart's defaults."""
    assert_recorded(injected(path), FOLDER.parent / "examples" / f"{path.stem}.out.yaml")


def test_example_exit_codes_match_the_trainer() -> None:
    from deltashard.attach import exit_code, term_signal

    rules = documents(EXAMPLES / "job-pod-failure-policy.yaml")[0]["spec"]["podFailurePolicy"]["rules"]
    values = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert values == {"Ignore": [term_signal.EXIT_SIGTERM], "FailJob": [2, exit_code.EXIT_TAKEN_OVER]}
