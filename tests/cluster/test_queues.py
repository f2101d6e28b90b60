"""Workloads that wait in a Kueue queue: admitted workloads train and resume, and Kueue counts what the pods request.

The queues cover only cpu and memory, as those of Kueue's own guide.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import yaml
from deltashard_operator.kube import quantity

from tests.cluster.kubernetes.api import Object
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario import kueue
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.group import jobset
from tests.cluster.scenario.job import POLICY, SIDECAR
from tests.cluster.scenario.kubeflow_group import pytorch_job, train_job

pytestmark = pytest.mark.timeout(600, func_only=True)

STEPS = 150
COUNTED = ("cpu", "memory")
QUEUED = {kueue.QUEUE: kueue.NAME}
NOWHERE = {"nodeSelector": {"deltashard.test/nowhere": "x"}}
"""Node selector of pods that tests only inspect: no node matches it."""


def resource_requests(containers: list[Object]) -> dict[str, Fraction]:
    requests = [(each.get("resources") or {}).get("requests") or {} for each in containers]
    return {
        what: sum((quantity.parse(each.get(what, 0)) for each in requests), Fraction()) for what in COUNTED
    }


def pod_requests(specs: list[Object]) -> dict[str, Fraction]:
    assert all(SIDECAR in {each["name"] for each in spec["initContainers"]} for spec in specs)
    sidecars = [
        each for spec in specs for each in spec["initContainers"] if each.get("restartPolicy") == "Always"
    ]
    return resource_requests([*sidecars, *(each for spec in specs for each in spec["containers"])])


def read(usage: Object) -> dict[str, Fraction]:
    return {what: quantity.parse(much) for what, much in usage.items()}


def test_queued_job_counts_sidecar_and_resumes(bench: ScenarioBench, tmp_path: Path) -> None:
    """The queue has room for one Job and the trainer of a second, but not for its sidecar, so the second waits.

    The first Job loses its pod, resumes, and ends; then the second trains.
    """
    kueue.install(bench.cluster, tmp_path)
    bench.note("Kueue is installed")
    manifest = bench.manifest("first", steps=STEPS, labels=QUEUED)
    path = f"/apis/batch/v1/namespaces/{bench.namespace}/jobs?dryRun=All"
    template = bench.cluster.api.create(path, manifest)["spec"]["template"]["spec"]
    trainer, whole = resource_requests(template["containers"]), pod_requests([template])
    quota = {what: f"{int((trainer[what] + whole[what]) * 1000)}m" for what in COUNTED}
    kueue.queue(bench, **quota)
    first = bench.job("first", steps=STEPS, labels=QUEUED)
    kueue.wait_condition(first, "Admitted")
    assert [(count, read(usage)) for count, usage in kueue.counted(first)] == [(1, whole)]
    second = bench.job("second", labels=QUEUED)
    condition = kueue.wait_condition(second, "QuotaReserved", "False")
    assert "insufficient unused quota" in condition["message"], condition
    bench.note(condition["message"])

    start = bench.start_event(first, 0)
    committed = bench.wait_commits(first)
    first.delete_pod(start["pod"], force=True)
    back = bench.start_event(first, 1)
    assert back["pod"] != start["pod"]
    bench.assert_resumed(back, at_least=committed)
    assert second.get()["spec"]["suspend"]
    assert not second.pods(), "neither a trainer nor a sidecar"
    first.wait_complete()
    assert bench.newest(first) == STEPS
    bench.start_event(second, 0)


def rendered(bench: ScenarioBench, runtime: Object) -> Object:
    """Render a runtime with the sidecar in it, as an administrator does: Kueue counts TrainJobs by their runtime."""
    file = bench.folder / "runtime.yaml"
    file.write_text(yaml.safe_dump(runtime))
    made: Object = yaml.safe_load(bench.plugin("inject", "-f", file))
    return made


def test_queue_counts_group_sidecars(bench: ScenarioBench, tmp_path: Path) -> None:
    """Kueue reserves for an admitted JobSet, TrainJob or PyTorchJob what its pods request, with sidecars."""
    kueue.install(bench.cluster, tmp_path)
    kueue.queue(bench, cpu="4", memory="8Gi")
    # A runtime does not know that its TrainJobs are queued, so its policy requests resources that no queue here covers.
    bench.policy(bench.namespace, "queued", sidecar={"resources": {"requests": {"ephemeral-storage": "0"}}})
    groups = [
        jobset(bench, "set", pods=2, labels=QUEUED, pod=NOWHERE),
        train_job(
            bench, "night", nodes=2, labels=QUEUED, pod=NOWHERE,
            notes={POLICY: "queued"}, rendered=partial(rendered, bench),
        ),
        pytorch_job(bench, "ranks", workers=2, labels=QUEUED, pod=NOWHERE),
    ]  # fmt: skip
    for job in (each.job for each in groups):
        kueue.wait_condition(job, "Admitted")
        counted = kueue.counted(job)
        pods = sum(count for count, _ in counted)
        wait_until(
            lambda job=job, pods=pods: len(job.pods()) == pods,
            timeout_s=60,
            what=f"{pods} pods of {job.name}",
            every_s=0.3,
        )
        taken = {what: sum((read(usage)[what] for _, usage in counted), Fraction()) for what in COUNTED}
        assert taken == pod_requests([each["spec"] for each in job.pods()]), job.name
