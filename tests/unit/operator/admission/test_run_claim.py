"""Numbered pods may each train a run of its own, and no other workload gets one of their names meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.admission import run_claim
from deltashard_operator.admission.run_claim import Numbering, RunClaim
from deltashard_operator.admission.run_holder import Holders
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.kube import owner_reference
from deltashard_operator.kube.cluster_name import RUNS

JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "name": "ads",
    "uid": "s",
    "controller": True,
}


def job(
    name: str, run_id: str = "", *, pods: int = 0, owner: dict[str, Any] | None = None, runs: str = "per-pod"
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": "n", "uid": f"uid-{name}"}
    if run_id:
        metadata["labels"] = {"deltashard.io/run-id": run_id}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    spec = {"completionMode": "Indexed", "completions": pods} if pods else {}
    if pods:
        metadata["annotations"] = {"deltashard.io/runs": runs}
    return {"metadata": metadata, "spec": spec}


def record(
    run_id: str, kind: str, api_version: str, name: str = "w", runs: str = "per-pod"
) -> dict[str, Any]:
    workload = {"kind": kind, "name": name, "uid": f"uid-{name}", "apiVersion": api_version}
    return {"metadata": {"name": f"{name}-x"}, "spec": {"runId": run_id, "runs": runs, "workload": workload}}


@pytest.mark.parametrize(
    ("numbering", "base", "run", "held"),
    [
        (Numbering(count=4), "exp", "exp-3", True),
        (Numbering(count=4), "exp", "exp-4", False),
        (Numbering(count=4), "exp", "exp-03", False),
        (Numbering(count=4), "exp", "exp", False),
        (Numbering(count=4), "exp", "exp-a", False),
        (Numbering(count=4), "exp", "exp-1-1", False),
        (Numbering(), "exp", "exp-12345", True),
        (Numbering(), "exp-1", "exp-1-0", True),
        (Numbering(count=2, replica="3"), "exp", "exp-3-1", True),
        (Numbering(count=2, replica="3"), "exp", "exp-2-1", False),
        (Numbering(count=2, replica="workers-0"), "exp", "exp-workers-0-1", True),
        (Numbering(replica=""), "exp", "exp-2-1", True),
        (Numbering(replica=""), "exp", "other-2-1", False),
    ],
)
def test_the_names_of_numbered_pods(numbering: Numbering, base: str, run: str, held: bool) -> None:
    """A run is a numbered pod's when it is the base, the replica of a JobSet, and a number without leading zeros."""
    assert numbering.holds(base, run) is held


def test_which_run_ids_a_name_may_be_a_pods_of() -> None:
    """A name may end in one number, or in the two of a JobSet's pod, and in no more."""
    assert run_claim.bases("exp-1-2-3") == ("exp-1-2", "exp-1")
    assert run_claim.bases("exp-01") == ()
    assert run_claim.bases("exp") == ()
    assert run_claim.bases("exp-worker-1") == ("exp-worker", "exp")


def test_what_is_numbered() -> None:
    """Indexed Jobs, StatefulSets and JobSets number their pods; a Job of another group is not known to."""
    assert run_claim.numbering_of_job(job("j")) is None
    assert run_claim.numbering_of_job(job("j", pods=3, runs="one")) is None
    assert run_claim.numbering_of_job(job("j", pods=3)) == Numbering(count=3)
    assert run_claim.numbering_of_job(job("ads-w-0", pods=3, owner=JOBSET)) == Numbering(
        count=3, replica="w-0"
    )
    assert run_claim.numbering_of_kind(owner_reference.STATEFUL_SET) == Numbering()
    assert run_claim.numbering_of_kind(("batch.volcano.sh", "Job")) is None
    part = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "name": "exp",
        "uid": "u",
        "controller": True,
    }
    pod = {"metadata": {"annotations": {RUNS: "per-pod"}, "ownerReferences": [part]}}
    numbering = run_claim.numbering_of_object("Pod", pod)
    assert numbering is not None
    assert numbering.holds("exp", "exp-worker-1")
    assert numbering.holds("exp", "exp-master-0")
    assert not numbering.holds("exp", "exp-worker")
    pod["metadata"]["annotations"] = {}
    assert run_claim.numbering_of_object("Pod", pod) is None, "its pods are ranks of one run"


