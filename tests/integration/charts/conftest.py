"""A real API server, without anything of ours in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server.apiserver import ApiServer, Rest


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One for each file: a release leaves traces."""
    server = ApiServer(tmp_path_factory.mktemp("apiserver"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def http(apiserver: ApiServer) -> Iterator[Rest]:
    """Requests with all rights."""
    with apiserver.http() as http:
        yield http
