"""A sidecar for one test, a trainer with an open attempt in it, and a server for its reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer
from tests.support.server.fleet_server import CertificateAuthority, FleetServer
from tests.support.sidecar_process import SidecarProcess, sidecar


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a store on a directory, or on `minio` for tests that request it."""
    if getattr(request, "param", "file") == "file":
        return f"file://{tmp_path}/store"
    return str(request.getfixturevalue("minio_url"))


@pytest.fixture(scope="session")
def authority() -> CertificateAuthority:
    return CertificateAuthority()


@pytest.fixture
def server(authority: CertificateAuthority) -> Iterator[FleetServer]:
    with FleetServer(authority) as one:
        yield one


@pytest.fixture
def process(tmp_path: Path, url: str) -> Iterator[SidecarProcess]:
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as one:
        yield one


@pytest.fixture
def trainer(process: SidecarProcess) -> Iterator[Trainer]:
    one = Trainer(process.socket, FakeModel())
    one.open()
    yield one
    one.close()
