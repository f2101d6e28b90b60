"""Identity: what a pod's sidecar will know of its workload, expanded as a kubelet does and read as the sidecar does."""

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
    "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "ads",
    "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": OWNER_UID,
    "metadata.labels['jobset.sigs.k8s.io/job-global-index']": "1",
    "metadata.labels['apps.kubernetes.io/pod-index']": "2",
}
JOB_LABELS = {"batch.kubernetes.io/job-name": "dlrm", "batch.kubernetes.io/controller-uid": UID}
JOBSET_LABELS = {"jobset.sigs.k8s.io/jobset-name": "ads", "jobset.sigs.k8s.io/jobset-uid": OWNER_UID}


def environment(
    template: dict[str, Any], recipe: run_identity.IdentityRecipe, **annotations: Any
) -> dict[str, str]:
    """The sidecar's environment in a running pod."""
    injected = inject(template, sample.policy(**annotations), recipe)
    return sample.expanded(sample.sidecar_of(injected), FIELDS)


def pod(labels: dict[str, str], *owners: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"labels": labels, "ownerReferences": list(owners)},
        "spec": sample.template()["spec"],
    }


def owner(
    kind: str, *, controller: bool = True, api: str = "apps/v1", uid: str = OWNER_UID
) -> dict[str, Any]:
    return {"kind": kind, "name": "online", "uid": uid, "controller": controller, "apiVersion": api}


OF_JOB = owner("Job", api="batch/v1", uid=UID)
OF_JOBSET = owner("JobSet", api="jobset.x-k8s.io/v1alpha2")


def test_a_job_is_one_run_for_all_its_pods() -> None:
    """The run is the Job's name and UID under its namespace: nothing of the pod is in it."""
    template = sample.template()
    values = environment(template, run_identity.of_job(template))
    assert values["DELTASHARD_RUN"] == f"team-a/dlrm-{UID}"
    assert values["DELTASHARD_OWNER"] == values["DELTASHARD_RUN"]
    assert (values["DELTASHARD_WORKLOAD_KIND"], values["DELTASHARD_INDEX"]) == ("Job", "3")


def test_a_run_id_names_the_run_whoever_runs_it() -> None:
    """With run-id neither run nor owner has a UID in it: a new Job goes on with the older one's run."""
    template = sample.template()
    values = environment(template, run_identity.of_job(template), run_id="nightly")
    assert values["DELTASHARD_RUN"] == values["DELTASHARD_OWNER"] == "team-a/nightly"
    assert values["DELTASHARD_WORKLOAD_UID"] == UID


def test_a_jobs_pod_injected_by_itself_has_the_jobs_identity() -> None:
    """Whether the Job or its pod was injected makes no other run."""
    recipe = run_identity.of_pod(pod(JOB_LABELS, OF_JOB))
    assert recipe == run_identity.of_job(sample.template())


def test_a_jobsets_child_belongs_to_the_jobset() -> None:
    """A JobSet makes its Jobs anew when it restarts: the run is the JobSet's, the replica says which Job."""
    template = sample.template()
    template["metadata"]["labels"] = JOBSET_LABELS
    values = environment(template, run_identity.of_job(template))
    assert values["DELTASHARD_RUN"] == f"team-a/ads-{OWNER_UID}"
    assert (values["DELTASHARD_WORKLOAD_KIND"], values["DELTASHARD_REPLICA"]) == ("JobSet", "1")
    assert run_identity.of_pod(pod({**JOB_LABELS, **JOBSET_LABELS}, OF_JOB)) == run_identity.JOBSET


def test_a_jobset_that_is_too_old_to_label_its_uid_is_known_by_the_jobs_owner() -> None:
    """Restarted, it makes a Job of the same name and another UID: that is the same run, and its pods have the same names."""
    template = sample.template()
    runs = []
    for uid in ("first", "second"):
        metadata = {"name": "online-workers-1", "uid": uid, "ownerReferences": [OF_JOBSET]}
        values = environment(template, run_identity.of_job(template, {"metadata": metadata}))
        runs.append((values["DELTASHARD_RUN"], values["DELTASHARD_REPLICA"], values["DELTASHARD_INDEX"]))
    assert runs == [(f"team-a/online-{OWNER_UID}", "workers-1", "3")] * 2
    own = {"metadata": {"name": "online-1", "ownerReferences": [owner("CronJob", api="batch/v1")]}}
    assert run_identity.of_job(template, own) == run_identity.JOB, "each Job of a CronJob is a run of its own"


