"""Fixtures of the cluster tests: one shared stage, namespaces per scenario, and a report of each failed scenario.

These tests change the host, restore it afterwards, and need root, so they run only on request: `make test-cluster`.
Where the machine lacks a requirement they are skipped with a warning; with CI=true they fail. Under pytest-xdist, the
controlling process builds the stage and takes it down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kubernetes import cluster
from tests.cluster.kubernetes.host import HOST, HOST_ADDRESS
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.event_server import EventServer
from tests.cluster.scenario.reference import Reference
from tests.cluster.scenario.report import sections
from tests.cluster.scenario.stage import ClusterStage, hold_stage
from tests.support.machine import limit_s
from tests.support.server.minio_server import MinioServer

CI = os.environ.get("CI", "").lower() in {"1", "true"}
_STAGE = pytest.StashKey[ClusterStage]()
_SKIP_REASON = pytest.StashKey[str]()


def _is_full() -> bool:
    return os.environ.get("DELTASHARD_TEST_CLUSTER") == "full"


def _skip_reason() -> str:
    if os.environ.get("DELTASHARD_TEST_CLUSTER") not in {"1", "full"}:
        return "it changes the host while it runs, so it runs only on request: `make test-cluster`"
    lacks = cluster.missing()
    return f"this machine lacks {', '.join(lacks)}" if lacks else ""


def _build(config: pytest.Config) -> str:
    if _SKIP_REASON not in config.stash:
        config.stash[_SKIP_REASON] = _skip_reason()
        if not config.stash[_SKIP_REASON]:
            stage = ClusterStage()
            try:
                stage.build()
            except BaseException:
                stage.tear_down()  # a session that cannot start does not run pytest_sessionfinish either
                raise
            config.stash[_STAGE] = stage
    return config.stash[_SKIP_REASON]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["deltashard_why"] = _build(node.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    stage = session.config.stash.get(_STAGE, None)
    if stage is None:
        return
    timings = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in stage.cluster.timings_s.items())
    print(f"\ncluster: {timings}")
    if left := stage.tear_down():
        print(f"the host is not as it was: {left}")
        # A failed test has its own status, which a passing rerun would excuse.
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


ROUNDS = 3
"""Runs of every scenario in the long variant."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In the long variant, every scenario that leaves the stage unchanged runs several times."""
    exclusive = any(mark.name == "exclusive" for mark in metafunc.definition.iter_markers())
    if _is_full() and "bench" in metafunc.fixturenames and not exclusive:
        metafunc.fixturenames.append("again")
        metafunc.parametrize("again", range(ROUNDS))


_ORDER = (
    "test_queues", "test_containers", "test_changes", "test_survivors", "test_jobsets",
    "test_nodes", "test_pytorchjobs", "test_groups", "test_tenants", "test_stores",
    "test_reclaims", "test_completion", "test_admissions", "test_departures",
)  # fmt: skip
"""The order of the files. xdist assigns two files to each process at once and a process runs one scenario after the
other, so a long file follows a short one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (limit := item.get_closest_marker("timeout")) is not None:
            item.add_marker(pytest.mark.timeout(limit_s(limit.args[0]), **limit.kwargs), append=False)

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("exclusive") is not None:
            return len(_ORDER) + 1
        return _ORDER.index(item.path.stem) if item.path.stem in _ORDER else len(_ORDER)

    items.sort(key=rank)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "no test cluster" in str(r.longrepr)]
    if skipped:
        why = str(skipped[0].longrepr).partition("no test cluster: ")[2].rstrip("')")
        terminalreporter.write_line(
            f"*** {len(skipped)} tests on a real Kubernetes did NOT run: {why} ***", red=True, bold=True
        )


@pytest.fixture(scope="session")
def stage(pytestconfig: pytest.Config) -> ClusterStage:
    workerinput = getattr(pytestconfig, "workerinput", None)
    why = (
        _build(pytestconfig) if workerinput is None else workerinput.get("deltashard_why", "run it by itself")
    )
    if why:
        if CI:
            pytest.fail(f"no test cluster: {why}; it is required in CI", pytrace=False)
        pytest.skip(f"no test cluster: {why}")
    if workerinput is None:
        return pytestconfig.stash[_STAGE]
    attached = ClusterStage()
    attached.attach()
    return attached


@pytest.fixture(scope="session")
def event_server(stage: ClusterStage) -> Iterator[EventServer]:
    """Receive the events of every trainer of this process' scenarios."""
    server = EventServer(HOST_ADDRESS)
    yield server
    server.close()


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def full() -> bool:
    return _is_full()


@pytest.fixture
def stage_lock(request: pytest.FixtureRequest, stage: ClusterStage) -> Iterator[None]:
    """Share the stage with other scenarios; a test marked `exclusive` has it for itself."""
    with hold_stage(exclusive=request.node.get_closest_marker("exclusive") is not None):
        yield


@pytest.fixture
def own_bridge_minio(
    stage: ClusterStage, stage_lock: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MinioServer]:
    """A separate MinIO for this scenario at an address that pods reach; the test may stop, start and fill it."""
    server = MinioServer(tmp_path_factory.mktemp("own-minio"), host=HOST)
    server.start()
    stage.cluster.register_process("own-minio", server.pid)
    yield server
    server.stop()


@pytest.fixture
def bench(
    request: pytest.FixtureRequest,
    stage: ClusterStage,
    stage_lock: None,
    event_server: EventServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[ScenarioBench]:
    """A namespace and a bucket for one scenario; a scenario that uses `own_bridge_minio` gets its own server too."""
    own = "own_bridge_minio" in request.fixturenames
    minio: MinioServer = request.getfixturevalue("own_bridge_minio") if own else stage.minio
    for name, value in minio.environment.items():
        monkeypatch.setenv(name, value)
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    made = ScenarioBench(stage, event_server, reference, name=name, minio=minio, folder=tmp_path)
    try:
        yield made
    finally:
        made.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print a failed scenario's events and its pods' logs before the pods are deleted."""
    report = yield
    bench = getattr(item, "funcargs", {}).get("bench")
    if call.when == "call" and call.excinfo is not None and isinstance(bench, ScenarioBench):
        report.sections += sections(bench)
    return report
