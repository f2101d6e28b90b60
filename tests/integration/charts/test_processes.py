"""Webhook and controller with a release's service accounts and namespaced rights, on a real API server.

`tests/load` runs both with cluster-wide rights and compares their requests with the audit log.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import urllib3

from tests.support.eventually import eventually
from tests.support.helm import NAMESPACE, Release, render
from tests.support.operator.webhook_process import job
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import free_port

SYSTEM = f"/api/v1/namespaces/{NAMESPACE}"
RUNS = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointruns"
VALUES = {"watchNamespaces": ["team-a", "team-b"], "defaultPolicy": {"store": {"url": "s3://x-y/z"}}}
WAIT_S = 120.0


def write_volume(folder: Path, data: dict[str, str], *, encoded: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for key, value in data.items():
        (folder / key).write_bytes(base64.b64decode(value) if encoded else value.encode())
    return folder


class Programs:
    """Both programs of a release with the chart's flags and service accounts."""

    def __init__(self, apiserver: ApiServer, http: Rest, folder: Path) -> None:
        self._apiserver, self._http, self._folder, self.log = apiserver, http, folder, folder / "log"

    def mounted(self) -> Path:
        data = self._http("GET", f"{SYSTEM}/secrets/deltashard-tls").document.get("data") or {}
        return write_volume(self._folder / "tls", data, encoded=True)

    @contextmanager
    def running(self, name: str, module: str, **flags: object) -> Iterator[None]:
        rendering, port = render(VALUES), free_port()
        args = rendering.find("Deployment", name)["spec"]["template"]["spec"]["containers"][0]["args"]
        policy = rendering.find("ConfigMap", "deltashard-default-policy")["data"]
        more = {
            **flags,
            "host": "127.0.0.1",
            "metrics-port": port,
            "default-policy": write_volume(self._folder / "policy", policy) / "policy.yaml",
            "certificate-dir": self.mounted(),
            "kubeconfig": self._apiserver.kubeconfig_of(NAMESPACE, name, self._folder),
        }
        command = [sys.executable, "-m", module, *args, *(f"--{key}={value}" for key, value in more.items())]
        with self.log.open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )

        def ready() -> bool:
            self.mounted()
            try:
                return pool.request("GET", f"http://127.0.0.1:{port}/healthz").status == 200
            except urllib3.exceptions.HTTPError:
                return False

        try:
            with urllib3.PoolManager(retries=False, timeout=60.0) as pool:
                eventually(ready, what=lambda: self.log.read_text()[-2000:], timeout_s=WAIT_S)
                yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)


def annotated(name: str, **labels: str) -> dict[str, Any]:
    """Return an annotated Job, optionally with the label and sidecar that the webhook adds."""
    sidecar = {"name": "deltashard-sidecar", "image": "sidecar", "restartPolicy": "Always"}
    notes = {"deltashard.io/policy": "default"}
    document = job(name, notes, **({"initContainers": [sidecar]} if labels else {}))
    document["metadata"]["labels"] = labels
    document["spec"]["template"]["metadata"] = {"annotations": notes, "labels": labels}
    return document


def test_programs_run_with_namespaced_rights(apiserver: ApiServer, http: Rest, tmp_path: Path) -> None:
    """Both programs become ready with rights in a list of namespaces. The webhook refuses annotated Jobs elsewhere.

    The next pod of a Job that already has its sidecar is admitted.
    """
    ours = {"deltashard.io/managed-by": "deltashard"}
    for name in ("team-a", "team-b", "team-c"):
        http.namespace(name)
        assert http.create(annotated("before", **ours), name).status == 201
    Release(apiserver.kubeconfig, tmp_path).install(VALUES)
    programs = Programs(apiserver, http, tmp_path)
    with programs.running(
        "deltashard-controller", "deltashard_operator.controller_main", **{"fleet-port": free_port()}
    ):
        for place in ("team-a", "team-b"):
            path = RUNS.format(place)
            eventually(lambda path=path: http("GET", path).document["items"], what=path, timeout_s=WAIT_S)
        assert http("GET", RUNS.format("team-c")).document["items"] == []
    authority = http("GET", f"{SYSTEM}/configmaps/deltashard-fleet-ca").document["data"]
    flags = {
        "port": free_port(),
        "fleet-ca": write_volume(tmp_path / "fleet", authority) / "ca.crt",
        "drain-s": 0,
    }
    with programs.running("deltashard-webhook", "deltashard_operator.main", **flags):
        pass
    log = programs.log.read_text()
    assert "controller.stopped" in log
    assert not [word for word in ("orbidden", "Traceback") if word in log], log[-4000:]

    def refusal(place: str) -> str:
        reply = http.create(annotated("late"), place, dry_run=True)
        assert reply.status in {422, 500}, reply.document
        return str(reply.document["message"])

    sentence = "namespace team-c is not watched by deltashard; add it to watchNamespaces of the chart"
    eventually(lambda: sentence in refusal("team-c"), what="the policy's refusal", timeout_s=WAIT_S)
    assert "jobs.deltashard.io" in refusal("team-a"), "the API server calls the stopped webhook"
    assert http.create(annotated("before-2", **ours), "team-c", dry_run=True).status == 201
