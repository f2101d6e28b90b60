"""Admission reviews: changes, refusals and pods that stay unchanged."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from deltashard_operator.admission import review
from deltashard_operator.kube import cluster_name

from tests.support.operator import sample

Document = dict[str, Any]
OPT_IN = {cluster_name.POLICY: "default"}


def opted(**more: str) -> dict[str, str]:
    return OPT_IN | {cluster_name.PREFIX + key.replace("_", "-"): value for key, value in more.items()}


def job(annotations: dict[str, str] | None = None, *, spec: Document | None = None, **pod: Any) -> Document:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", **({"annotations": annotations} if annotations is not None else {})},
        "spec": {"template": sample.template(**pod), **(spec or {})},
    }


def pod(owner: tuple[str, str] | None = None, labels: dict[str, str] | None = None, **spec: Any) -> Document:
    """Return a pod of an owner (apiVersion, kind)."""
    metadata: Document = {"name": "w-0", "annotations": OPT_IN, "labels": labels or {}}
    if owner is not None:
        reference = {"apiVersion": owner[0], "kind": owner[1], "name": "w", "uid": "o-1", "controller": True}
        metadata["ownerReferences"] = [reference]
    return {"apiVersion": "v1", "kind": "Pod", **sample.template(**spec), "metadata": metadata}


def injected(document: Document, spec: Document | None = None) -> Document:
    return sample.applied(document, sample.answer(document, spec))


@pytest.mark.parametrize(
    "document",
    [
        job(),
        job({"deltashard.io/encoding": "q9"}),
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"annotations": OPT_IN}, "spec": {}},
        {"apiVersion": "other/v1", "kind": "Job", "metadata": {"annotations": OPT_IN}, "spec": {}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {}},
        pod() | {"metadata": {"annotations": OPT_IN | {"kubernetes.io/config.mirror": "x"}}},
    ],
)
def test_other_objects_are_admitted_unchanged(document: Document) -> None:
    """Objects without the annotation, or of other kinds, get no patch and no refusal. Their policy is not read."""
    untouched = sample.parsed(document)
    assert isinstance(untouched, review.ReviewResult)
    assert untouched.outcome == "unchanged"
    assert untouched.review["response"] == {"uid": "0b4f3c1e-0000-0000-0000-000000000001", "allowed": True}


@pytest.mark.parametrize("on", ["job", "template"])
def test_queued_pods_request_no_ephemeral_storage(on: str) -> None:
    """A ClusterQueue rejects requests for resources that it does not cover. By default it covers CPU and memory."""
    document = job(OPT_IN)
    labelled = document if on == "job" else document["spec"]["template"]
    labelled["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    stated = {"sidecar": {"resources": {"requests": {"ephemeral-storage": "2Gi"}}}}
    for spec, storage in (({}, None), (stated, "2Gi")):
        resources = sample.sidecar_of(injected(document, spec)["spec"]["template"])["resources"]
        assert resources["requests"].get("ephemeral-storage") == storage


IN_CLUSTER = {
    "fleet": {"address": "10.0.0.7:9443"},
    "store": {"url": "s3://bkt", "endpoint": "http://m.n.svc:9"},
}
OUTSIDE = {"fleet": {"address": "10.0.0.7:9443"}, "store": {"url": "s3://bkt"}}


@pytest.mark.parametrize(
    ("document", "spec", "warning"),
    [
        (job(OPT_IN), {}, ""),
        (job(OPT_IN, terminationGracePeriodSeconds=45), {}, "is 45 s and policy default asks for 120 s"),
        (job(OPT_IN), {"reclaim": {"policy": "Delete"}}, "reclaim.enabled is false"),
        (job(OPT_IN, spec={"podReplacementPolicy": "Failed"}), {}, "lost node"),
        (job(OPT_IN, spec={"parallelism": 2}), {}, "completionMode Indexed"),
        (job(OPT_IN, spec={"parallelism": 2, "completionMode": "Indexed"}), {}, ""),
        (pod(hostNetwork=True), {}, "ClusterFirstWithHostNet"),
        (pod(hostNetwork=True, dnsPolicy="Default"), IN_CLUSTER, "ClusterFirstWithHostNet"),
        (pod(hostNetwork=True), OUTSIDE, ""),
        (pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), {}, ""),
    ],
)
def test_admitted_object_gets_at_most_one_warning(document: Document, spec: Document, warning: str) -> None:
    found = sample.answer(document, spec).get("warnings", [])
    assert len(found) == bool(warning)
    assert all(warning in each and len(each) <= 200 for each in found)


def test_volumes_are_excluded_from_autoscaler_and_backups() -> None:
    """Without the exclusion, the cache pins a node, or a backup copies it. The user's values are kept: templates are immutable."""
    evict, backup = cluster_name.EVICTABLE_VOLUMES, cluster_name.BACKUP_EXCLUDED_VOLUMES
    document = job(OPT_IN)
    notes = injected(document)["spec"]["template"]["metadata"]["annotations"]
    assert (notes[evict], notes[backup]) == ("deltashard-cache", "deltashard-shm,deltashard-cache")
    document["spec"]["template"]["metadata"]["annotations"] = {evict: "mine"}
    assert injected(document)["spec"]["template"]["metadata"]["annotations"][evict] == "mine"


