"""Fixtures for chart tests: an API server without deltashard's objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server.apiserver import ApiServer, Rest


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Each test file gets its own server, because a release leaves objects behind."""
    server = ApiServer(tmp_path_factory.mktemp("apiserver"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def http(apiserver: ApiServer) -> Iterator[Rest]:
    """The client has cluster-admin rights."""
    with apiserver.http() as http:
        yield http
