"""Selecting a run by name, workload or run ID."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_cli.kubectl.run_choice import find_run


def run(
    name: str, workload: str, *, run_id: str = "", phase: str = "Training", made: int = 0
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:{made:02}Z"},
        "spec": {"workload": {"name": workload}, "runId": run_id or name},
        "status": {"phase": phase},
    }


RUNS = [
    run("dlrm-1", "dlrm", phase="Finished"),
    run("dlrm-2", "dlrm", phase="Finished", made=3),
    run("dlrm-3", "dlrm", made=1),
    run("nightly-1", "nightly-28", run_id="nightly", phase="Finished", made=1),
    run("nightly-2", "nightly-29", run_id="nightly", phase="Finished", made=2),
    run("two-1", "two"),
    run("two-2", "two"),
]


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [("dlrm-1", "dlrm-1"), ("dlrm", "dlrm-3"), ("nightly", "nightly-2"), ("nightly-28", "nightly-1")],
)
def test_run_is_selected_by_name_workload_or_run_id(argument: str, wanted: str) -> None:
    """If a workload was recreated, the live run is selected, otherwise the newest."""
    assert find_run(RUNS, argument, "team")["metadata"]["name"] == wanted


def test_ambiguous_and_unknown_names_list_the_runs() -> None:
    with pytest.raises(UserError, match="matches several") as error:
        find_run(RUNS, "two", "team")
    assert error.value.remedy == "use one of two-1, two-2"
    with pytest.raises(UserError, match="no run 'x'") as error:
        find_run(RUNS, "x", "team")
    assert "dlrm-1" in error.value.remedy
    with pytest.raises(UserError) as error:
        find_run([], "x", "team")
    assert "has no runs" in error.value.remedy