@pytest.mark.parametrize(
    "body", [{}, [], {"request": {}}, {"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "x"}}]
)
def test_malformed_review_is_refused(body: Any) -> None:
    with pytest.raises(review.InvalidReview):
        review.parse(json.dumps(body).encode())


SETTINGS = {"run_id": "exp", "interval": "1s500ms", "encoding": "q4", "arena_size": "100Mi"}


@pytest.mark.parametrize("settings", [{}, SETTINGS, {"restore_from": "exp@best", "runs": "one"}])
def test_copied_manifest_with_the_same_settings_is_admitted(settings: dict[str, str]) -> None:
    """The API server calls the webhook again if a later webhook changed the object."""
    again = sample.answer(injected(job(opted(**settings))))
    assert (again["allowed"], "patch" in again) == (True, False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run-id", "other"),
        ("run-id", None),  # would continue with the older run
        ("interval", "60s"),
        ("encoding", "q2"),
        ("arena-size", "512Mi"),
        ("restore-from", "base"),
        ("runs", "per-pod"),
        ("policy", "nightly"),
    ],
)
def test_copied_manifest_with_other_settings_is_refused(key: str, value: str | None) -> None:
    """The refusal needs no API request: no policy and no holder of the run can make the manifest valid."""
    document = injected(job(opted(**SETTINGS)))
    notes = document["metadata"]["annotations"] | {f"deltashard.io/{key}": value}
    document["metadata"]["annotations"] = {name: text for name, text in notes.items() if text is not None}
    del document["spec"]["template"]["metadata"]["annotations"]["deltashard.io/policy"]
    refused = sample.parsed(document)
    assert isinstance(refused, review.ReviewResult)
    assert (refused.outcome, f"deltashard.io/{key}: " in refused.sentence) == ("CopiedManifest", True)
    assert "remove the container deltashard-sidecar" in refused.sentence


def test_pod_copied_from_a_workload_pod_is_refused() -> None:
    """The pod's environment has the name and UID of its StatefulSet: the copy would train into the same run."""
    mine = injected(pod(("apps/v1", "StatefulSet")))
    assert sample.answer(mine)["allowed"]
    bare, others, of_job = copy.deepcopy(mine), copy.deepcopy(mine), injected(job(OPT_IN))["spec"]["template"]
    del bare["metadata"]["ownerReferences"]
    others["metadata"]["ownerReferences"][0] |= {"name": "offline", "uid": "u-2"}
    of_job = {"apiVersion": "v1", "kind": "Pod", **of_job}
    for copied in (bare, others, of_job):
        status = sample.answer(copied)["status"]
        assert (status["reason"], "another workload" in status["message"]) == ("CopiedManifest", True)


@pytest.mark.parametrize(
    ("owner", "labels", "named"),
    [
        (("apps/v1", "ReplicaSet"), {}, "ReplicaSet w"),
        (("apps/v1", "DaemonSet"), {}, "DaemonSet w"),
        (("v1", "ReplicationController"), {}, "ReplicationController w"),
        (("ray.io/v1", "RayCluster"), {}, "RayCluster w"),
        (("kubeflow.org/v2beta1", "MPIJob"), {}, "MPIJob w"),
        (("batch.volcano.sh/v1alpha1", "Job"), {}, "Job w"),
        (("sparkoperator.k8s.io/v1beta2", "SparkApplication"), {}, "SparkApplication w"),
        # Leader and workers of a group belong to two StatefulSets: one process group would have two runs.
        (("apps/v1", "StatefulSet"), {"leaderworkerset.sigs.k8s.io/name": "lws"}, "LeaderWorkerSet lws"),
    ],
)
def test_pods_that_cannot_resume_a_run_are_refused(
    owner: tuple[str, str], labels: dict[str, str], named: str
) -> None:
    status = sample.answer(pod(owner, labels))["status"]
    assert status["reason"] == "Unsupported"
    assert f"{named}: " in status["message"]
    assert "use Job, " in status["message"]


def test_argo_main_container_is_the_trainer() -> None:
    """Argo's own container is the first. An annotation of the pod names the main container."""
    document = pod(("argoproj.io/v1alpha1", "Workflow"), containers=[{"name": "wait"}, {"name": "main"}])
    document["metadata"]["annotations"] = OPT_IN | {"kubectl.kubernetes.io/default-container": "main"}
    wait, main = injected(document)["spec"]["containers"]
    assert "volumeMounts" not in wait
    assert main["volumeMounts"] == [{"name": "deltashard-shm", "mountPath": "/run/deltashard"}]
