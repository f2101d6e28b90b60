"""Conflicts of a run with another store. `test_webhook` covers the API requests."""

from __future__ import annotations

import pytest
from deltashard_operator.admission import run_holder
from deltashard_operator.admission.run_holder import RunClaim


@pytest.mark.parametrize(
    ("was", "now", "moved"),
    [
        (
            "s3://checkpoints/x?endpoint=http%3A%2F%2Fa%3A9000",
            "s3://checkpoints/x?endpoint=https%3A%2F%2Fa",
            False,
        ),
        ("s3://checkpoints/x", "s3://checkpoints/x/", False),
        ("s3://checkpoints/x", "s3://checkpoints-new/x", True),
        ("az://c/x?account=one", "az://c/x?account=two", True),
        ("", "s3://checkpoints/x", False),
    ],
)
@pytest.mark.parametrize(
    "claim_fields", [{"run_id": "exp"}, {"workload_uid": "w"}, {"run_id": "exp", "source": True}]
)
def test_run_cannot_move_to_another_store(
    was: str, now: str, moved: bool, claim_fields: dict[str, str]
) -> None:
    """Applies to a workload with run-id, to a later pod of the same workload, and to a run that restores from it."""
    record = {"metadata": {"name": "w-x"}, "spec": {"runId": "exp"}, "status": {"store": was}}
    refusal = run_holder._store_moved(RunClaim(namespace="n", **claim_fields), record, now)
    assert (refusal is not None) == moved
    if refusal is not None:
        assert (refusal.code, refusal.where == "deltashard.io/restore-from") == (
            "StoreMoved",
            "source" in claim_fields,
        )
    removed = record | {"status": {"store": was, "reclaim": {"state": "Removed"}}}
    assert run_holder._store_moved(RunClaim(namespace="n", run_id="exp"), removed, now) is None
