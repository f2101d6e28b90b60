"""`kubectl deltashard` on a real API server, with the controller's CheckpointRuns, as users with few rights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_cli.kubectl.plugin import main
from deltashard_operator.run import run_record
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.observed_object import Workload

from tests.support.command_line import running
from tests.support.operator.controller_process import MERGE, NamespaceObjects
from tests.support.operator.definition import serving
from tests.support.operator.full_run import full_run
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.kubelet_logs import KubeletLogs
from tests.support.tool import require_tool

SCRIPTS = Path(sys.executable).parent
STALE = Condition(
    type="Stale",
    status="True",
    reason="CheckpointStale",
    message="the newest checkpoint is 20 min old",
    since_s=1e6,
)
NODE = "node-a"
Plugin = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with serving(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture(scope="module")
def http(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as http:
        yield http


@dataclass
class TrainedWorkload:
    """A namespace with a Job, its pod and its CheckpointRun."""

    cluster: NamespaceObjects
    job: dict[str, Any]
    pod: str
    run: str


def injected(cluster: NamespaceObjects, name: str) -> dict[str, Any]:
    golden = yaml.safe_load((Path(__file__).parents[2] / "golden/pods/job.out.yaml").read_text())
    document = copy.deepcopy(golden)
    document["metadata"]["name"] = name
    made = cluster.http.create(document, cluster.namespace)
    assert made.status == 201, made.document
    return made.document


@pytest.fixture
def trained(http: Rest) -> TrainedWorkload:
    """Yield a run that has a value in every status field and a failing condition."""
    cluster = NamespaceObjects.make(http)
    job = injected(cluster, f"train-{uuid.uuid4().hex[:4]}")
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    spec = job["spec"]["template"]["spec"]
    pod = f"{name}-x"
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod},
        "spec": {**spec, "nodeName": NODE},
    }
    document["spec"]["restartPolicy"] = "Never"
    made = http.create(document, cluster.namespace)
    assert made.status == 201, made.document
    base = full_run()
    workload = Workload(namespace=cluster.namespace, kind="Job", name=name, uid=uid, api_version="batch/v1")
    pods = {"p-1": replace(base.pods["p-1"], name=pod, workload=workload)}
    run = replace(base, workload=workload, pods=pods, conditions=(*base.conditions, STALE))
    put(cluster, run_record.document(run), run_record.status(run, run.reconciled_s))
    return TrainedWorkload(cluster, job, pod, run.name)


def put(cluster: NamespaceObjects, document: dict[str, Any], status: dict[str, Any]) -> None:
    made = cluster.http("POST", cluster.path("checkpointruns"), document)
    assert made.status == 201, made.document
    path = cluster.path("checkpointruns", document["metadata"]["name"]) + "/status"
    reply = cluster.http("PATCH", path, {"status": status}, content=MERGE)
    assert reply.status == 200, reply.document


@pytest.fixture
def plugin(apiserver: ApiServer, capsys: pytest.CaptureFixture[str]) -> Plugin:
    """Return a function that runs the entry point and returns (exit code, stdout and stderr)."""
    run = running(capsys, main)

    def with_kubeconfig(*arguments: object, kubeconfig: Path | None = None) -> tuple[int, str]:
        return run(*arguments, "--kubeconfig", kubeconfig or apiserver.kubeconfig)

    return with_kubeconfig


def test_why_by_workload_name(trained: TrainedWorkload, plugin: Plugin) -> None:
    """The output explains the CheckpointRun's status in sentences."""
    name, space = trained.job["metadata"]["name"], trained.cluster.namespace
    code, text = plugin("why", name, "-n", space)
    assert code == 0, text
    for line in (
        "Stale for",
        "the newest checkpoint is 20 min old",
        "Interval: 4 min, for the goal lost-work=5m.",
        "Because a failure loses at most 5 min",
        "Bound: not below 58 s",
        "Evidence: 1.5 lossy failures in 36 h.",
        "The goal is unreachable: at most 5 min of lost work cannot be had.",
        "Error, pod train-x on node-a: container trainer ended with exit code 1",
        "2 restores, 50 steps repeated",
    ):
        assert line in text, text
    found = json.loads(plugin("why", name, "-n", space, "--json")[1])
    assert found["decisions"][0]["goal"] == "lost-work=5m"
    assert found["losses"][0]["cause"] == "Error"


def test_logs(trained: TrainedWorkload, plugin: Plugin, http: Rest, tmp_path: Path) -> None:
    """The output has the last lines of trainer and sidecar. An unavailable log is reported, and the other is shown."""
    space, pod = trained.cluster.namespace, trained.pod
    logs = {
        (pod, "trainer"): "".join(f"step {n}\n" for n in range(100)),
        (pod, "deltashard-sidecar"): "committed\n",
        (pod, "trainer", "previous"): "killed\n",
    }
    with KubeletLogs(http, NODE, tmp_path, logs) as kubelet:
        code, text = plugin("logs", trained.run, "-n", space, "--tail", 3)
        assert code == 0, text
        assert f"==> {pod}/trainer <==\nstep 97\nstep 98\nstep 99" in text
        assert f"==> {pod}/deltashard-sidecar <==\ncommitted" in text
        assert all("limitBytes" in each for each in kubelet.requested)
        code, text = plugin("logs", trained.run, "-n", space, "-p", "-c", "trainer")
        assert "killed" in text
        assert "deltashard-sidecar" not in text
        del logs[pod, "deltashard-sidecar"]
        code, text = plugin("logs", trained.run, "-n", space)
        assert code == 0
        assert "unavailable" in text
        assert "step 99" in text
    assert http("DELETE", trained.cluster.path("pods", pod), {"gracePeriodSeconds": 0}).status == 200
    code, text = plugin("logs", trained.run, "-n", space)
    assert code == 3
    assert "not found" in text


def test_plugin_errors_are_explained(
    trained: TrainedWorkload, plugin: Plugin, apiserver: ApiServer, http: Rest, tmp_path: Path
) -> None:
    """The causes are a missing run, missing rights, API or context. The message has a remedy and no traceback."""
    space = trained.cluster.namespace
    code, text = plugin("why", "absent", "-n", space)
    assert code == 2
    assert f"use one of {trained.run}" in text
    assert "has no runs" in plugin("why", "absent", "-n", "default")[1]
    config = yaml.safe_load(apiserver.kubeconfig.read_text())
    limited = apiserver.kubeconfig_of(space, "default", tmp_path)
    code, text = plugin("why", trained.run, "-n", space, kubeconfig=limited)
    assert code == 2
    assert "cannot list resource" in text
    assert "request the role view" in text
    away = tmp_path / "away"
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    away.write_text(yaml.safe_dump(config))
    code, text = plugin("why", trained.run, kubeconfig=away)
    assert code == 3
    assert "https://127.0.0.1:1" in text
    code, text = plugin("why", "absent", "--context", "absent")
    assert code == 2
    assert "--context" in text
    code, text = plugin("why", "absent", "--json", "--context", "absent")
    assert json.JSONDecoder().raw_decode(text)[0]["error"]["exit"] == 2
    for text in (plugin("why", "absent")[1], plugin("logs")[1]):
        assert "Traceback" not in text


def test_kubectl_finds_plugin() -> None:
    """The plugin runs from PATH, and the help names every command."""
    done = subprocess.run(
        [str(require_tool("kubectl")), "deltashard", "--help"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        env={**os.environ, "PATH": f"{SCRIPTS}:{os.environ['PATH']}"},
    )
    assert done.stdout.startswith("Usage: kubectl deltashard")
    for command in ("why", "logs", "rewind"):
        assert f"  {command} " in done.stdout
