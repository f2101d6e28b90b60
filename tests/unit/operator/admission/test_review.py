"""Admission reviews: who is changed, who is refused and how, who is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deltashard_operator.admission import review
from deltashard_operator.admission.run_claim import Numbering, RunClaim
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import cluster_name

from tests.support.operator import sample


def job(
    annotations: dict[str, str] | None = None, *, spec: dict[str, Any] | None = None, **pod: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "j", **({"annotations": annotations} if annotations is not None else {})},
        "spec": {"template": sample.template(**pod), **(spec or {})},
    }


def pod(annotations: dict[str, str], **spec: Any) -> dict[str, Any]:
    template = sample.template(**spec)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {"name": "p", "annotations": annotations},
    }


OPT_IN = {cluster_name.POLICY: "default"}


def test_an_annotated_job_is_labelled_and_its_template_injected() -> None:
    """The controller finds it by the label; the operations only add."""
    document = job(OPT_IN)
    response = sample.answer(document)
    assert {o["op"] for o in sample.operations(response)} == {"add"}
    result = sample.applied(document, response)
    assert result["metadata"]["labels"] == {cluster_name.MANAGED_BY: "deltashard"}
    notes = result["spec"]["template"]["metadata"]["annotations"]
    assert notes[cluster_name.POLICY] == "default"
    assert cluster_name.INJECTED in notes
    again = sample.answer(result)
    assert again["allowed"]
    assert "patch" not in again


@pytest.mark.parametrize("on", ["job", "template"])
def test_a_job_that_names_its_run_is_found_by_it(on: str) -> None:
    """By a label, so that who holds a run can be asked of the API alone."""
    document = job(OPT_IN)
    notes = {cluster_name.POLICY: "default", cluster_name.RUN_ID: "nightly"}
    if on == "job":
        document["metadata"]["annotations"] = notes
    else:
        document["spec"]["template"].setdefault("metadata", {})["annotations"] = notes
    result = sample.applied(document, sample.answer(document))
    assert result["metadata"]["labels"] == {
        cluster_name.MANAGED_BY: "deltashard",
        cluster_name.RUN_ID: "nightly",
    }


@pytest.mark.parametrize(
    "document",
    [
        job(),
        job({}),
        job({"deltashard.io/encoding": "q9"}),
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"annotations": OPT_IN}, "spec": {}},
        {"apiVersion": "other/v1", "kind": "Job", "metadata": {"annotations": OPT_IN}, "spec": {}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {}},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"annotations": {cluster_name.POLICY: "default", "kubernetes.io/config.mirror": "x"}},
            "spec": {},
        },
    ],
)
def test_everything_else_is_admitted_untouched(document: dict[str, Any]) -> None:
    """Not annotated, or not ours to inject: no patch, no refusal, no policy asked for."""
    untouched = sample.parsed(document)
    assert isinstance(untouched, review.Answer)
    assert untouched.outcome == "unchanged"
    assert untouched.review["response"] == {"uid": "0b4f3c1e-0000-0000-0000-000000000001", "allowed": True}


@pytest.mark.parametrize("on", ["job", "template"])
def test_a_queue_is_asked_for_no_storage(on: str) -> None:
    """A ClusterQueue admits nothing that requests a resource it does not cover: by default processors and memory."""
    document = job(OPT_IN)
    labelled = document if on == "job" else document["spec"]["template"]
    labelled["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    response = sample.answer(document)
    resources = sample.sidecar_of(sample.applied(document, response)["spec"]["template"])["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert "warnings" not in response
    stated = {"sidecar": {"resources": {"requests": {"ephemeral-storage": "2Gi"}}}}
    response = sample.answer(document, stated)
    resources = sample.sidecar_of(sample.applied(document, response)["spec"]["template"])["resources"]
    assert resources["requests"]["ephemeral-storage"] == "2Gi"
    assert "requests ephemeral-storage" in response["warnings"][0]


def test_only_create_counts() -> None:
    """An update of an annotated Job is nobody's to change."""
    assert sample.answer(job(OPT_IN), operation="UPDATE")["allowed"]
    assert "patch" not in sample.answer(job(OPT_IN), operation="UPDATE")


def test_a_refusal_has_code_and_sentence() -> None:
    """The status' reason is the code, the message says what to do."""
    response = sample.answer(job({**OPT_IN, cluster_name.ENCODING: "q7"}))
    assert response["allowed"] is False
    assert response["status"]["reason"] == "BadAnnotation"
    assert response["status"]["code"] == 422
    assert response["status"]["message"].startswith(
        "deltashard.io/encoding: 'q7' is not possible; it takes one of fp32"
    )


def test_a_workload_without_a_policy_is_refused_by_the_policys_name() -> None:
    """What resolving found instead of a policy reaches the user."""
    request = sample.parsed(job({cluster_name.POLICY: "mine"}))
    assert isinstance(request, review.Request)
    (part,) = request.parts
    assert (request.namespace, part.annotations.policy, part.claim) == ("team-a", "mine", None)
    nowhere = Refusal("PolicyNotFound", "no mine in team-a", where=cluster_name.POLICY)
    answer = review.refused(request.uid, request.kind, nowhere)
    assert answer.outcome == "PolicyNotFound"
    assert "no mine in team-a" in answer.review["response"]["status"]["message"]


@pytest.mark.parametrize(
    ("annotations", "code"),
    [({cluster_name.ENCODING: "q7"}, "BadAnnotation"), ({cluster_name.ARENA_SIZE: "1Gi"}, "CopiedManifest")],
)
def test_a_manifest_that_contradicts_itself_is_refused_without_asking_the_api(
    annotations: dict[str, str], code: str
) -> None:
    """Neither its policy nor the holder of its run could make it better."""
    document = job(OPT_IN)
    document = sample.applied(document, sample.answer(document))
    document["metadata"]["annotations"] |= annotations
    refused = sample.parsed(document)
    assert isinstance(refused, review.Answer)
    assert refused.outcome == code


