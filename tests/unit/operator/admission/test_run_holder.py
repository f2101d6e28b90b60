"""Whether two workloads would train one run, and whether a run is in another store. The API is asked in `test_webhook`."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.admission import run_holder
from deltashard_operator.admission.run_holder import RunClaim
from deltashard_operator.run.observed_object import Workload


@pytest.mark.parametrize(
    ("claimed", "held", "of", "shared"),
    [
        (("exp", False), ("exp", False), "Job", "exp"),
        (("exp", True), ("exp", True), "Job", "exp"),
        (("exp", False), ("other", True), "Job", ""),
        (("exp-3", False), ("exp", False), "Job", ""),
        (("exp", False), ("exp-3", False), "Job", ""),
        (("exp-3", False), ("exp", True), "Job", "exp-3"),
        (("exp-4", False), ("exp", True), "Job", ""),
        (("exp-4", False), ("exp", True), "StatefulSet", "exp-4"),
        (("exp", True), ("exp-3", False), "Job", "exp-3"),
        (("exp", True), ("exp-4", False), "Job", ""),
        (("exp-worker-3", False), ("exp", True), "PyTorchJob", "exp-worker-3"),
        (("exp-2-3", False), ("exp", True), "JobSet", "exp-2-3"),
        (("exp-2-3", False), ("exp", True), "Job", ""),
        (("exp", True), ("exp-2-3", False), "StatefulSet", ""),
        (("exp-a", False), ("exp", True), "JobSet", ""),
        (("expo-3", False), ("exp", True), "JobSet", ""),
    ],
)
def test_who_would_train_one_run(
    claimed: tuple[str, bool], held: tuple[str, bool], of: str, shared: str
) -> None:
    """Where each of four pods trains a run of its own, its number stands at the end of the name."""
    (run_id, per_pod), (other, others) = claimed, held
    claim = RunClaim(namespace="n", run_id=run_id, per_pod=per_pod, kind=of, pods=4)
    workload = Workload(namespace="n", kind=of, name="a", uid="u")
    refusal = claim.held_by(workload, other, per_pod=others, pods=4, record="a-x")
    assert (refusal is None) == (not shared)
    if refusal is not None:
        assert f"run '{shared}' is held by {of} a" in refusal.what
        assert "delete CheckpointRun a-x" in refusal.remedy


@pytest.mark.parametrize(
    ("words", "label"),
    [
        ({"run_id": "exp"}, "deltashard.io/run-id in (exp)"),
        ({"run_id": "exp-worker-1"}, "deltashard.io/run-id in (exp-worker-1,exp,exp-worker)"),
        ({"run_id": "exp-1", "source": True}, "deltashard.io/run-id=exp-1"),
        ({"workload_uid": "w"}, "deltashard.io/workload-uid=w"),
    ],
)
def test_all_that_a_name_may_be_a_pods_of_is_asked_for(words: dict[str, Any], label: str) -> None:
    assert RunClaim(namespace="n", **words).label == label


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
    "words", [{"run_id": "exp"}, {"workload_uid": "w"}, {"run_id": "exp", "source": True}]
)
def test_a_run_stays_in_its_store(was: str, now: str, moved: bool, words: dict[str, str]) -> None:
    """Whoever asks for it: a workload by run-id, the next pod of its own, or a run that begins with its checkpoint."""
    record = {"metadata": {"name": "w-x"}, "spec": {"runId": "exp"}, "status": {"store": was}}
    refusal = run_holder._moved(RunClaim(namespace="n", **words), record, now)
    assert (refusal is not None) == moved
    if refusal is not None:
        assert (refusal.code, refusal.where == "deltashard.io/restore-from") == (
            "StoreMoved",
            "source" in words,
        )
    gone = record | {"status": {"store": was, "reclaim": {"state": "Removed"}}}
    assert run_holder._moved(RunClaim(namespace="n", run_id="exp"), gone, now) is None
