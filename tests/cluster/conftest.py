"""One cluster for the session, a real MinIO on its bridge, a namespace per test.

These tests change the host (and put it back) and need root, so they only run when asked: `make test-cluster`. Where the
machine lacks something they are skipped, loudly; with CI=true they fail.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster import clusters, images
from tests.cluster.apis import Api
from tests.cluster.clusters import Cluster
from tests.cluster.hosts import HOST_ADDRESS
from tests.cluster.jobs import TrainingJob
from tests.cluster.processes import wait_until
from tests.cluster.witnesses import Witness
from tests.minio import MinioServer

CI = os.environ.get("CI", "").lower() in {"1", "true"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly when the tier did not run."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "no test cluster" in str(r.longrepr)]
    if skipped:
        why = str(skipped[0].longrepr).partition("no test cluster: ")[2].rstrip("')")
        terminalreporter.write_line(
            f"*** {len(skipped)} tests on a real Kubernetes did NOT run: {why} ***", red=True, bold=True
        )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, both nodes Ready."""
    if os.environ.get("DELTASHARD_TEST_CLUSTER") != "1":
        pytest.skip("changes the host while it runs: `make test-cluster`")
    if lacks := clusters.missing():
        why = f"no test cluster: this machine lacks {', '.join(lacks)}"
        if CI:
            pytest.fail(f"{why}; it is required in CI", pytrace=False)
        pytest.skip(why)
    made = Cluster()
    try:
        made.up(images.build(tmp_path_factory.mktemp("images")))
        yield made
    finally:
        left = made.down()
    assert not left, f"the host is not as it was: {left}"


@pytest.fixture(scope="session")
def bridge_minio(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MinioServer]:
    """A real MinIO where pods reach it."""
    server = MinioServer(tmp_path_factory.mktemp("bridge-minio"), host=HOST_ADDRESS)
    server.start()
    cluster.remember("minio", server.pid)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def witness(cluster: Cluster) -> Iterator[Witness]:
    """Hears every trainer of the session."""
    heard = Witness(HOST_ADDRESS)
    yield heard
    heard.close()


def make_namespace(api: Api, name: str, credentials: dict[str, str]) -> None:
    """A namespace under PodSecurity restricted, with the store's credentials in its Secret `store`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create(
        "/api/v1/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
    )
    text = "[default]\n" + "".join(f"{key.lower()} = {value}\n" for key, value in credentials.items())
    api.create(
        f"/api/v1/namespaces/{name}/secrets",
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "store"},
            "data": {"credentials": base64.b64encode(text.encode()).decode()},
        },
    )
    wait_until(
        lambda: api.find(f"/api/v1/namespaces/{name}/serviceaccounts/default"),
        timeout_s=30,
        what=f"the service account of {name}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a scenario works with."""

    cluster: Cluster
    witness: Witness
    namespace: str
    url: str
    job: Callable[..., TrainingJob]


@pytest.fixture
def bench(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    bridge_minio: MinioServer,
    witness: Witness,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    """A namespace and a bucket of the test's own; `job(name, ...)` applies a training Job that is deleted at the end."""
    for name, value in bridge_minio.environment.items():
        monkeypatch.setenv(name, value)
    namespace = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    make_namespace(cluster.api, namespace, bridge_minio.environment)
    url = bridge_minio.url(bridge_minio.new_bucket())
    jobs: list[TrainingJob] = []

    def job(name: str, **settings: Any) -> TrainingJob:
        made = TrainingJob(
            api=cluster.api, namespace=namespace, name=name, url=url, witness=witness.address, **settings
        )
        jobs.append(made)
        made.apply()
        return made

    bench = Bench(cluster=cluster, witness=witness, namespace=namespace, url=url, job=job)
    try:
        yield bench
    finally:
        for made in jobs:
            made.delete()
        cluster.api.delete(f"/api/v1/namespaces/{namespace}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed scenario shows its events and what its pods said, before they are deleted."""
    report = yield
    bench = getattr(item, "funcargs", {}).get("bench")
    if call.when == "call" and call.excinfo is not None and isinstance(bench, Bench):
        path = f"/api/v1/namespaces/{bench.namespace}/events"
        lines = [
            f"{each.get('lastTimestamp')} {each['involvedObject']['name']} {each['reason']}: {each['message']}"
            for each in bench.cluster.api.items(path)
        ]
        report.sections.append(("events", "\n".join(lines)))
        for node in bench.cluster.nodes.values():
            for log in sorted(node.logs.glob(f"{bench.namespace}_*/*/*.log")):
                tail = log.read_text(errors="replace")[-6000:]
                report.sections.append((f"{node.name} {log.relative_to(node.logs)}", tail))
    return report
