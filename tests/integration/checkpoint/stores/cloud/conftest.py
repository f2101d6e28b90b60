"""The servers of Google's and Azure's storage, one each for the session's worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server.cloud_server import Azurite, CloudServer, FakeGcs


@pytest.fixture(scope="session")
def google_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudServer]:
    server = FakeGcs(tmp_path_factory.mktemp("gcs"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudServer]:
    server = Azurite(tmp_path_factory.mktemp("azurite"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def google(google_server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> CloudServer:
    """With its credentials in the environment."""
    for name, value in google_server.environment.items():
        monkeypatch.setenv(name, value)
    return google_server


@pytest.fixture
def azure(azure_server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> CloudServer:
    """With its credentials in the environment."""
    for name, value in azure_server.environment.items():
        monkeypatch.setenv(name, value)
    return azure_server


@pytest.fixture(params=["google", "azure"])
def cloud(request: pytest.FixtureRequest) -> CloudServer:
    """Each server in turn."""
    server: CloudServer = request.getfixturevalue(request.param)
    return server
