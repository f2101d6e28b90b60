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

from tests.support.eventually import eventually
from tests.support.helm import NAMESPACE, Release, render
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import free_port

ROOT = f"/api/v1/namespaces/{NAMESPACE}"
SECRET = f"{ROOT}/secrets/deltashard-tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/deltashard-webhook"
WAIT_S = 120.0


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
    folder.mkdir(exist_ok=True)
    for key, value in data.items():
        (folder / key).write_bytes(base64.b64decode(value) if encoded else value.encode())
    return folder


def mounted(http: Rest, folder: Path) -> Path:
    """The certificate's volume, as the kubelet has it by now."""
    return written(folder, http("GET", SECRET).document.get("data") or {}, encoded=True)


def arguments(deployment: str, values: dict[str, Any] | None = None) -> dict[str, str]:
    """The flags the chart passes."""
    spec = render(values).find("Deployment", deployment)["spec"]["template"]["spec"]
    return dict(argument.removeprefix("--").split("=", 1) for argument in spec["containers"][0]["args"])


class Programs:
    """Both of a release, by the flags that the chart passes, as its accounts."""

    def __init__(self, apiserver: ApiServer, http: Rest, folder: Path, values: dict[str, Any]) -> None:
        self._http, self._folder, self.log = http, folder, folder / "log"
        data = render(values).find("ConfigMap", "deltashard-default-policy")["data"]
        shared = {"default-policy": written(folder / "policy", data, encoded=False) / "policy.yaml"}
        shared["certificate-dir"] = mounted(http, folder / "tls")
        self._flags = {
            name: {
                **arguments(name, values),
                **shared,
                "kubeconfig": apiserver.kubeconfig_of(NAMESPACE, name, folder),
            }
            for name in ("deltashard-controller", "deltashard-webhook")
        }

    @contextmanager
    def controller(self) -> Iterator[None]:
        """The controller, once it is ready."""
        flags = self._flags["deltashard-controller"] | {"fleet-port": free_port()}
        with running("deltashard_operator.controller_main", self.log, **flags) as address:
            eventually(
                lambda: mounted(self._http, self._folder / "tls") and ready(address),
                what=lambda: self.log.read_text()[-2000:],
                timeout_s=WAIT_S,
            )
            yield

    def webhook_gets_ready(self) -> None:
        """With what the controller issued."""
        authority = self._http("GET", f"{ROOT}/configmaps/deltashard-fleet-ca").document["data"]
        fleet_ca = written(self._folder / "fleet", authority, encoded=False) / "ca.crt"
        flags = self._flags["deltashard-webhook"] | {"port": free_port(), "fleet-ca": fleet_ca, "drain-s": 0}
        with running("deltashard_operator.main", self.log, **flags) as address:
            eventually(lambda: ready(address), what="the webhook", timeout_s=WAIT_S)

    def assert_nothing_was_forbidden(self) -> None:
        said = self.log.read_text()
        for word in ("orbidden", "Traceback"):
            assert word not in said, said[-4000:]


def test_rights_are_enough(apiserver: ApiServer, http: Rest, tmp_path: Path) -> None:
    """The controller issues, publishes and gets ready; the webhook gets ready with what it issued; nobody is refused.

    An upgrade and a second controller find everything in order.
    """
    release = Release(apiserver.kubeconfig, tmp_path)
    release.install()
    programs = Programs(apiserver, http, tmp_path, {})

    def bundles() -> set[str]:
        found = http("GET", CONFIGURATION).document["webhooks"]
        return {each["clientConfig"].get("caBundle", "") for each in found}

    with programs.controller():
        eventually(lambda: all(bundles()), what="the bundle", timeout_s=WAIT_S)
    issued, tls = bundles(), http("GET", SECRET).document["data"]
    programs.webhook_gets_ready()
    release.upgrade({"webhook": {"exemptNamespaces": ["legacy"]}})
    assert bundles() == issued
    with programs.controller():
        pass
    assert bundles() == issued
    assert http("GET", SECRET).document["data"] == tls
    assert "controller.stopped" in programs.log.read_text()
    programs.assert_nothing_was_forbidden()


def job(name: str, **labels: str) -> dict[str, Any]:
    """An annotated Job; with our label, as the webhook leaves it, with its sidecar."""
    notes = {"deltashard.io/policy": "default"}
    sidecar = {"name": "deltashard-sidecar", "image": "sidecar", "restartPolicy": "Always"}
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "train"}]}
    if labels:
        pod["initContainers"] = [sidecar]
    template = {"metadata": {"annotations": notes, "labels": labels}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "annotations": notes, "labels": labels},
        "spec": {"template": template},
    }


def test_some_namespaces_alone(apiserver: ApiServer, http: Rest, tmp_path: Path) -> None:
    """Both get ready with rights in a list of namespaces, and keep what is there; elsewhere an annotated Job is refused.

    The next pod of a Job that has its sidecar from before is not.
    """
    release = Release(apiserver.kubeconfig, tmp_path)
    values = {"watchNamespaces": ["team-a", "team-b"], "defaultPolicy": {"store": {"url": "s3://x-y/z"}}}
    ours = {"deltashard.io/managed-by": "deltashard"}
    if release.name in release("list", "--short"):
        release.uninstall()
    for name in ("team-a", "team-b", "team-c"):
        http.namespace(name)
        assert http.create(job("before", **ours), name).status == 201
    release.install(values)
    runs = "/apis/deltashard.io/v1alpha1/namespaces/{}/checkpointruns"
    programs = Programs(apiserver, http, tmp_path, values)
    with programs.controller():
        for place in ("team-a", "team-b"):
            path = runs.format(place)
            eventually(lambda path=path: http("GET", path).document["items"], what=path, timeout_s=WAIT_S)
        assert http("GET", runs.format("team-c")).document["items"] == []
    programs.webhook_gets_ready()
    programs.assert_nothing_was_forbidden()

    def refusal(place: str) -> str:
        reply = http.create(job("late"), place, dry_run=True)
        assert reply.status in {422, 500}, reply.document
        return str(reply.document["message"])

    sentence = "namespace team-c is not watched by deltashard; have it added to watchNamespaces of the chart"
    eventually(lambda: sentence in refusal("team-c"), what="the policy", timeout_s=WAIT_S)
    assert "jobs.deltashard.io" in refusal("team-a"), "is sent to the webhook, which is gone"
    assert http.create(job("before-2", **ours), "team-c", dry_run=True).status == 201
