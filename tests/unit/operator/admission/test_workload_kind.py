"""Kinds are told by group and name, owners by ownerReference, and what is not supported is refused or said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.fleet.report import Refused, Report, Who
from deltashard_operator.kube import cluster_name
from deltashard_operator.run import observed_object, watched_run
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.watched_run import Run

from tests.support.operator import sample as samples
from tests.support.operator.controller_api import Api, controller_of

Document = dict[str, Any]


def pod(
    owner: tuple[str, str] | None, *, uid: str = "o-1", labels: dict[str, str] | None = None, **spec: Any
) -> Document:
    """A pod of an owner (apiVersion, kind)."""
    metadata: Document = {
        "name": "w-0",
        "namespace": "n",
        "uid": "p-1",
        "labels": labels or {},
        "annotations": {cluster_name.POLICY: "default"},
    }
    if owner is not None:
        metadata["ownerReferences"] = [
            {"apiVersion": owner[0], "kind": owner[1], "name": "w", "uid": uid, "controller": True}
        ]
    template = samples.template(**spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": metadata,
        "status": {"phase": "Running"},
    }


def job(uid: str = "j-1", *, jobset: str = "") -> Document:
    metadata: Document = {"name": f"w-workers-{uid[-1]}", "namespace": "n", "uid": uid}
    if jobset:
        metadata["ownerReferences"] = [
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "name": "w",
                "uid": jobset,
                "controller": True,
            }
        ]
    return {
        "metadata": metadata,
        "spec": {"template": {"metadata": {"annotations": {cluster_name.POLICY: "default"}}}},
    }


def report(workload_uid: str) -> Report:
    who = Who(namespace="n", pod="w-0", pod_uid="p-1", workload_uid=workload_uid)
    return Report(who=who, process="p", sequence=1)


def held(api: Api, *events: tuple[str, Document]) -> dict[str, Run]:
    """The runs by workload UID, after these were seen and all was listed."""

    async def scenario() -> dict[str, Run]:
        controller = controller_of(api)
        await controller.load()
        for kind, document in events:
            watches = controller.watches
            (watches.on_pod if kind == "pod" else watches.on_job)(document)
        controller.watches.on_list()
        await controller.watches.settle()
        return {each.workload.uid: each for each in controller.runs()}

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "owner",
    [
        ("apps/v1", "ReplicaSet"),
        ("apps/v1", "DaemonSet"),
        ("v1", "ReplicationController"),
        ("ray.io/v1", "RayCluster"),
        ("kubeflow.org/v2beta1", "MPIJob"),
        ("batch.volcano.sh/v1alpha1", "Job"),
        ("sparkoperator.k8s.io/v1beta2", "SparkApplication"),
    ],
)
def test_pods_that_go_on_with_no_run_are_refused(owner: tuple[str, str]) -> None:
    response = samples.answer(pod(owner))
    assert response["status"]["reason"] == "Unsupported"
    assert f"{owner[1]} w" in response["status"]["message"]
    assert "use Job, " in response["status"]["message"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_group_of_a_leader_worker_set_is_refused(index: int) -> None:
    """Its leader is of one StatefulSet and its workers are of another: two runs of one process group."""
    labels = {
        "leaderworkerset.sigs.k8s.io/name": "lws",
        "leaderworkerset.sigs.k8s.io/worker-index": str(index),
    }
    response = samples.answer(pod(("apps/v1", "StatefulSet"), labels=labels))
    assert response["status"]["reason"] == "Unsupported"
    assert "LeaderWorkerSet lws" in response["status"]["message"]


def test_the_main_container_of_an_argo_pod_trains() -> None:
    """Its first container is Argo's own; the pod names its main one, as others do."""
    document = pod(("argoproj.io/v1alpha1", "Workflow"), containers=[{"name": "wait"}, {"name": "main"}])
    document["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = "main"
    wait, main = samples.applied(document, samples.answer(document))["spec"]["containers"]
    assert "volumeMounts" not in wait
    assert main["volumeMounts"] == [{"name": "deltashard-shm", "mountPath": "/run/deltashard"}]


@pytest.mark.parametrize("owner", [("batch.example.org/v1", "Job"), ("argoproj.io/v1alpha1", "Workflow")])
def test_a_kind_that_nobody_knows_is_warned_of(owner: tuple[str, str]) -> None:
    (warning,) = samples.answer(pod(owner))["warnings"]
    assert f"{owner[1]} of {owner[0]} is not supported" in warning
    assert len(warning) <= 200


@pytest.mark.parametrize(
    "owner", [("batch/v1", "Job"), ("apps/v1", "StatefulSet"), ("kubeflow.org/v1", "PyTorchJob"), None]
)
def test_kinds_that_are_known_are_not(owner: tuple[str, str] | None) -> None:
    assert "warnings" not in samples.answer(pod(owner))


@pytest.mark.parametrize(
    ("fleet", "endpoint", "dns", "warned"),
    [
        ("controller.deltashard.svc:9443", "https://s3.example.org", "ClusterFirst", True),
        ("controller.deltashard.svc:9443", "https://s3.example.org", "ClusterFirstWithHostNet", False),
        ("controller.deltashard.svc:9443", "https://s3.example.org", "None", False),
        ("10.0.0.7:9443", "https://s3.example.org", "ClusterFirst", False),
        ("10.0.0.7:9443", "http://minio.store:9000", "Default", True),
    ],
)
def test_on_the_hosts_network_the_clusters_names_have_to_be_known(
    fleet: str,
    endpoint: str,
    dns: str,
    warned: bool,
) -> None:
    """The API's default leaves such a pod with the node's resolver."""
    spec = {"fleet": {"address": fleet}, "store": {"url": "s3://bucket", "endpoint": endpoint}}
    response = samples.answer(pod(None, hostNetwork=True, dnsPolicy=dns), spec)
    assert response["allowed"]
    found = response.get("warnings", [])
    assert any("ClusterFirstWithHostNet" in each for each in found) is warned
    assert all(len(each) <= 200 for each in found)
    assert "warnings" not in samples.answer(pod(None, dnsPolicy=dns), spec), "in its own network"


def test_anothers_job_is_none_of_ours() -> None:
    """It is not among the Jobs that are listed, and lives all the same."""
    found = held(Api(), ("pod", pod(("batch.volcano.sh/v1alpha1", "Job"))))
    assert not found["o-1"].finished
    assert found["o-1"].workload.native == ""
    assert found["o-1"].workload.called == "Job.batch.volcano.sh w"
    gone = watched_run.without_pod(found["o-1"], "p-1", node_ready=True, now_s=1.0)
    assert not gone.finished


def test_a_jobs_pods_are_of_the_jobset_that_owns_the_job() -> None:
    """In whatever order they are seen; labels are not asked."""
    theirs, owner = pod(("batch/v1", "Job"), uid="j-1"), job("j-1", jobset="s-1")
    for events in ([("job", owner), ("pod", theirs)], [("pod", theirs), ("job", owner)]):
        found = held(Api(), *events)
        assert set(found) == {"s-1"}
        assert set(found["s-1"].pods) == {"p-1"}
        assert found["s-1"].pods["p-1"].index == "workers-1"


def test_a_pod_whose_job_nobody_watches_is_the_jobs() -> None:
    """A Job that is older than the webhook has no label of ours; its new pods are injected by themselves."""
    found = held(Api(), ("pod", pod(("batch/v1", "Job"), uid="j-1")))
    assert set(found) == {"j-1"}
    assert not found["j-1"].finished


@pytest.mark.parametrize(
    "labels",
    [
        {cluster_name.JOB_UID_LABEL: "j-1", cluster_name.JOB_NAME_LABEL: "w-workers-1"},
        {cluster_name.JOBSET_UID_LABEL: "s-1", cluster_name.JOBSET_NAME_LABEL: "w"},
    ],
)
def test_no_label_makes_a_pods_words_another_runs(labels: dict[str, str]) -> None:
    """The pod of a tenant says by its labels, and so by its sidecar's environment, that it is of another workload."""

    async def scenario() -> None:
        controller = controller_of(Api())
        await controller.load()
        controller.watches.on_job(job("j-1", jobset="s-1" if cluster_name.JOBSET_UID_LABEL in labels else ""))
        controller.watches.on_pod(pod(None, labels=labels))
        with pytest.raises(Refused, match="of workload p-1, not"):
            controller.report(report("s-1" if cluster_name.JOBSET_UID_LABEL in labels else "j-1"))
        assert all(not each.heard for each in controller.runs())

    asyncio.run(scenario())


def test_no_two_series_have_one_name_and_labels() -> None:
    """Prometheus refuses the whole scrape otherwise; and neither of two runs of one name hides the other."""
    workloads = (
        Workload(namespace="n", kind=kind, name="train", uid=uid)
        for kind, uid in (("Job", "11111111"), ("Pod", "22222222"))
    )
    runs = [Run(workload=each, trains_since_s=7.0) for each in workloads]
    metrics = ControllerMetrics()
    metrics.follow(lambda: runs)
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in metrics.registry.collect():
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in seen
            seen.add(key)
    since = {dict(labels)["run"] for name, labels in seen if "training_since" in name}
    assert since == {"train", "train-22222222"}


def test_owners_are_read_from_references() -> None:
    """An owner that does not control it is not whose the pod is."""
    document = pod(("batch/v1", "Job"))
    document["metadata"]["ownerReferences"][0]["controller"] = False
    assert observed_object.pod_of(document).workload.native == "Pod"