def test_a_run_id_is_claimed_with_all_its_pods() -> None:
    """The claim is of the namespace, and, where each pod trains a run of its own, of every number that one may have."""
    indexed = {"completionMode": "Indexed", "completions": 3}
    for runs, numbering in (("per-pod", Numbering(count=3)), ("one", None)):
        notes = {**OPT_IN, cluster_name.RUN_ID: "nightly", cluster_name.RUNS: runs}
        request = sample.parsed(job(notes, spec=indexed))
        assert isinstance(request, review.Request)
        assert request.parts[0].claim == RunClaim(namespace="team-a", run_id="nightly", numbering=numbering)


def test_a_pod_is_labelled_once() -> None:
    """A pod is its own template."""
    document = pod(OPT_IN)
    result = sample.applied(document, sample.answer(document))
    assert result["metadata"]["labels"] == {cluster_name.MANAGED_BY: "deltashard"}
    assert result["spec"]["initContainers"][0]["name"] == cluster_name.SIDECAR


def test_warnings() -> None:
    """A grace period too short for the policy, a port that is taken, a policy that strands pods of lost nodes, pods that look alike."""
    assert "warnings" not in sample.answer(job(OPT_IN))
    (grace,) = sample.answer(job(OPT_IN, terminationGracePeriodSeconds=45))["warnings"]
    assert "terminationGracePeriodSeconds is 45 s and policy default asks for 120 s" in grace
    spot = {"cloud.google.com/gke-spot": "true"}
    (short,) = sample.answer(job(OPT_IN, nodeSelector=spot))["warnings"]
    assert "give a pod 15 s to end" in short
    assert "warnings" not in sample.answer(job(OPT_IN, nodeSelector=spot), {"gracePeriod": "15s"})
    ports = [{"name": "t", "ports": [{"containerPort": 24464}]}]
    (port,) = sample.answer(job(OPT_IN, containers=ports))["warnings"]
    assert "port 24464" in port
    (stuck,) = sample.answer(job(OPT_IN, spec={"podReplacementPolicy": "Failed"}))["warnings"]
    assert "lost node" in stuck
    (alike,) = sample.answer(job(OPT_IN, spec={"parallelism": 2}))["warnings"]
    assert "completionMode Indexed" in alike
    assert "warnings" not in sample.answer(job(OPT_IN, spec={"parallelism": 2, "completionMode": "Indexed"}))
    (kept,) = sample.answer(job(OPT_IN), {"reclaim": {"policy": "Delete"}})["warnings"]
    assert "will stay" in kept
    assert all(len(w) <= 200 for w in (grace, short, port, stuck, alike, kept))


def test_autoscalers_and_backups_know_that_our_volumes_hold_nothing() -> None:
    """Else a node stays for the cache, and a backup copies it. What the user says stays as it is: templates are immutable."""
    evict, backup = cluster_name.EVICTABLE_VOLUMES, cluster_name.UNSAVED_VOLUMES
    document = job(OPT_IN)
    notes = sample.applied(document, sample.answer(document))["spec"]["template"]["metadata"]["annotations"]
    assert (notes[evict], notes[backup]) == ("deltashard-cache", "deltashard-shm,deltashard-cache")
    document["spec"]["template"]["metadata"]["annotations"] = {evict: "mine"}
    response = sample.answer(document)
    notes = sample.applied(document, response)["spec"]["template"]["metadata"]["annotations"]
    assert notes[evict] == "mine"
    assert "keeps the pod's node" in response["warnings"][0]


def test_a_proxy_that_ends_with_the_trainer_is_warned_of() -> None:
    containers = [{"name": "t", "image": "t"}, {"name": "istio-proxy", "image": "p"}]
    (warning,) = sample.answer(job(OPT_IN, containers=containers))["warnings"]
    assert "istio-proxy is no native sidecar" in warning
    assert len(warning) <= 200
    native = [{"name": "istio-proxy", "image": "p", "restartPolicy": "Always"}]
    assert "warnings" not in sample.answer(job(OPT_IN, initContainers=native))


def test_an_applied_grace_period_of_thirty_is_the_users() -> None:
    """Client-side and server-side apply leave a trace of what was written; changing that would break re-applying."""
    manifest = json.dumps(job(OPT_IN, terminationGracePeriodSeconds=30))
    client_side = job({**OPT_IN, "kubectl.kubernetes.io/last-applied-configuration": manifest})
    client_side["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 30
    server_side = job(OPT_IN, terminationGracePeriodSeconds=30)
    path = {"f:spec": {"f:template": {"f:spec": {"f:terminationGracePeriodSeconds": {}}}}}
    server_side["metadata"]["managedFields"] = [{"operation": "Apply", "fieldsV1": path}]
    for document in (client_side, server_side):
        response = sample.answer(document)
        result = sample.applied(document, response)
        assert result["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30
        assert "may not end in time" in response["warnings"][0]
    server_side["metadata"]["managedFields"][0]["operation"] = "Update"  # holds defaults, too
    for seconds in (120, 15):
        response = sample.answer(server_side, {"gracePeriod": f"{seconds}s"})
        result = sample.applied(server_side, response)
        assert result["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


@pytest.mark.parametrize(
    "body", [{}, [], {"request": {}}, {"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "x"}}]
)
def test_what_is_no_review_is_not_answered(body: Any) -> None:
    """It is the caller's fault, and said so."""
    with pytest.raises(review.BadReview):
        review.parse(json.dumps(body).encode())
