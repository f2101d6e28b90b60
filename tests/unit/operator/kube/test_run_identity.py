"""Identity of a pod's run, as the sidecar reads it. The golden pods cover the kinds of workload."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_checkpoint.format.object_key import validate_run
from deltashard_operator.admission.injection import inject
from deltashard_operator.kube import cluster_name, run_identity
from deltashard_sidecar import settings

from tests.support.operator import sample

UID = "7f0e4f0a-1c52-4c43-9d3c-3f5d1df1a001"
OWNER_UID = "11111111-1c52-4c43-9d3c-3f5d1df1a001"
FIELDS = {
    "metadata.name": "dlrm-0-abcde",
    "metadata.namespace": "team-a",
    "metadata.uid": "22222222-1c52-4c43-9d3c-3f5d1df1a001",
    "spec.nodeName": "n1",
    "metadata.labels['batch.kubernetes.io/job-name']": "dlrm",
    "metadata.labels['batch.kubernetes.io/controller-uid']": UID,
    "metadata.annotations['batch.kubernetes.io/job-completion-index']": "3",
}
JOB_LABELS = {"batch.kubernetes.io/job-name": "dlrm", "batch.kubernetes.io/controller-uid": UID}
JOBSET_LABELS = {"jobset.sigs.k8s.io/jobset-name": "ads", "jobset.sigs.k8s.io/jobset-uid": OWNER_UID}


def environment(
    template: dict[str, Any], recipe: run_identity.IdentityRecipe, **annotations: Any
) -> dict[str, str]:
    injected = inject(template, sample.policy(**annotations), recipe)
    return sample.expanded(sample.sidecar_of(injected), FIELDS)


def pod(labels: dict[str, str], *owners: dict[str, Any]) -> dict[str, Any]:
    metadata = {"labels": labels, "ownerReferences": list(owners)}
    return {"metadata": metadata, "spec": sample.template()["spec"]}


def owner(
    kind: str, *, controller: bool = True, api: str = "apps/v1", uid: str = OWNER_UID
) -> dict[str, Any]:
    return {"kind": kind, "name": "online", "uid": uid, "controller": controller, "apiVersion": api}


OF_JOB = owner("Job", api="batch/v1", uid=UID)
OF_JOBSET = owner("JobSet", api="jobset.x-k8s.io/v1alpha2")


@pytest.mark.parametrize(
    ("document", "recipe"),
    [
        (pod(JOB_LABELS, OF_JOB), run_identity.of_job(sample.template())),
        (pod({**JOB_LABELS, **JOBSET_LABELS}, OF_JOB), run_identity.JOBSET),
        (pod({**JOB_LABELS, **JOBSET_LABELS}), run_identity.POD),
    ],
)
def test_workload_of_a_pod_is_its_owner_reference(
    document: dict[str, Any], recipe: run_identity.IdentityRecipe
) -> None:
    """Injecting the Job or its pod gives the same run. Labels, which any user can write, do not change the workload."""
    assert run_identity.of_pod(document) == recipe


@pytest.mark.parametrize(
    ("kind", "api"), [("Job", "batch.volcano.sh/v1alpha1"), ("StatefulSet", "apps.example.org/v1")]
)
def test_workload_kind_needs_a_matching_api_group(kind: str, api: str) -> None:
    """A Job of another API has no completion index, and its StatefulSet no known ordinals."""
    recipe = run_identity.of_pod(pod(JOB_LABELS, owner(kind, api=api)))
    assert (recipe.uid, recipe.index) == ({"value": OWNER_UID}, {})


def test_pytorch_job_pods_are_numbered_per_replica_type() -> None:
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "1"}
    of_one = pod(labels, owner("PyTorchJob", api="kubeflow.org/v1"))
    assert [run_identity.index_of_pod(each) for each in (of_one, pod(labels))] == ["worker-1", ""]


def test_old_jobset_without_uid_label_is_known_by_the_jobs_owner() -> None:
    """A restarted JobSet creates a Job of the same name with another UID. Run and pod names stay the same."""
    template = sample.template()
    runs = []
    for uid in ("first", "second"):
        metadata = {"name": "online-workers-1", "uid": uid, "ownerReferences": [OF_JOBSET]}
        values = environment(template, run_identity.of_job(template, {"metadata": metadata}))
        runs.append((values["DELTASHARD_RUN"], values["DELTASHARD_REPLICA"], values["DELTASHARD_INDEX"]))
    assert runs == [(f"team-a/online-{OWNER_UID}", "workers-1", "3")] * 2
    own = {"metadata": {"name": "online-1", "ownerReferences": [owner("CronJob", api="batch/v1")]}}
    assert run_identity.of_job(template, own) == run_identity.JOB, "each Job of a CronJob is a separate run"


@pytest.mark.parametrize("run_id", [None, "nightly"])
def test_sidecar_accepts_the_environment(run_id: str | None) -> None:
    template = sample.template()
    values = environment(template, run_identity.of_job(template), run_id=run_id)
    read = settings.load([], values)
    assert read.run == validate_run(values["DELTASHARD_RUN"])
    assert str(read.socket_path) == "/run/deltashard/sidecar.sock"
    assert (read.arena_bytes, read.encoding, read.every_s) == (256 << 20, "q8", 300.0)
    assert read.cache_bytes == (4 << 30) * 9 // 10
    fields = {settings.variable_of(name) for name in settings.Settings.__dataclass_fields__}
    own = {name for name in values if name.startswith("DELTASHARD_")} - fields
    by_name = (
        "WORKLOAD_KIND WORKLOAD_NAME WORKLOAD_UID INDEX REPLICA RUN_ID POLICY FLEET FLEET_TOKEN_FILE FLEET_CA"
    )
    assert own <= {f"DELTASHARD_{each}" for each in by_name.split()}


@pytest.mark.parametrize(
    ("kind", "document", "uid"),
    [
        ("Job", {"metadata": {"name": "j"}}, ""),
        (
            "Job",
            {
                "metadata": {
                    "labels": {cluster_name.JOBSET_UID_LABEL: "s", cluster_name.JOBSET_NAME_LABEL: "set"}
                }
            },
            "s",
        ),
        ("Job", {"metadata": {"ownerReferences": [OF_JOBSET]}}, OWNER_UID),
        ("Pod", {"metadata": {"labels": JOB_LABELS, "ownerReferences": [OF_JOB]}}, UID),
        ("Pod", {"metadata": {"labels": JOB_LABELS}}, ""),
        ("Pod", pod({}, owner("Node", controller=False, uid="a"), owner("StatefulSet", uid="b")), "b"),
        ("Pod", {"metadata": {}}, ""),
    ],
)
def test_workload_of_a_created_object_is_known_if_it_exists(
    kind: str, document: dict[str, Any], uid: str
) -> None:
    assert run_identity.workload_uid(kind, document) == uid
