"""The ownerReference, by group and name, defines an object's workload; labels do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from deltashard_operator.fleet.report import Report, ReportRefused, SidecarIdentity
from deltashard_operator.kube import cluster_name
from deltashard_operator.run import watched_run
from deltashard_operator.run.watched_run import WatchedRun

from tests.support.operator.controller_api import FakeApi, controller_of

Document = dict[str, Any]
NOTES = {cluster_name.POLICY: "default"}


def owned_metadata(name: str, uid: str, owner: tuple[str, str, str] | None) -> Document:
    """Return metadata of an object of an owner (apiVersion, kind, uid)."""
    metadata: Document = {"name": name, "namespace": "n", "uid": uid, "annotations": NOTES}
    if owner is not None:
        version, kind, of = owner
        reference = {"apiVersion": version, "kind": kind, "name": "w", "uid": of, "controller": True}
        metadata["ownerReferences"] = [reference]
    return metadata


def pod(owner: tuple[str, str, str] | None, labels: dict[str, str] | None = None) -> Document:
    metadata = owned_metadata("w-0", "p-1", owner) | {"labels": labels or {}}
    spec = {"containers": [{"name": "trainer", "image": "train"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": "Running"},
    }


def job(owner: tuple[str, str, str] | None = None) -> Document:
    return {"metadata": owned_metadata("w-workers-1", "j-1", owner), "spec": {"template": {"metadata": {}}}}


JOBSET = ("jobset.x-k8s.io/v1alpha2", "JobSet", "s-1")
FOREIGN_POD = pod(("batch/v1", "Job", "j-1"))


def runs_by_workload(*events: Document) -> dict[str, WatchedRun]:
    """Return the runs by workload UID after these objects were seen and all lists are complete."""

    async def scenario() -> dict[str, WatchedRun]:
        controller = controller_of(FakeApi())
        await controller.load()
        watches = controller.watches
        for document in events:
            (watches.on_pod if document.get("kind") == "Pod" else watches.on_job)(document)
        watches.on_list()
        await watches.resolve_waiting()
        return {each.workload.uid: each for each in controller.runs()}

    return asyncio.run(scenario())


def test_job_of_an_unwatched_owner_is_ignored() -> None:
    """The Job is not listed, although it exists."""
    run = runs_by_workload(pod(("batch.volcano.sh/v1alpha1", "Job", "o-1")))["o-1"]
    assert (run.workload.native, run.workload.display_name) == ("", "Job.batch.volcano.sh w")
    assert not watched_run.without_pod(run, "p-1", node_ready=True, now_s=1.0).finished


@pytest.mark.parametrize("events", [(job(JOBSET), FOREIGN_POD), (FOREIGN_POD, job(JOBSET))])
def test_pods_of_a_jobset_job_belong_to_the_jobset(events: tuple[Document, ...]) -> None:
    """The order in which the objects are seen does not matter."""
    found = runs_by_workload(*events)
    assert {uid: [each.index for each in run.pods.values()] for uid, run in found.items()} == {
        "s-1": ["workers-1"]
    }


def test_pod_of_an_unwatched_job_belongs_to_the_job() -> None:
    """A Job older than the webhook has no deltashard label. Its new pods are injected individually."""
    found = runs_by_workload(FOREIGN_POD)
    assert {uid: run.finished for uid, run in found.items()} == {"j-1": ""}


@pytest.mark.parametrize(
    ("labels", "owner", "uid"),
    [
        ({cluster_name.JOB_UID_LABEL: "j-1", cluster_name.JOB_NAME_LABEL: "w-workers-1"}, None, "j-1"),
        ({cluster_name.JOBSET_UID_LABEL: "s-1", cluster_name.JOBSET_NAME_LABEL: "w"}, JOBSET, "s-1"),
    ],
)
def test_labels_do_not_change_a_pods_workload(
    labels: dict[str, str], owner: tuple[str, str, str] | None, uid: str
) -> None:
    """A tenant's pod labels, and so its sidecar's environment, can name another workload."""

    async def scenario() -> None:
        controller = controller_of(FakeApi())
        await controller.load()
        controller.watches.on_job(job(owner))
        controller.watches.on_pod(pod(None, labels))
        identity = SidecarIdentity(namespace="n", pod="w-0", pod_uid="p-1", workload_uid=uid)
        with pytest.raises(ReportRefused, match="of workload p-1, not"):
            controller.report(Report(identity=identity, process="p", sequence=1))
        assert all(not each.last_reports for each in controller.runs())

    asyncio.run(scenario())
