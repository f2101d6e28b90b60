"""Leader election by the Lease on a real API server."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltashard_operator.kube import lease as leases
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_operator.kube.call import ApiUnavailable, Caller
from deltashard_operator.kube.lease import Lease, LeaseLost

from tests.support.async_test import async_test
from tests.support.eventually import eventually
from tests.support.operator.access import access_to
from tests.support.operator.controller_process import ControllerProcess
from tests.support.operator.fleet_service import post_report
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.faulty_proxy import FaultyProxy, FixedResponses

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def relaxed_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's API server may take longer than the production timeout."""
    monkeypatch.setattr(leases, "CALL_S", 60.0)
    monkeypatch.setattr(leases, "RELEASE_S", 60.0)


@pytest.fixture
def namespace(http: Rest) -> str:
    found = f"t-{uuid.uuid4().hex[:8]}"
    http.namespace(found)
    return found


class LeaseHarness:
    """Leases of several controllers at one API, with one clock that the test advances."""

    def __init__(self, api: ApiAccess, namespace: str) -> None:
        self.now_s = 1000.0
        self.call = Caller(api)
        self.namespace = namespace

    def lease(self, identity: str) -> Lease:
        return Lease(
            self.call,
            namespace=self.namespace,
            identity=identity,
            monotonic=lambda: self.now_s,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


def holder(http: Rest, namespace: str) -> Any:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{leases.NAME}"
    return (http("GET", path).document.get("spec") or {}).get("holderIdentity")


@async_test
async def test_one_of_two_leads_until_lease_expires(api: ApiAccess, http: Rest, namespace: str) -> None:
    """A disconnected leader steps down before the other takes over, and ends when it reads the other's identity."""
    world = LeaseHarness(api, namespace)
    first, second = world.lease("first"), world.lease("second")
    await first.acquire()
    assert first.held
    assert holder(http, namespace) == "first"
    assert not await second._acquire_or_renew()
    for _ in range(10):  # the leader renews, so no other takes the Lease
        world.now_s += leases.RENEW_S
        assert await first._acquire_or_renew()
        assert not await second._acquire_or_renew()
    silent_s = world.now_s
    world.now_s = silent_s + leases.DURATION_S - leases.MARGIN_S - 0.1
    assert first.held
    world.now_s += 0.2
    assert not first.held
    world.now_s = silent_s + leases.DURATION_S - 0.1
    assert not await second._acquire_or_renew()
    world.now_s += 0.2
    await second.acquire()
    assert second.held
    with pytest.raises(LeaseLost, match="second leads now"):
        await first.keep()
    assert not first.held
    await first.release()
    assert holder(http, namespace) == "second", "a lost leader does not release the other's Lease"
    await world.call.close()


@async_test
async def test_stopping_releases_lease_and_restart_reacquires_it(
    api: ApiAccess, http: Rest, namespace: str
) -> None:
    """Neither a new pod nor a restarted container waits."""
    world = LeaseHarness(api, namespace)
    first = world.lease("first")
    await first.acquire()
    begun_s = world.now_s
    again = world.lease("first")
    await again.acquire()
    await again.release()
    assert not again.held
    assert not holder(http, namespace)
    second = world.lease("second")
    await second.acquire()
    assert world.now_s == begun_s
    assert holder(http, namespace) == "second"
    await world.call.close()


@async_test
async def test_concurrent_acquire_has_one_winner(api: ApiAccess, namespace: str) -> None:
    world = LeaseHarness(api, namespace)
    mine = [world.lease(f"c-{n}") for n in range(8)]
    took = await asyncio.gather(*(each._acquire_or_renew() for each in mine))
    took = [
        a or b
        for a, b in zip(took, await asyncio.gather(*(each._acquire_or_renew() for each in mine)), strict=True)
    ]
    assert sum(took) == 1
    assert [each.held for each in mine] == took
    await world.call.close()


def test_no_leader_without_right_to_create_lease(apiserver: ApiServer, http: Rest, namespace: str) -> None:
    """Argo CD does not apply Leases from manifests. With the right to create one, a controller leads."""
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "update"]}
    http.grant("controller", namespace, rule)

    async def scenario(api: ApiAccess) -> None:
        world = LeaseHarness(api, namespace)
        both = [world.lease("first"), world.lease("second")]

        async def tried() -> list[bool]:
            return [await each._acquire_or_renew() for each in both]

        while "cannot create" not in both[0].refused:  # the API server applies a new role with a short delay
            assert await tried() == [False, False]
        assert await tried() == [False, False]
        assert [each.held for each in both] == [False, False]
        assert all("cannot create resource" in each.refused for each in both), both[0].refused
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/user"
        more = {"metadata": {"name": "user"}, "rules": [rule | {"verbs": ["get", "update", "create"]}]}
        assert http("PUT", path, more).status == 200
        while not any(await tried()):
            pass
        assert [each.held for each in both].count(True) == 1
        assert [bool(each.refused) for each in both] == [False, False]
        await world.call.close()

    asyncio.run(scenario(replace(apiserver.access(), headers={"Impersonate-User": "controller"})))


