"""A real API server for the operator's tests, with the policies' resource in it, and a real webhook process."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from deltashard_operator.fleet import token_review
from deltashard_operator.kube import webhook_configuration
from deltashard_operator.tls import authority as authorities
from kubernetes import client

from tests.integration.operator.tls.test_certificate import put
from tests.support.operator import sample
from tests.support.server.apiserver import ApiServer, Authority
from tests.support.server.minio_server import ROOT, free_port, wait_for

GROUP = "apiextensions.k8s.io/v1"
DEFINITIONS = sorted((ROOT / "charts/deltashard/templates/crds").glob("*.yaml"))
"""The chart's own custom resources."""


def install_definitions(server: ApiServer) -> None:
    """Make the custom resources and wait until they are served."""
    with server.http() as http:
        for path in DEFINITIONS:
            made = http("POST", f"/apis/{GROUP}/customresourcedefinitions", yaml.safe_load(path.read_text()))
            assert made.status == 201, made.document
            spec = made.document["spec"]
            place = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            wait_for(lambda place=place: http("GET", place).status == 200, what=place)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """A real API server that knows our resources."""
    server = ApiServer(folder)
    server.start()
    try:
        install_definitions(server)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One real API server for the session."""
    with serving(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture
def api(apiserver: ApiServer) -> Iterator[client.ApiClient]:
    """A client of it with all rights."""
    with apiserver.api() as api:
        yield api


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server on a machine with other work may take longer than a sidecar would wait before it comes again."""
    monkeypatch.setattr(token_review, "CONNECT_S", 60.0)
    monkeypatch.setattr(token_review, "READ_S", 60.0)
    monkeypatch.setattr(token_review, "REVIEW_S", 120.0)
    monkeypatch.setattr(authorities, "TIMEOUT_S", (60.0, 60.0))


@dataclass
class WebhookProcess:
    """`deltashard-webhook` as the chart runs it, on loopback; `start` and `stop` as often as wanted."""

    apiserver: ApiServer
    directory: Path
    drain_s: float = 0.5
    authority: Authority = field(default_factory=Authority)
    port: int = 0
    metrics_port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self, *, certificate: bool = True) -> None:
        """Start and wait until it says that it is ready; without a certificate, until it is alive."""
        self.port, self.metrics_port = self.port or free_port(), free_port()
        (self.directory / "policy.yaml").write_text(yaml.safe_dump(sample.DEFAULTS))
        if certificate:
            put(self.directory, self.authority.issue())
        flags = {
            "host": "127.0.0.1",
            "port": self.port,
            "metrics-port": self.metrics_port,
            "certificate-dir": self.directory,
            "default-policy": self.directory / "policy.yaml",
            "kubeconfig": self.apiserver.kubeconfig,
            "drain-s": self.drain_s,
        }
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deltashard_operator.main", *(f"--{k}={v}" for k, v in flags.items())],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        page = "healthz" if certificate else "livez"
        wait_for(lambda: self.get(page)[0] == 200, timeout_s=120, what="the webhook")

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a plain page; status 0 when nobody answers."""
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text()
        with urllib3.PoolManager(retries=False, timeout=60.0) as http:
            try:
                reply = http.request("GET", f"http://127.0.0.1:{self.metrics_port}/{path}")
            except urllib3.exceptions.HTTPError:
                return 0, ""
            return reply.status, reply.data.decode()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.process = None
        return status

    def client_config(self, *authorities: Authority) -> dict[str, Any]:
        """How the API server reaches it."""
        bundle = b"".join(each.pem for each in authorities or (self.authority,))
        return {
            "url": f"https://127.0.0.1:{self.port}{webhook_configuration.PATH}",
            "caBundle": base64.b64encode(bundle).decode(),
        }


@pytest.fixture(scope="session")
def shared_webhook(
    apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    """One running webhook for the session: ask it, do not stop it."""
    running = WebhookProcess(apiserver, tmp_path_factory.mktemp("webhook"))
    running.start()
    yield running
    running.stop(signal.SIGKILL)


@pytest.fixture
def webhook(apiserver: ApiServer, tmp_path: Path) -> Iterator[WebhookProcess]:
    """A running webhook of this test's own."""
    running = WebhookProcess(apiserver, tmp_path)
    running.start()
    yield running
    if running.process is not None:
        running.stop(signal.SIGKILL)
