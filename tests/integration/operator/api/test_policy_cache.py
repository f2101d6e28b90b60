"""The policy cache against a real API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from deltashard_operator.api.policy_cache import NAMESPACED, ROOT, PolicyCache
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.api_access import ApiAccess
from deltashard_operator.kube.call import Caller
from deltashard_operator.kube.object_watch import ObjectWatch

from tests.support.eventually import eventually
from tests.support.operator.access import access_to
from tests.support.operator.running_watch import running
from tests.support.operator.sample import policy_object
from tests.support.server.apiserver import ApiServer
from tests.support.server.minio_server import free_port

NEVER: Any = None
"""The API caller of a cache that makes no API call."""
# asyncio leaves the socket of an aborted TLS handshake to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def live_policy(api: ApiAccess, name: str) -> Any:
    async def scenario() -> Any:
        call = Caller(api)
        try:
            return await PolicyCache(call).fetch("default", name)
        finally:
            await call.close()

    return asyncio.run(scenario())


def test_cache_follows_cluster(api: ApiAccess, apiserver: ApiServer) -> None:
    """Changes arrive by the watch. A policy that the watch has not delivered yet is read from the API."""
    cache, merge = PolicyCache(NEVER), "application/merge-patch+json"
    path = f"{ROOT}/namespaces/default/{NAMESPACED}/both"
    assert not cache.synced
    with running(ObjectWatch(api, cache.kinds, on_list=cache.on_list)), apiserver.http() as http:
        eventually(lambda: cache.synced, what="the first list")
        assert http.create(policy_object("both", keepLast=8)).status == 201
        assert (
            http.create({**policy_object("both", keepLast=5), "kind": "ClusterCheckpointPolicy"}).status
            == 201
        )
        assert live_policy(api, "both") == {"keepLast": 8}
        assert live_policy(api, "cluster/both") == {"keepLast": 5}
        for nowhere in ("nowhere", "cluster/nowhere"):
            assert live_policy(api, nowhere) is None
        eventually(lambda: cache.get("default", "both") == {"keepLast": 8}, what="the new policy")
        eventually(lambda: cache.get("default", "cluster/both") == {"keepLast": 5}, what="the cluster policy")
        assert http("PATCH", path, {"spec": {"keepLast": 4}}, content=merge).status == 200
        eventually(lambda: cache.get("default", "both") == {"keepLast": 4}, what="the change")
        assert http("DELETE", path).status == 200
        eventually(lambda: cache.get("default", "both") is None, what="the deletion")


def test_namespaced_watch_skips_cluster_policies(api: ApiAccess, apiserver: ApiServer) -> None:
    """The cache has no right to read cluster policies in this mode, and is complete without them."""
    with apiserver.http() as http:
        http.create({**policy_object("unseen"), "kind": "ClusterCheckpointPolicy"})
    cache = PolicyCache(NEVER)
    with running(ObjectWatch(api, cache.kinds, on_list=cache.on_list, namespaces=("default",))):
        eventually(lambda: cache.synced, what="the first list")
    assert cache.get("default", "cluster/unseen") is None


def test_unresponsive_api_raises() -> None:
    """The error differs from that of a missing policy."""
    with pytest.raises(Refusal) as caught:
        live_policy(access_to(free_port()), "p")
    assert caught.value.code == "PolicyUnavailable"