def test_api_outage_does_not_end_controller(namespace: str) -> None:
    """Nothing is written during the outage."""

    async def scenario(server: FixedResponses) -> None:
        world = LeaseHarness(access_to(server.port), namespace)
        lease = world.lease("first")
        assert not await lease._acquire_or_renew()
        assert not lease.held
        guarded = Caller(access_to(server.port), may_write=lambda: lease.held)
        before = server.requests
        with pytest.raises(ApiUnavailable, match="is not the leader"):
            await guarded("PATCH", "/api/v1/x", {})
        assert server.requests == before
        await world.call.close()
        await guarded.close()

    with FixedResponses(503, b"{}", {"Content-Type": "application/json"}) as server:
        asyncio.run(scenario(server))


def test_hung_connection_blocks_one_attempt_only(
    apiserver: ApiServer, api: ApiAccess, http: Rest, namespace: str
) -> None:
    """A keep-alive connection is lost without notice. The next request uses another connection."""

    async def scenario(proxy: FaultyProxy) -> None:
        world = LeaseHarness(api, namespace)
        await world.call.close()
        world.call = Caller(api, connections=1, timeout_s=(60.0, 2.0))
        lease = world.lease("first")
        await lease.acquire()
        proxy.hang = True
        async with asyncio.timeout(20):
            await lease._acquire_or_renew()
        proxy.release()
        await lease.release()
        await world.call.close()

    with FaultyProxy(apiserver.port) as proxy:
        api.configuration.host = f"https://127.0.0.1:{proxy.port}"
        asyncio.run(scenario(proxy))
    assert not holder(http, namespace)


def test_second_controller_stands_by_until_first_ends(
    apiserver: ApiServer, http: Rest, namespace: str, tmp_path: Path
) -> None:
    """The second process is ready but serves no requests, and takes over when the first releases the Lease."""
    first, second = (_controller(apiserver, tmp_path / each, namespace) for each in ("first", "second"))

    def status(process: ControllerProcess) -> int:
        url = f"https://localhost:{process.fleet_port}"
        return post_report(url, process.authority.pem, None, b"").status

    try:
        first.start()
        assert holder(http, namespace) == "first"
        second.start(ready=False)
        eventually(lambda: second.get("healthz")[0] == 200, second.log)
        eventually(lambda: "lease.waiting" in second.log, "the second controller waits")
        assert (first.get("healthz")[0], second.get("healthz")[0], second.get("livez")[0]) == (200, 200, 200)
        assert (second.leads(), status(second)) == (False, 421)
        eventually(lambda: status(first) == 401, "the first controller accepts reports")
        assert first.stop() == 0, first.log
        eventually(lambda: second.leads() and status(second) == 401, second.log)
        assert holder(http, namespace) == "second"
        assert second.stop() == 0, second.log
        assert not holder(http, namespace)
    finally:
        for each in (first, second):
            if each.process is not None:
                each.process.kill()
                each.process.wait(60)


def _controller(apiserver: ApiServer, folder: Path, namespace: str) -> ControllerProcess:
    folder.mkdir()
    return ControllerProcess(apiserver, folder, namespace=namespace, identity=folder.name)
