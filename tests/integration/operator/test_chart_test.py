"""The program of `helm test` against a real API server, with and without a real webhook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltashard_operator import chart_test

from tests.support.eventually import eventually
from tests.support.operator.webhook_process import WebhookProcess, job, registered
from tests.support.server.apiserver import ApiServer, Rest

Ask = Callable[..., int]


@pytest.fixture
def ask(apiserver: ApiServer, http: Rest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run the test with the chart's rights: the account may only create Jobs in `default`."""
    user = "system:serviceaccount:default:trainer"
    http.grant(user, "default", {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create"]})
    with apiserver.http(user) as own:
        eventually(lambda: own.create(job("probe"), dry_run=True).status == 201, what="the right is applied")
    kubeconfig = apiserver.kubeconfig_of("default", "trainer", tmp_path)
    monkeypatch.setattr(chart_test, "PAUSE_S", 0.1)
    return lambda *flags: chart_test.main([f"--kubeconfig={kubeconfig}", *flags])


def test_chart_test_polls_until_success_or_timeout(
    shared_webhook: WebhookProcess,
    http: Rest,
    ask: Ask,
    apiserver: ApiServer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The output has the test's findings or the API server's error. Without a policy only the connection is checked."""
    assert ask("--deadline-s=1") == 1
    assert "is default exempt?" in capfd.readouterr().out
    good = shared_webhook.client_config()
    with registered(http, good) as change:
        assert ask() == 0
        assert capfd.readouterr().out == "ok: the webhook answers\n"
        assert ask("--policy=default") == 0
        assert "gets the sidecar ['registry.example/deltashard-sidecar:" in capfd.readouterr().out
        change({**good, "url": "https://127.0.0.1:1/mutate"})
        eventually(lambda: ask("--deadline-s=1") == 1, what="the change is applied")
        assert "not yet: POST failed: 500" in capfd.readouterr().out
        change(good)
