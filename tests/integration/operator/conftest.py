"""A real API server with the policies' resource, and a real webhook process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltashard_operator.fleet import token_review
from deltashard_operator.kube.api_access import ApiAccess

from tests.support.operator.definition import serving
from tests.support.operator.webhook_process import WebhookProcess
from tests.support.server.apiserver import ApiServer, Rest


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One API server serves the whole session."""
    with serving(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture(scope="session")
def http(apiserver: ApiServer) -> Iterator[Rest]:
    with apiserver.http() as http:
        yield http


@pytest.fixture
def api(apiserver: ApiServer) -> ApiAccess:
    return apiserver.access()


@pytest.fixture(autouse=True)
def relaxed_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the API server may take longer than the production timeout."""
    monkeypatch.setattr(token_review, "REVIEW_S", 120.0)


@pytest.fixture(scope="session")
def shared_webhook(
    apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WebhookProcess]:
    """Tests share this webhook process and must not stop it."""
    running = WebhookProcess(apiserver, tmp_path_factory.mktemp("webhook"))
    running.start()
    yield running
    running.stop(signal.SIGKILL)


@pytest.fixture
def webhook(apiserver: ApiServer, tmp_path: Path) -> Iterator[WebhookProcess]:
    running = WebhookProcess(apiserver, tmp_path)
    running.start()
    yield running
    if running.process is not None:
        running.stop(signal.SIGKILL)
