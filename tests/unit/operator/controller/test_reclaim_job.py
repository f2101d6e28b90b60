"""The Job that removes a run's bytes: what it runs with, and what is read of its end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.controller import reclaim_job
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.reclaim import ReclaimState
from deltashard_operator.run.watched_run import Run

from tests.support.operator import sample

RUN = Run(
    workload=Workload(namespace="team", kind="Job", name="train", uid="0b4f3c1e-0000-4000-8000-000000000001")
)


def manifest(spec: dict[str, Any] | None = None) -> dict[str, Any]:
    return reclaim_job.manifest(RUN, sample.policy(spec))


def test_it_has_the_store_s_secret_and_nothing_of_the_api() -> None:
    job = manifest()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["deltashard", "reclaim"]
    assert container["args"][:4] == [
        "--run",
        f"team/train-{RUN.workload.uid}",
        "--workload",
        RUN.workload.uid,
    ]
    assert {"name": "AWS_SHARED_CREDENTIALS_FILE", "value": "/etc/deltashard/store/credentials"} in container[
        "env"
    ]
    secrets = [each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each]
    assert secrets == ["deltashard-store"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert "ownerReferences" not in job["metadata"], "who deletes the CheckpointRun leaves no half of a run"
    assert reclaim_job.is_ours(job, RUN)
    assert not reclaim_job.is_ours(job, replace(RUN, finished_at_s=5e8)), "of another end"
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}, "a quota may want both"
    assert len(job["metadata"]["name"]) <= 63


def test_neither_a_mesh_nor_a_queue_keeps_it_from_its_end() -> None:
    queue = {"kueue.x-k8s.io/queue-name": "chores"}
    policy = sample.policy()
    job = reclaim_job.manifest(RUN, replace(policy, reclaim_labels=queue))
    assert job["metadata"]["labels"].items() >= queue.items()
    metadata = job["spec"]["template"]["metadata"]
    assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert metadata["annotations"]["linkerd.io/inject"] == "disabled"


def test_a_store_by_the_account_s_identity() -> None:
    spec = {
        "store": {"url": "s3://bkt/p", "webIdentity": {"roleArn": "arn:aws:iam::1:role/x"}},
        "reclaim": {"serviceAccount": "trainer"},
    }
    pod = manifest(spec)["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "trainer"
    (tokens,) = [each["projected"]["sources"] for each in pod["volumes"] if "projected" in each]
    assert [each["serviceAccountToken"]["audience"] for each in tokens] == ["sts.amazonaws.com"], (
        "not the fleet's"
    )


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ([], None),
        ([{"type": "FailureTarget", "status": "True"}], None),
        ([{"type": "Complete", "status": "True"}], ""),
        ([{"type": "Failed", "status": "True", "message": "too often"}], "too often"),
        ([{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}], "DeadlineExceeded"),
        ([{"type": "Failed", "status": "True"}], "it failed"),
    ],
)
def test_whether_it_has_ended(conditions: list[dict[str, str]], found: str | None) -> None:
    assert reclaim_job.outcome({"status": {"conditions": conditions}}) == found


def ended_pod(message: str, at: str) -> dict[str, Any]:
    state = {"terminated": {"message": message, "finishedAt": at}}
    return {
        "status": {"containerStatuses": [{"name": "mesh", "state": {}}, {"name": "reclaim", "state": state}]}
    }


def test_the_newest_word_counts() -> None:
    pods = [ended_pod("b", "2026-01-02T00:00:00Z"), {}, ended_pod("a", "2026-01-01T00:00:00Z")]
    assert reclaim_job.last_word(pods) == "b"
    assert reclaim_job.last_word([]) == ""


@pytest.mark.parametrize(
    ("said", "state", "text"),
    [
        ({"runs": 1, "stay": 0, "kept": [], "objects": 7, "bytes": 900}, ReclaimState.REMOVED, "7 objects"),
        ({"runs": 0, "stay": 0, "kept": [], "objects": 0, "bytes": 0}, ReclaimState.REMOVED, "nothing of it"),
        (
            {"runs": 0, "stay": 1, "kept": [{"run": "t/a", "why": "a pin"}], "objects": 0, "bytes": 0},
            ReclaimState.KEPT,
            "t/a: a pin",
        ),
        (
            {"runs": 1, "stay": 50, "kept": [{"run": "t/a", "why": "w"}], "objects": 3, "bytes": 1},
            ReclaimState.KEPT,
            "50 runs stay: t/a: w; removed: 1 runs, 3 objects",
        ),
        ("", ReclaimState.FAILED, "could not be read"),
        ("no JSON", ReclaimState.FAILED, "could not be read"),
        ({"runs": 5}, ReclaimState.FAILED, "could not be read"),
    ],
)
def test_what_came_of_it(said: object, state: ReclaimState, text: str) -> None:
    found = reclaim_job.read(said if isinstance(said, str) else json.dumps(said))
    assert found[0] is state
    assert text in found[1]
