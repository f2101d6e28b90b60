"""What `helm test` runs, against a real API server with and without a real webhook."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltashard_operator import chart_test

from tests.support.eventually import eventually
from tests.support.operator.webhook_process import WebhookProcess, job, registered
from tests.support.server.apiserver import ApiServer, Rest

Ask = Callable[..., int]


@pytest.fixture
def rest(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as rest:
        yield rest


@pytest.fixture
def ask(apiserver: ApiServer, rest: Rest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run the test as an account that may create Jobs in `default`, and nothing else: what the chart gives to it."""
    name = f"chart-test-{uuid.uuid4().hex[:8]}"
    group = "rbac.authorization.k8s.io"
    root = f"/apis/{group}/v1/namespaces/default"
    rule = {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create"]}
    binding: dict[str, Any] = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    assert rest.create(account).status == 201
    assert rest("POST", f"{root}/roles", {"metadata": {"name": name}, "rules": [rule]}).status == 201
    assert rest("POST", f"{root}/rolebindings", binding).status == 201
    token = rest("POST", f"/api/v1/namespaces/default/serviceaccounts/{name}/token", {"spec": {}})
    with apiserver.http(f"system:serviceaccount:default:{name}") as own:
        eventually(lambda: own.create(job("probe"), dry_run=True).status == 201, what="the right in force")
    document = yaml.safe_load(apiserver.kubeconfig.read_text())
    document["users"][0]["user"] = {"token": token.document["status"]["token"]}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(chart_test, "PAUSE_S", 0.1)
    return lambda *flags: chart_test.main([f"--kubeconfig={tmp_path}/kubeconfig", *flags])


def test_an_installation_is_asked_until_it_works_or_the_time_is_up(
    shared_webhook: WebhookProcess,
    rest: Rest,
    ask: Ask,
    apiserver: ApiServer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It says what was seen, or what the API server said. Without a policy only the way to the webhook is asked for."""
    assert ask("--deadline-s=1") == 1
    assert "is default exempt?" in capfd.readouterr().err
    good = shared_webhook.client_config()
    with registered(rest, good) as change:
        assert ask() == 0
        assert capfd.readouterr().out == "ok: the webhook answers\n"
        assert ask("--policy=default") == 0
        assert "gets the sidecar registry.example/deltashard-sidecar:" in capfd.readouterr().out
        change({**good, "url": "https://127.0.0.1:1/mutate"})
        eventually(lambda: ask("--deadline-s=1") == 1, what="the change in force")
        said = capfd.readouterr().err
        assert "not yet: the webhook did not answer: 500" in said
        assert "failed: not so within 1 s" in said
        change(good)


def test_no_api() -> None:
    """Outside of a pod and without a kubeconfig: one sentence."""
    command = [sys.executable, "-m", "deltashard_operator.chart_test"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("deltashard-chart-test: ")
    assert "Traceback" not in done.stderr
