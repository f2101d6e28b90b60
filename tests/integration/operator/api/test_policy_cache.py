"""The policy cache against a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.api.policy_cache import GROUP, NAMESPACED, VERSION, PolicyCache
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.object_watch import ObjectWatch
from kubernetes import client

from tests.support.eventually import eventually
from tests.support.operator.definition import serving
from tests.support.operator.running_watch import running
from tests.support.operator.sample import policy_object
from tests.support.server.apiserver import ApiServer
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import free_port

# asyncio leaves the socket of a TLS handshake that broke off to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def second_apiserver(tmp_path: Path) -> Iterator[ApiServer]:
    """One that may be killed."""
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def cache(api: client.ApiClient) -> Iterator[PolicyCache]:
    cache = PolicyCache(api)
    with running(ObjectWatch(api, cache.kinds, on_list=cache.on_list)):
        eventually(lambda: cache.synced, what="the first list")
        yield cache


def test_the_cache_follows_the_cluster(api: client.ApiClient, cache: PolicyCache) -> None:
    """Created, changed, deleted: seen without being asked for."""
    objects = client.CustomObjectsApi(api)
    objects.create_namespaced_custom_object(
        GROUP, VERSION, "default", NAMESPACED, policy_object("seen", keepLast=8)
    )
    eventually(lambda: cache.get("default", "seen") == {"keepLast": 8}, what="the new policy")
    change = {"spec": {"keepLast": 4}}
    objects.patch_namespaced_custom_object(GROUP, VERSION, "default", NAMESPACED, "seen", change)
    eventually(lambda: cache.get("default", "seen") == {"keepLast": 4}, what="the change")
    objects.delete_namespaced_custom_object(GROUP, VERSION, "default", NAMESPACED, "seen")
    eventually(lambda: cache.get("default", "seen") is None, what="the end")


def test_the_clusters_own_are_told_from_a_namespaces(apiserver: ApiServer, cache: PolicyCache) -> None:
    """By their prefix, in the cache and past it."""
    with apiserver.http() as http:
        made = http.create({**policy_object("both", keepLast=5), "kind": "ClusterCheckpointPolicy"})
    assert made.status == 201, made.document
    eventually(lambda: cache.get("default", "cluster/both") == {"keepLast": 5}, what="the new policy")
    assert cache.get("default", "both") is None
    assert cache.look("default", "cluster/both", Deadline(60.0)) == {"keepLast": 5}
    assert cache.look("default", "both", Deadline(60.0)) is None
    assert cache.look("default", "cluster/nowhere", Deadline(60.0)) is None


def test_where_some_namespaces_are_watched_the_clusters_are_not_asked_for(api: client.ApiClient) -> None:
    """There is no right to read them then, and the cache is whole without."""
    cache = PolicyCache(api)
    watch = ObjectWatch(api, cache.kinds, on_list=cache.on_list, namespaces=("default",))
    with running(watch):
        eventually(lambda: cache.synced, what="the first list")
    assert list(watch.freshness._signs) == [f"/apis/{GROUP}/{VERSION}/namespaces/default/{NAMESPACED}"]


def test_a_live_look_sees_what_is_there_and_what_is_not(api: client.ApiClient, cache: PolicyCache) -> None:
    """Past the cache, straight from the API."""
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        GROUP, VERSION, "default", NAMESPACED, policy_object("looked", keepLast=2)
    )
    assert cache.look("default", "looked", Deadline(60.0)) == {"keepLast": 2}
    assert cache.look("default", "nowhere", Deadline(60.0)) is None
    assert cache.look("no-such-namespace", "looked", Deadline(60.0)) is None


def test_what_was_not_there_is_remembered_for_a_moment(api: client.ApiClient, cache: PolicyCache) -> None:
    """So that the chart's default costs no call an admission; a policy that comes meanwhile is found by the watch."""
    assert not cache.absent("default", "later")

    def looked() -> bool:
        assert cache.look("default", "later", Deadline(60.0)) is None
        return cache.absent("default", "later")  # unless the look itself took longer than its answer holds

    eventually(looked, what="an answer that holds", timeout_s=120)
    assert not cache.absent("other", "later")
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        GROUP, VERSION, "default", NAMESPACED, policy_object("later", keepLast=3)
    )
    eventually(lambda: cache.get("default", "later") == {"keepLast": 3}, what="the new policy")
    eventually(lambda: not cache.absent("default", "later"), what="the end of the memory")


def test_an_api_that_does_not_answer_is_said() -> None:
    """Not to be taken for a policy that is not there; and a cache without its first list is not synced."""
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    configuration.retries = False
    with client.ApiClient(configuration) as api:
        cache = PolicyCache(api)
        with pytest.raises(Refusal) as caught:
            cache.look("default", "p", Deadline(60.0))
        assert caught.value.code == "PolicyUnavailable"
        assert not cache.synced


def test_what_changed_while_the_watch_was_down_is_found(second_apiserver: ApiServer) -> None:
    """Also what went, and by an API server that knows no older changes; meanwhile the cache stays as it was."""
    restarts: list[int] = []
    with FaultyProxy(second_apiserver.port) as proxy, second_apiserver.api() as direct:
        objects = client.CustomObjectsApi(direct)
        where = (GROUP, VERSION, "default", NAMESPACED)
        for name in ("goes", "stays"):
            objects.create_namespaced_custom_object(*where, policy_object(name, keepLast=8))
        with second_apiserver.api() as proxied:
            proxied.configuration.host = f"https://127.0.0.1:{proxy.port}"
            cache = PolicyCache(proxied, on_restart=lambda: restarts.append(1))
            watch = ObjectWatch(proxied, cache.kinds, on_list=cache.on_list)
            with running(watch):
                eventually(lambda: cache.synced, what="the first list")
                proxy.upstream_port = free_port()
                proxy.cut()
                objects.delete_namespaced_custom_object(*where, "goes")
                objects.patch_namespaced_custom_object(*where, "stays", {"spec": {"keepLast": 4}})
                second_apiserver.kill_api()
                second_apiserver.start_api()
                assert (cache.get("default", "goes"), cache.synced) == ({"keepLast": 8}, True)
                proxy.upstream_port = second_apiserver.port
                eventually(
                    lambda: cache.get("default", "stays") == {"keepLast": 4}, what="the change", timeout_s=240
                )
                eventually(lambda: cache.get("default", "goes") is None, what="the end")
    assert (len(cache), set(restarts)) == (1, {1})