def test_a_kind_is_told_by_its_group_too() -> None:
    """Another API's Job has no completion index, and its StatefulSet no ordinals that we know of."""
    volcano = run_identity.of_pod(pod(JOB_LABELS, owner("Job", api="batch.volcano.sh/v1alpha1")))
    assert volcano != run_identity.JOB
    assert (volcano.uid, volcano.index) == ({"value": OWNER_UID}, {})
    other = run_identity.of_pod(pod({}, owner("StatefulSet", api="apps.example.org/v1")))
    assert other.index == {}


def test_labels_make_no_pod_anothers() -> None:
    """Whoever makes a pod writes its labels; who owns it, its ownerReference says."""
    assert run_identity.of_pod(pod({**JOB_LABELS, **JOBSET_LABELS})) == run_identity.POD


def test_other_pods_belong_to_their_controller() -> None:
    """A StatefulSet's pods know its UID and their ordinal."""
    document = pod({}, owner("Node", controller=False), owner("StatefulSet"))
    values = environment(document, run_identity.of_pod(document))
    assert values["DELTASHARD_RUN"] == f"team-a/online-{OWNER_UID}"
    assert (values["DELTASHARD_WORKLOAD_KIND"], values["DELTASHARD_INDEX"]) == ("StatefulSet", "2")


def test_a_pytorch_jobs_pods_are_numbered_within_their_part() -> None:
    """Made anew under its old name a pod is of the same run: the PyTorchJob's, whose UID its ownerReference has."""
    labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "1"}
    document = pod(labels, owner("PyTorchJob", api="kubeflow.org/v1"))
    recipe = run_identity.of_pod(document)
    said = {each["name"]: each for each in run_identity.environment(recipe, None)}
    for name, label in (("DELTASHARD_INDEX", "index"), ("DELTASHARD_REPLICA", "type")):
        path = said[name]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == f"metadata.labels['training.kubeflow.org/replica-{label}']"
    assert (recipe.kind, recipe.name, recipe.uid) == ("PyTorchJob", {"value": "online"}, {"value": OWNER_UID})
    assert run_identity.index_of_pod(document) == "worker-1"
    assert run_identity.index_of_pod(pod(labels)) == "", "labels make no pod another's"


def test_a_pod_of_nobody_is_its_own_workload() -> None:
    """A bare pod's name (perhaps generated) and UID are read from itself."""
    document = pod({})
    values = environment(document, run_identity.of_pod(document))
    assert values["DELTASHARD_RUN"] == f"team-a/{FIELDS['metadata.name']}-{FIELDS['metadata.uid']}"


@pytest.mark.parametrize("run_id", [None, "nightly"])
def test_the_sidecar_takes_the_environment(run_id: str | None) -> None:
    """The sidecar's own reader accepts every value, and each of our variables is one it knows or one it is given by name."""
    template = sample.template()
    values = environment(template, run_identity.of_job(template), run_id=run_id)
    read = settings.load([], values)
    assert read.run == validate_run(values["DELTASHARD_RUN"])
    assert str(read.socket_path) == "/run/deltashard/sidecar.sock"
    assert (read.arena_bytes, read.encoding, read.every_s) == (256 << 20, "q8", 300.0)
    assert read.cache_bytes == (4 << 30) * 9 // 10
    fields = {settings.variable_of(name) for name in settings.Settings.__dataclass_fields__}
    ours = {name for name in values if name.startswith("DELTASHARD_")} - fields
    assert ours <= {
        "DELTASHARD_WORKLOAD_KIND",
        "DELTASHARD_WORKLOAD_NAME",
        "DELTASHARD_WORKLOAD_UID",
        "DELTASHARD_INDEX",
        "DELTASHARD_REPLICA",
        "DELTASHARD_RUN_ID",
        "DELTASHARD_POLICY",
        "DELTASHARD_FLEET",
        "DELTASHARD_FLEET_TOKEN_FILE",
        "DELTASHARD_FLEET_CA",
    }


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
def test_the_workload_of_what_is_created_is_known_where_it_exists(
    kind: str, document: dict[str, Any], uid: str
) -> None:
    assert run_identity.workload_uid(kind, document) == uid
