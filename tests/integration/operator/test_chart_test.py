"""What `helm test` runs, against a real API server with and without a real webhook."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.eventually import eventually
from tests.support.operator.webhook_process import WebhookProcess, configuration, has_sidecar, job, opted
from tests.support.server.apiserver import ApiServer, Rest

HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"

Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def rest(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as rest:
        yield rest


@pytest.fixture
def kubeconfig(apiserver: ApiServer, rest: Rest, tmp_path: Path) -> Path:
    """As an account that may create Jobs in `default`, and nothing else: what the chart gives to the test."""
    name = f"chart-test-{uuid.uuid4().hex[:8]}"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    assert rest.create(account).status == 201
    root = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    rule = {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create"]}
    assert rest("POST", f"{root}/roles", {"metadata": {"name": name}, "rules": [rule]}).status == 201
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
    }
    assert rest("POST", f"{root}/rolebindings", binding).status == 201
    with apiserver.http(f"system:serviceaccount:default:{name}") as own:
        eventually(lambda: own.create(job("probe"), dry_run=True).status == 201, what="the right in force")
    path = f"/api/v1/namespaces/default/serviceaccounts/{name}/token"
    reply = rest("POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
    assert reply.status == 201, reply.document
    document = yaml.safe_load(apiserver.kubeconfig.read_text())
    document["users"] = [{"name": "admin", "user": {"token": reply.document["status"]["token"]}}]
    written = tmp_path / "kubeconfig"
    written.write_text(yaml.safe_dump(document))
    return written


@pytest.fixture
def configured(rest: Rest) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Register the webhook under a `clientConfig`, in force, until the test ends."""
    names = []

    def in_force() -> bool:
        reply = rest.create(job("probe", opted()), dry_run=True)
        return reply.status != 201 or has_sidecar(reply)

    def configure(client_config: dict[str, Any]) -> None:
        document = configuration(client_config)
        document["metadata"]["name"] = name = f"chart-test-{uuid.uuid4().hex[:8]}"
        assert rest("POST", HOOKS, document).status == 201
        names.append(name)
        eventually(in_force, what="the configuration in force")

    yield configure
    for name in names:
        rest("DELETE", f"{HOOKS}/{name}")
    eventually(lambda: not in_force(), what="the configuration's end")


@pytest.fixture
def ask(kubeconfig: Path) -> Ask:
    """Run the test as the chart does."""

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        module = "deltashard_operator.chart_test"
        return subprocess.run(
            [sys.executable, "-m", module, f"--kubeconfig={kubeconfig}", "--pause-s=0.1", *flags],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    return run


def test_an_installation_that_works(
    webhook: WebhookProcess, configured: Callable[[dict[str, Any]], None], ask: Ask
) -> None:
    """Exit 0, and each sentence says what was seen; waits until it is so."""
    configured(webhook.client_config())
    done = ask("--policy=default", "--deadline-s=60")
    assert done.returncode == 0, done.stdout + done.stderr
    good = [line for line in done.stdout.splitlines() if line.startswith("ok: ")]
    assert len(good) == 3
    assert good[2].endswith("gets the sidecar registry.example/deltashard-sidecar:0.1.0")


def test_without_a_default_policy_the_way_is_tested(
    webhook: WebhookProcess, configured: Callable[[dict[str, Any]], None], ask: Ask
) -> None:
    """No store is known then, so no sidecar can be expected."""
    configured(webhook.client_config())
    done = ask("--deadline-s=60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok: ") == 2


def test_nobody_answers(
    webhook: WebhookProcess, configured: Callable[[dict[str, Any]], None], ask: Ask
) -> None:
    """Exit 1, with what the API server said; Jobs without the annotation are seen to be left alone."""
    configured(webhook.client_config())
    webhook.stop(signal.SIGKILL)
    done = ask("--policy=default", "--deadline-s=1")
    assert done.returncode == 1
    assert "ok: a Job without deltashard.io/policy is left alone" in done.stdout
    assert "not yet: the webhook did not answer: 500" in done.stdout
    assert "failed: not so within 1 s" in done.stdout


def test_the_bundle_is_of_another_authority(
    webhook: WebhookProcess, configured: Callable[[dict[str, Any]], None], ask: Ask, apiserver: ApiServer
) -> None:
    """Says what the API server says."""
    other = base64.b64encode((apiserver.directory / "ca.crt").read_bytes()).decode()
    configured({**webhook.client_config(), "caBundle": other})
    done = ask("--deadline-s=1")
    assert done.returncode == 1
    assert "x509" in done.stdout


def test_an_exempt_namespace(ask: Ask) -> None:
    """Nothing has a say there: that is no proof of anything, and said."""
    done = ask("--deadline-s=1")
    assert done.returncode == 1
    assert "is default exempt?" in done.stdout


def test_no_api(tmp_path: Path) -> None:
    """Outside of a pod and without a kubeconfig: one sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "deltashard_operator.chart_test"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("deltashard-chart-test: ")
    assert "Traceback" not in done.stderr
