"""Fixtures that several test directories share."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import flaky_rerun, gpu, progress
from tests.support.machine import timeout_scale
from tests.support.server.cloud_server import Azurite, CloudServer, FakeGcs
from tests.support.server.minio_server import MinioServer
from tests.support.tool import MISSING
from tests.support.trainer.rank_zygote import RankZygote

# The time in which a busy machine answers a snapshot is not under test.
os.environ.setdefault("DELTASHARD_HOLD_S", "30")
# Until its sidecar has finished a save the next save is rejected as busy. That time is not under test either.
os.environ.setdefault("DELTASHARD_BRIEF_WAIT_S", "10")

TEMPORARY = "deltashard-tests-"
"""Prefix of a session's temporary directory."""

LEAST_FREE_GIB = 2
"""Required free disk space. Passed tests' files are removed, so a whole run needs little more."""

pytest.register_assert_rewrite("tests.support.checkpoint.store_conformance")
# The duration of an example depends on the machine and is not under test.
# The examples are the same in every run, so that a new failure comes from a change; DELTASHARD_FUZZ=1 draws new ones.
settings.register_profile(
    "any-machine",
    parent=settings(),
    deadline=None,
    derandomize=not os.environ.get("DELTASHARD_FUZZ"),
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine before any worker starts, since workers inherit the result, and show progress."""
    timeout_scale()
    if not hasattr(config, "workerinput"):
        # A run's directory in /dev/shm is named by a hash of its store's URL, and outlives the tests. pytest would use
        # the names of its temporary directories again once /tmp is emptied: tests would find the files of earlier ones.
        config.option.basetemp = config.option.basetemp or tempfile.mkdtemp(prefix=TEMPORARY)
        free_gib = shutil.disk_usage(tempfile.gettempdir()).free / (1 << 30)
        if free_gib < LEAST_FREE_GIB:
            raise pytest.UsageError(
                f"{tempfile.gettempdir()} has {free_gib:.1f} GiB free, and the tests need {LEAST_FREE_GIB}: on a full disk "
                "their object stores refuse writes, and correct tests fail. Free disk space, or set TMPDIR"
            )
        config.pluginmanager.register(progress.ProgressReporter(config), "deltashard-progress")
        if config.getoption("numprocesses", None):
            config.pluginmanager.register(flaky_rerun.FlakyRerun(), "deltashard-flaky-rerun")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run unit tests last: they are short, and keep every process busy at the end."""
    items.sort(key=lambda item: "tests/unit/" in item.nodeid)


def pytest_collection_finish() -> None:
    """Freeze what was imported and collected: the garbage collector takes a second to traverse it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep the temporary folder of a failed run; delete that of a passed one."""
    temporary = Path(session.config.option.basetemp)
    is_controller = not hasattr(session.config, "workerinput")
    if is_controller and exitstatus == pytest.ExitCode.OK and temporary.name.startswith(TEMPORARY):
        shutil.rmtree(temporary, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(each.longrepr) for each in terminalreporter.stats.get("skipped", [])]
    for tool in sorted({found[1] for each in skipped if (found := MISSING.search(each))}):
        count = sum(f"no {tool}: `make servers`" in each for each in skipped)
        terminalreporter.write_line(
            f"*** {count} tests on the real {tool} did NOT run: `make servers` builds it ***",
            red=True,
            bold=True,
        )
    if count := sum(bool(gpu.MISSING.search(each)) for each in skipped):
        terminalreporter.write_line(
            f"*** {count} tests on a GPU did NOT run: torch finds no CUDA device ***", red=True, bold=True
        )


@pytest.fixture(scope="session")
def minio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MinioServer]:
    """One real MinIO for the session. Do not stop it: `own_minio` is for tests that break the server."""
    server = MinioServer(tmp_path_factory.mktemp("minio"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_minio(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MinioServer]:
    """A real MinIO for one test, with its credentials in the environment; the test may kill, stop and restart it."""
    server = MinioServer(tmp_path_factory.mktemp("own-minio"))
    server.start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
    shutil.rmtree(server.directory)


@pytest.fixture
def minio_url(minio_server: MinioServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in minio_server.environment.items():
        monkeypatch.setenv(name, value)
    return minio_server.url(minio_server.new_bucket())


@pytest.fixture(scope="session")
def rank_zygote() -> Iterator[RankZygote]:
    """The process that ranks are forked from; its start takes longer than most scenarios."""
    zygote = RankZygote()
    yield zygote
    zygote.close()


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
    for name, value in google_server.environment.items():
        monkeypatch.setenv(name, value)
    return google_server


@pytest.fixture
def azure(azure_server: CloudServer, monkeypatch: pytest.MonkeyPatch) -> CloudServer:
    for name, value in azure_server.environment.items():
        monkeypatch.setenv(name, value)
    return azure_server


@pytest.fixture(params=["google", "azure"])
def cloud(request: pytest.FixtureRequest) -> CloudServer:
    server: CloudServer = request.getfixturevalue(request.param)
    return server
