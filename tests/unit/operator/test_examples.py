"""examples/kubernetes: every manifest is what its kind's API takes, and is injected to what is on record.

A golden file, `tests/golden/examples/<manifest>.out.yaml`, is the Job or pod that the manifest's controller creates,
after its admission under policy.yaml. `DELTASHARD_GOLDEN=write` writes them anew: read the diff.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_operator.admission.workload_kind import KINDS
from deltashard_operator.kube import cluster_name
from deltashard_operator.policy.annotation import Annotations
from deltashard_operator.policy.workload_policy import merged, resolve

from tests.support.operator import sample
from tests.support.published import MINIO, PUBLISHED
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import ROOT
from tests.unit.operator.test_goldens import _annotated

EXAMPLES = ROOT / "examples" / "kubernetes"
GOLDEN = ROOT / "tests" / "golden" / "examples"
UID = "7f0e4f0a-1c52-4c43-9d3c-3f5d1df1a009"
BUILTIN = {"v1", "apps/v1", "batch/v1", "deltashard.io/v1alpha1"}
DEFAULTS = {
    "sidecar": {"image": PUBLISHED[0].name},
    "fleet": {
        "address": "deltashard-fleet.deltashard-system.svc:9443",
        "ca": "-----BEGIN CERTIFICATE-----\n",
    },
}
"""Like the chart's: all but the store."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
POLICY = documents(EXAMPLES / "policy.yaml")[0]
WORKLOADS = [path for path in MANIFESTS if f"{cluster_name.POLICY}:" in path.read_text()]


def _id(path: Path) -> str:
    return path.stem


def _owned(kind: str, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    version, name = manifest["apiVersion"], manifest["metadata"]["name"]
    return [{"apiVersion": version, "kind": kind, "name": name, "uid": UID, "controller": True}]


def _of_jobset(name: str, replicated: dict[str, Any]) -> dict[str, Any]:
    """The first Job that the JobSet controller makes of one of its templates."""
    job = copy.deepcopy(replicated["template"])
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/jobset-uid": UID,
        "jobset.sigs.k8s.io/job-global-index": "0",
        "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
    }
    metadata = job.get("metadata") or {}
    metadata["name"] = f"{name}-{replicated['name']}-0"
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    pods = job["spec"]["template"].setdefault("metadata", {})
    pods["labels"] = {**(pods.get("labels") or {}), **labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["spec"]}


def admitted(path: Path) -> dict[str, Any]:
    """What reaches the webhook: the manifest, or what its controller makes of it."""
    manifest = copy.deepcopy(documents(path)[0])
    kind, spec, name = manifest["kind"], manifest["spec"], manifest["metadata"]["name"]
    if kind == "CronJob":
        metadata = {**spec["jobTemplate"]["metadata"], "name": f"{name}-29012345"}
        metadata["ownerReferences"] = _owned(kind, manifest)
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": spec["jobTemplate"]["spec"],
        }
    if kind == "JobSet":
        return _of_jobset(name, spec["replicatedJobs"][0])
    if kind == "TrainingRuntime":
        return _of_jobset(
            documents(path)[1]["metadata"]["name"], spec["template"]["spec"]["replicatedJobs"][0]
        )
    if kind == "StatefulSet":
        metadata = spec["template"]["metadata"]
        metadata["name"] = f"{name}-0"
        metadata["labels"]["apps.kubernetes.io/pod-index"] = "0"
        metadata["ownerReferences"] = _owned(kind, manifest)
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec["template"]["spec"]}
    return manifest


