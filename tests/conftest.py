"""Fixtures that several test directories share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.minio import MinioServer

pytest.register_assert_rewrite("deltashard_checkpoint.stores.conformance")
# How long an example takes says something about the machine, nothing about what is tested.
settings.register_profile(
    "any-machine", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly when a tier did not run."""
    for reason, server in (("no MinIO", "MinIO"), ("no apiserver", "kube-apiserver")):
        skipped = [each for each in terminalreporter.stats.get("skipped", []) if reason in str(each.longrepr)]
        if skipped:
            terminalreporter.write_line(
                f"*** {len(skipped)} tests on the real {server} did NOT run: install Go 1.25 (see tools/build) ***",
                red=True,
                bold=True,
            )


@pytest.fixture(scope="session")
def minio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MinioServer]:
    """One real MinIO for the session. Do not stop it: `own_minio` is yours to break."""
    server = MinioServer(tmp_path_factory.mktemp("minio"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_minio(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MinioServer]:
    """A real MinIO of this test's own, with its credentials in the environment: kill it, stop it, start it again."""
    server = MinioServer(tmp_path_factory.mktemp("own-minio"))
    server.start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.fixture
def minio_url(minio_server: MinioServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new, empty bucket of the session's MinIO, whose credentials are in the environment."""
    for name, value in minio_server.environment.items():
        monkeypatch.setenv(name, value)
    return minio_server.url(minio_server.new_bucket())