class Objects(Holders):
    """Answers from lists, by the selectors' own words; the real thing is asked in `test_webhook`."""

    def __init__(self, jobs: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
        self._found = {"jobs": jobs, "checkpointruns": records}

    def _selected(self, _api_version: str, plural: str, *_: Any) -> list[dict[str, Any]]:
        return self._found[plural]

    def _live(self, workload: Any, _deadline: Deadline) -> dict[str, Any] | None:
        return next((each for each in self._found["jobs"] if each["metadata"]["uid"] == workload.uid), None)


@pytest.mark.parametrize(
    ("jobs", "records", "claim", "said"),
    [
        ([job("a", "exp", pods=3)], [], RunClaim(namespace="n", run_id="exp-1"), "Job a"),
        ([job("a", "exp", pods=3)], [], RunClaim(namespace="n", run_id="exp-3"), ""),
        ([job("a", "exp", pods=3, runs="one")], [], RunClaim(namespace="n", run_id="exp-1"), ""),
        (
            [],
            [record("exp", "StatefulSet", "apps/v1", runs="one")],
            RunClaim(namespace="n", run_id="exp-7"),
            "",
        ),
        ([job("a", "exp")], [], RunClaim(namespace="n", run_id="exp-1"), ""),
        ([job("a", "exp-1")], [], RunClaim(namespace="n", run_id="exp"), ""),
        (
            [job("a", "exp-1")],
            [],
            RunClaim(namespace="n", run_id="exp", numbering=Numbering(count=2)),
            "Job a",
        ),
        (
            [],
            [record("exp", "StatefulSet", "apps/v1")],
            RunClaim(namespace="n", run_id="exp-7"),
            "StatefulSet w",
        ),
        (  # named after its Job's UID: a run id that a person copied
            [job("w", pods=2)],
            [record("w-uid", "Job", "batch/v1")],
            RunClaim(namespace="n", run_id="w-uid-1"),
            "Job w",
        ),
        ([], [record("w-uid", "Job", "batch/v1")], RunClaim(namespace="n", run_id="w-uid-1"), ""),
        (
            [],
            [record("exp", "Job", "batch.volcano.sh/v1")],
            RunClaim(namespace="n", run_id="exp"),
            "Job.batch",
        ),
    ],
)
def test_a_run_is_nobody_elses_while_its_workload_lives(
    jobs: list[dict[str, Any]], records: list[dict[str, Any]], claim: RunClaim, said: str
) -> None:
    refusal = Objects(jobs, records).refusal(claim, "", Deadline())
    assert (refusal is None) == (said == "")
    if refusal is not None:
        assert refusal.code == "RunIdTaken"
        assert said in refusal.sentence


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
    "claim",
    [
        RunClaim(namespace="n", run_id="exp"),
        RunClaim(namespace="n", workload_uid="uid-w"),
        RunClaim(namespace="n", run_id="exp", source=True),
    ],
)
def test_a_run_stays_in_its_store(was: str, now: str, moved: bool, claim: RunClaim) -> None:
    """Whoever asks for it: a workload by run-id, the next pod of its own, or a run that begins with its checkpoint."""
    found = record("exp", "PyTorchJob", "kubeflow.org/v1") | {"status": {"store": was, "phase": "Finished"}}
    refusal = Objects([], [found]).refusal(claim, now, Deadline())
    assert (refusal is not None) == moved
    if refusal is not None:
        assert refusal.code == "StoreMoved"
        assert ("CheckpointRun w-x" in refusal.sentence) != claim.source
        assert refusal.sentence.startswith("deltashard.io/restore-from: ") == claim.source