def injected(path: Path) -> dict[str, Any]:
    """The same after its admission."""
    document = admitted(path)
    response = sample.answer(document, merged(POLICY["spec"], DEFAULTS))
    assert response["allowed"], response
    return sample.applied(document, response)


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """A pod as the Job's controller would create it; a pod is itself."""
    if document["kind"] == "Pod":
        return document
    template = document["spec"]["template"]
    labels = {
        **(template["metadata"].get("labels") or {}),
        cluster_name.JOB_UID_LABEL: UID,
        cluster_name.JOB_NAME_LABEL: document["metadata"]["name"],
    }
    metadata = {**template["metadata"], "labels": labels, "name": f"{document['metadata']['name']}-abcde"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("path", WORKLOADS, ids=_id)
def test_an_example_is_injected_to_what_is_on_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the policy of the examples and the chart's defaults."""
    monkeypatch.setattr("deltashard_operator.admission.injection.VERSION", "0.1.0")
    result, golden = injected(path), GOLDEN / f"{path.stem}.out.yaml"
    if os.environ.get("DELTASHARD_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(yaml.safe_dump(result, sort_keys=False, width=110))
    assert result == yaml.safe_load(golden.read_text())


@pytest.mark.parametrize("path", WORKLOADS, ids=_id)
def test_an_example_has_its_line_where_the_table_says(path: Path) -> None:
    """At the place to recommend, and nowhere else; the policy it names is the one of policy.yaml."""
    manifest = documents(path)[0]
    kind = next(each for each in KINDS if each.kind == manifest["kind"])
    found = [place for place in kind.annotate_at if _annotated(manifest, place.split("."))]
    assert found == [kind.annotate_at[0]]
    assert admitted(path)["kind"] == kind.injected_as
    said = re.findall(rf"{re.escape(cluster_name.POLICY)}: (\S+)", path.read_text())
    assert said == [POLICY["metadata"]["name"]]


def test_every_kind_has_an_example() -> None:
    """And each example of a workload is of a kind that is documented."""
    assert {each.kind for each in KINDS} == {documents(path)[0]["kind"] for path in WORKLOADS}


def test_images_and_arguments_exist() -> None:
    """An example names images that are published, and flags that the trainer has."""
    published = {each.name for each in PUBLISHED} | {MINIO}
    trainer = (EXAMPLES / "train.py").read_text()
    for path in MANIFESTS:
        text = path.read_text()
        assert set(re.findall(r"image: (\S+)", text)) <= published, path
        for flag in re.findall(r"(--[a-z-]+)=", " ".join(re.findall(r"args: (.*)", text))):
            assert f'"{flag}"' in trainer, flag


def test_exit_codes_are_those_of_the_trainer() -> None:
    """The rules of the podFailurePolicy, the comments and the scripts speak of the same codes."""
    from deltashard.attach import exit_code, term_signal

    manifest = documents(EXAMPLES / "job-pod-failure-policy.yaml")[0]
    rules = manifest["spec"]["podFailurePolicy"]["rules"]
    values = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert values == {"Ignore": [term_signal.EXIT_SIGTERM], "FailJob": [2, exit_code.EXIT_TAKEN_OVER]}
    assert manifest["spec"]["podReplacementPolicy"] == "Failed"
    assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    job = documents(EXAMPLES / "job.yaml")[0]["spec"]
    assert "podFailurePolicy" not in job
    assert "podReplacementPolicy" not in job
    assert job["backoffLimit"] > 6, "the default would end a long training"
    for told in (EXAMPLES / "job.yaml").read_text(), (EXAMPLES / "train.py").read_text():
        assert f"{exit_code.EXIT_TAKEN_OVER}" in told
        assert f"{term_signal.EXIT_SIGTERM}" in told


def test_the_policy_is_one() -> None:
    """policy.yaml is read without a complaint, and its store is the MinIO of minio.yaml."""
    policy = resolve("baskets", merged(POLICY["spec"], DEFAULTS), Annotations(policy="baskets"))
    secret, deployment, service = documents(EXAMPLES / "minio.yaml")
    port = service["spec"]["ports"][0]["port"]
    assert f"http://{service['metadata']['name']}:{port}" in policy.url
    bucket = deployment["spec"]["template"]["spec"]["initContainers"][0]["command"][-1].rpartition("/")[2]
    assert policy.url.startswith(f"s3://{bucket}/")
    assert set(secret["stringData"]) == {"MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"}
    volumes = documents(EXAMPLES / "reader.yaml")[0]["spec"]["volumes"]
    assert {"secretName": policy.secret_name} in [each.get("secret") for each in volumes]


PLURALS = {"CheckpointPolicy": "checkpointpolicies"}


def _post(rest: Rest, document: dict[str, Any], namespace: str) -> None:
    version = document["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = PLURALS.get(document["kind"], document["kind"].lower() + "s")
    path = f"{root}/namespaces/{namespace}/{plural}?fieldValidation=Strict"
    reply = rest("POST", path, document, dry_run=True)
    assert reply.status == 201, reply.document
    assert not reply.warnings, reply.warnings


def test_a_real_api_server_takes_them(apiserver: ApiServer) -> None:
    """Every built-in kind and the policy, as written and as injected, in a namespace under PodSecurity restricted.

    No field unknown, no warning; the pods of all workloads fit the standard too, with their sidecar.
    """
    with apiserver.http() as rest:
        rest.namespace(
            "examples", {f"pod-security.kubernetes.io/{how}": "restricted" for how in ("enforce", "warn")}
        )
        for path in MANIFESTS:
            for document in documents(path):
                if document["apiVersion"] in BUILTIN:
                    _post(rest, document, "examples")
        for path in WORKLOADS:
            document = injected(path)
            document["metadata"].pop("ownerReferences", None)  # of an object that nobody made
            _post(rest, document, "examples")
            _post(rest, pod_of(document), "examples")
