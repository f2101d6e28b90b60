"""Injection into templates: at the level that Kueue counts, with pods matched later and repeated applies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from deltashard_operator.kube import cluster_name

from tests.support.operator import sample
from tests.support.operator.golden import manifests

Document = dict[str, Any]
UID = "7f0e4f0a-1c52-4c43-9d3c-3f5d1df1a001"


def created(document: Document) -> Document:
    response = sample.answer(document)
    assert response["allowed"], response
    return sample.applied(document, response)


def template_of(document: Document, name: str = "Worker") -> Document:
    if document["kind"] == "JobSet":
        (replicated,) = document["spec"]["replicatedJobs"]
        document, name = replicated["template"], "spec"
    else:
        document = document["spec"]["pytorchReplicaSpecs"]
    template: Document = document[name]["template"]
    return template


@pytest.fixture(params=["jobset", "pytorchjob"])
def manifest(request: pytest.FixtureRequest) -> Document:
    return manifests(request.param)[0]


def test_template_without_the_annotation_is_unchanged() -> None:
    document = manifests("pytorchjob")[0]
    del document["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["metadata"]
    result = created(document)
    assert template_of(result, "Master") == template_of(document, "Master")
    assert sample.sidecar_of(template_of(result))


@pytest.mark.parametrize("known", [True, False])
def test_jobset_template_is_injected_for_its_job(known: bool) -> None:
    """The Job is found by its labels. Its sidecar gets the JobSet's UID and the number of pods from the Job."""
    (replicated,) = created(manifests("jobset")[0])["spec"]["replicatedJobs"]
    made = manifests("jobset")[-1]
    job = copy.deepcopy(replicated["template"])
    assert job["metadata"]["labels"][cluster_name.MANAGED_BY] == "deltashard"
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        metadata.setdefault("labels", {}).update(made["metadata"]["labels"])
    document = {"apiVersion": "batch/v1", "kind": "Job", **job, "metadata": {**job["metadata"], "name": "j"}}
    document["spec"]["completions"] = 3  # as in an elastic JobSet or a TrainJob
    sidecar = sample.sidecar_of(document["spec"]["template"])
    if not known:  # a runtime's own template has no number of pods
        sidecar["env"] = [each for each in sidecar["env"] if each["name"] != "DELTASHARD_PODS"]
    result = created(document)
    labels = {f"metadata.labels['{key}']": value for key, value in made["metadata"]["labels"].items()}
    values = sample.expanded(sample.sidecar_of(result["spec"]["template"]), labels)
    assert values["DELTASHARD_WORKLOAD_UID"] == UID
    assert values["DELTASHARD_RUN_ID"] == f"ads-{UID}"
    assert values["DELTASHARD_PODS"] == "3"


def test_jobset_controller_without_uid_label_must_be_upgraded() -> None:
    (replicated,) = created(manifests("jobset")[0])["spec"]["replicatedJobs"]
    owner = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "name": "ads",
        "uid": UID,
        "controller": True,
    }
    metadata = {**replicated["template"]["metadata"], "name": "ads-0", "ownerReferences": [owner]}
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"], "metadata": metadata}
    status = sample.answer(job)["status"]
    assert (status["reason"], "upgrade it to 0.9" in status["message"]) == ("Unsupported", True)


def test_pytorch_job_pod_gets_the_workload_uid() -> None:
    """No label contains the UID. A definition without native sidecars drops the sidecar's restart policy."""
    template = template_of(created(manifests("pytorchjob")[0]))
    del sample.sidecar_of(template)["restartPolicy"]
    pod = manifests("pytorchjob")[-1]
    notes = template["metadata"]["annotations"]
    document = {**pod, "spec": template["spec"], "metadata": {**pod["metadata"], "annotations": notes}}
    result = created(document)
    sidecar = sample.sidecar_of(result)
    values = sample.expanded(sidecar, {})
    assert values["DELTASHARD_RUN_ID"] == "ranks-7f0e4f0a-1c52-4c43-9d3c-3f5d1df1a010"
    assert sidecar["restartPolicy"] == "Always"
    assert "patch" not in sample.answer(result)


def test_injection_removed_by_apply_is_restored(manifest: Document) -> None:
    """Apply replaces whole lists. The earlier injection is restored, not one by the current policy."""
    before = created(manifest)
    changed = {"arenaSize": "1Gi"}
    for applied in (copy.deepcopy(manifest), copy.deepcopy(before)):
        inner = template_of(applied)["spec"]["containers"][0]
        inner.pop("env", None)
        inner.pop("volumeMounts", None)
        if applied != manifest:  # a runtime's sidecar, which Trainer applies again, has no number of pods
            sidecar = sample.sidecar_of(template_of(applied))
            sidecar["env"] = [each for each in sidecar["env"] if each["name"] != "DELTASHARD_PODS"]
        response = sample.answer(applied, changed, operation="UPDATE", before=before)
        assert response["allowed"]
        assert sample.applied(applied, response) == before
    unchanged = sample.answer(before, changed, operation="UPDATE", before=before)
    assert "patch" not in unchanged


def test_annotation_changes_after_create_are_refused(manifest: Document) -> None:
    """The injected sidecar would keep the old values."""
    before = created(manifest)
    text = yaml.safe_dump(manifest).replace("policy: default", "policy: other")
    response = sample.answer(yaml.safe_load(text), operation="UPDATE", before=before)
    assert response["status"]["reason"] == "BadAnnotation"
    assert "create it again" in response["status"]["message"]


def test_older_object_is_injected_through_its_jobs_and_pods(manifest: Document) -> None:
    assert "patch" not in sample.answer(manifest, operation="UPDATE", before=manifest)
