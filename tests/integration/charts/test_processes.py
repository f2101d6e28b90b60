"""Webhook and controller as the release's accounts, on a real API server: the rights they have are enough."""

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
import yaml

from tests.integration.charts.helm import NAMESPACE, Release, render
from tests.support.eventually import eventually
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import free_port

CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/deltashard-webhook"
WAIT_S = 120.0


def account(apiserver: ApiServer, http: Rest, name: str, folder: Path) -> Path:
    """A kubeconfig of one of the release's service accounts."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    reply = http("POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
    assert reply.status == 201, reply.document
    document = yaml.safe_load(apiserver.kubeconfig.read_text())
    document["users"] = [{"name": "admin", "user": {"token": reply.document["status"]["token"]}}]
    written = folder / f"{name}.kubeconfig"
    written.write_text(yaml.safe_dump(document))
    return written


@contextmanager
def running(module: str, log: Path, **flags: Any) -> Iterator[str]:
    """A program of ours with these flags over the chart's; gives the address of its plain pages."""
    port = free_port()
    given = {**flags, "host": "127.0.0.1", "metrics-port": port}
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *(f"--{key}={value}" for key, value in given.items())],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def ready(address: str) -> bool:
    """Whether /healthz is 200."""
    with urllib3.PoolManager(retries=False, timeout=60.0) as pool:
        try:
            return pool.request("GET", f"{address}/healthz").status == 200
        except urllib3.exceptions.HTTPError:
            return False


def written(folder: Path, data: dict[str, str], *, encoded: bool) -> Path:
    """A Secret's or ConfigMap's data as a volume holds it."""
    folder.mkdir()
    for key, value in data.items():
        (folder / key).write_bytes(base64.b64decode(value) if encoded else value.encode())
    return folder


def arguments(deployment: str) -> dict[str, str]:
    """The flags the chart passes."""
    spec = render().find("Deployment", deployment)["spec"]["template"]["spec"]
    return dict(argument.removeprefix("--").split("=", 1) for argument in spec["containers"][0]["args"])


def test_rights_are_enough(apiserver: ApiServer, http: Rest, tmp_path: Path) -> None:
    """The controller issues, publishes and gets ready; the webhook gets ready with what it issued; nobody is refused.

    An upgrade and a second controller find everything in order.
    """
    release = Release(apiserver.kubeconfig, tmp_path)
    release.install()
    policy = written(
        tmp_path / "policy", render().find("ConfigMap", "deltashard-default-policy")["data"], encoded=False
    )
    controller = {
        **arguments("deltashard-controller"),
        "kubeconfig": account(apiserver, http, "deltashard-controller", tmp_path),
        "default-policy": policy / "policy.yaml",
    }
    log = tmp_path / "log"

    def bundles() -> set[str]:
        found = http("GET", CONFIGURATION).document["webhooks"]
        return {each["clientConfig"].get("caBundle", "") for each in found}

    program = "deltashard_operator.controller_main"
    with running(program, log, **controller | {"fleet-port": free_port()}) as address:
        eventually(lambda: ready(address), what="the controller", timeout_s=WAIT_S)
        eventually(lambda: all(bundles()), what="the bundle", timeout_s=WAIT_S)
    issued = bundles()
    root = f"/api/v1/namespaces/{NAMESPACE}"
    tls = http("GET", f"{root}/secrets/deltashard-webhook-tls").document["data"]
    authority = http("GET", f"{root}/configmaps/deltashard-fleet-ca").document["data"]
    webhook = {
        **arguments("deltashard-webhook"),
        "port": free_port(),
        "kubeconfig": account(apiserver, http, "deltashard-webhook", tmp_path),
        "default-policy": policy / "policy.yaml",
        "certificate-dir": written(tmp_path / "tls", tls, encoded=True),
        "fleet-ca": written(tmp_path / "fleet", authority, encoded=False) / "ca.crt",
        "drain-s": 0,
    }
    with running("deltashard_operator.main", log, **webhook) as address:
        eventually(lambda: ready(address), what="the webhook", timeout_s=WAIT_S)
    release.upgrade({"webhook": {"exemptNamespaces": ["legacy"]}})
    assert bundles() == issued
    with running(program, log, **controller | {"fleet-port": free_port()}) as address:
        eventually(lambda: ready(address), what="the controller again", timeout_s=WAIT_S)
    assert bundles() == issued
    assert http("GET", f"{root}/secrets/deltashard-webhook-tls").document["data"] == tls
    said = log.read_text()
    assert "controller.stopped" in said
    for word in ("orbidden", "Traceback"):
        assert word not in said, said[-4000:]
