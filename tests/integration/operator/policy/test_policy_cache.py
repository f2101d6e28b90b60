"""The policy cache against a real API server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from deltashard_operator.policy.admission_deadline import Deadline
from deltashard_operator.policy.policy_cache import GROUP, PAUSES_S, PLURAL, VERSION, PolicyCache
from deltashard_operator.policy.refusal import Refusal
from kubernetes import client

from tests.support.operator.sample import policy_object
from tests.support.server.minio_server import free_port, wait_for


@pytest.fixture
def cache(api: client.ApiClient) -> Iterator[PolicyCache]:
    cache = PolicyCache(api)
    cache.start()
    wait_for(lambda: cache.synced, what="the first list")
    yield cache
    cache.stop()


def test_the_cache_follows_the_cluster(api: client.ApiClient, cache: PolicyCache) -> None:
    """Created, changed, deleted: seen without being asked for."""
    objects = client.CustomObjectsApi(api)
    objects.create_namespaced_custom_object(GROUP, VERSION, "default", PLURAL, policy_object("seen", bits=8))
    wait_for(lambda: cache.get("default", "seen") == {"bits": 8}, what="the new policy")
    change = {"spec": {"bits": 4}}
    objects.patch_namespaced_custom_object(GROUP, VERSION, "default", PLURAL, "seen", change)
    wait_for(lambda: cache.get("default", "seen") == {"bits": 4}, what="the change")
    objects.delete_namespaced_custom_object(GROUP, VERSION, "default", PLURAL, "seen")
    wait_for(lambda: cache.get("default", "seen") is None, what="the end")


def test_a_live_look_sees_what_is_there_and_what_is_not(api: client.ApiClient, cache: PolicyCache) -> None:
    """Past the cache, straight from the API."""
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        GROUP, VERSION, "default", PLURAL, policy_object("looked", bits=2)
    )
    assert cache.look("default", "looked", Deadline(60.0)) == {"bits": 2}
    assert cache.look("default", "nowhere", Deadline(60.0)) is None
    assert cache.look("no-such-namespace", "looked", Deadline(60.0)) is None


def test_what_was_not_there_is_remembered_for_a_moment(api: client.ApiClient, cache: PolicyCache) -> None:
    """So that the chart's default costs no call an admission; a policy that comes meanwhile is found by the watch."""
    assert not cache.absent("default", "later")

    def looked() -> bool:
        assert cache.look("default", "later", Deadline(60.0)) is None
        return cache.absent("default", "later")  # unless the look itself took longer than its answer holds

    wait_for(looked, what="an answer that holds", timeout_s=120)
    assert not cache.absent("other", "later")
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        GROUP, VERSION, "default", PLURAL, policy_object("later", bits=3)
    )
    wait_for(lambda: cache.get("default", "later") == {"bits": 3}, what="the new policy")
    wait_for(lambda: not cache.absent("default", "later"), what="the end of the memory")


def test_an_api_that_does_not_answer_is_said() -> None:
    """Not to be taken for a policy that is not there; and a cache without its first list is not synced."""
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{free_port()}"
    configuration.retries = False
    with client.ApiClient(configuration) as api:
        restarts: list[int] = []
        cache = PolicyCache(api, on_restart=lambda: restarts.append(1))
        with pytest.raises(Refusal) as caught:
            cache.look("default", "p", Deadline(60.0))
        assert caught.value.code == "PolicyUnavailable"
        cache.start()
        wait_for(lambda: len(restarts) >= 2, what="another try")
        assert not cache.synced
        cache.stop()


def test_a_watch_that_always_fails_does_not_list_the_policies_over_and_over(api: client.ApiClient) -> None:
    """A list that succeeds between two failures shortens no pause; what it brought is served all the same."""
    rights = client.RbacAuthorizationV1Api(api)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "lists-only"}
    lists = {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["list"]}
    rights.create_cluster_role({"metadata": {"name": "lists-only"}, "rules": [lists]})
    rights.create_cluster_role_binding(
        {
            "metadata": {"name": "lists-only"},
            "roleRef": role,
            "subjects": [{"apiGroup": role["apiGroup"], "kind": "User", "name": "lister"}],
        }
    )
    restarts: list[float] = []
    with client.ApiClient(api.configuration) as limited:
        limited.set_default_header("Impersonate-User", "lister")
        cache = PolicyCache(limited, on_restart=lambda: restarts.append(time.monotonic()))
        cache.start()
        try:
            wait_for(lambda: len(restarts) >= 4 and cache.synced, what="the fourth failure", timeout_s=120)
        finally:
            cache.stop()
            cache._thread.join(60)
    assert restarts[3] - restarts[0] >= sum(PAUSES_S[:3]) / 2
    rights.delete_cluster_role_binding("lists-only")
    rights.delete_cluster_role("lists-only")
