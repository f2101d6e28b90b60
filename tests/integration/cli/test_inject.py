"""`kubectl deltashard inject` sends manifests to the installed webhook through a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deltashard_cli.kubectl.plugin import main
from deltashard_operator.kube import cluster_name

from tests.support.command_line import running
from tests.support.operator.definition import define, serving
from tests.support.operator.webhook_process import WebhookProcess, job, opted, registered
from tests.support.server.apiserver import ApiServer


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with serving(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


def test_manifests_are_injected_without_creating_objects(
    apiserver: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed manifests can be applied. A refusal shows the webhook's message."""
    run = running(capsys, main)
    webhook = WebhookProcess(apiserver, tmp_path)
    webhook.start()
    path = tmp_path / "jobs.yaml"

    def inject(*documents: object) -> tuple[int, str]:
        path.write_text(yaml.safe_dump_all(documents))
        return run("inject", "-f", path, "--kubeconfig", apiserver.kubeconfig)

    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}}
    try:
        with apiserver.http() as http, registered(http, webhook.client_config()):
            code, text = inject(job("trains", opted()), other)
            assert code == 0, text
            made, same = yaml.safe_load_all(text)
            assert same == other
            assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
            template = made["spec"]["template"]
            assert template["metadata"]["annotations"][cluster_name.INJECTED]
            assert [each["name"] for each in template["spec"]["initContainers"]] == [cluster_name.SIDECAR]
            jobs = "/apis/batch/v1/namespaces/default/jobs"
            assert http("GET", jobs).document["items"] == []
            assert http("POST", jobs, made, dry_run=True).status == 201
            code, text = inject(job("trains", opted(interval="soon")))
            assert code == 2
            assert "deltashard.io/interval" in text
            code, text = inject({"kind": "CronJob", "apiVersion": "batch/v1", **cron(job("trains", opted()))})
            assert code == 2
            assert "CronJob trains" in text
            assert "injected when their pods or Jobs are created" in text
            define(http, "jobset.x-k8s.io", "v1alpha2", "JobSet")
            job_template = {"metadata": {"annotations": opted()}, "spec": job("x")["spec"]}
            jobs = {"replicatedJobs": [{"name": "node", "template": job_template}]}
            runtime = {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "ClusterTrainingRuntime",
                "metadata": {"name": "torch"},
                "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": jobs}},
            }
            code, text = inject(runtime)
            assert code == 0, text
            (made,) = yaml.safe_load_all(text)
            assert made["spec"]["mlPolicy"] == {"numNodes": 1}
            (node,) = made["spec"]["template"]["spec"]["replicatedJobs"]
            assert node["template"]["metadata"]["labels"] == {cluster_name.MANAGED_BY: "deltashard"}
            assert cluster_name.SIDECAR in str(node["template"]["spec"]["template"]["spec"]["initContainers"])
    finally:
        webhook.stop()


def cron(made: dict[str, object]) -> dict[str, object]:
    template = {"metadata": made["metadata"], "spec": made["spec"]}
    return {"metadata": {"name": "trains"}, "spec": {"schedule": "0 0 * * *", "jobTemplate": template}}
