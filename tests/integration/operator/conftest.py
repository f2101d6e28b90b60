"""A real API server for the operator's tests, with the policies' resource in it, and a real webhook process."""

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
    """One real API server for the session."""
    with serving(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture(scope="session")
def http(apiserver: ApiServer) -> Iterator[Rest]:
    """It over HTTP, document by document, with all rights."""
    with apiserver.http() as http:
        yield http


@pytest.fixture
def api(apiserver: ApiServer) -> ApiAccess:
    """How it is called, with all rights."""
    return apiserver.access()


@pytest.fixture(autouse=True)
def relaxed_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server on a machine with other work may take longer than a sidecar would wait before it comes again."""
    monkeypatch.setattr(token_review, "REVIEW_S", 120.0)


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
