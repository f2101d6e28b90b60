"""Resources: the pod's QoS stays, and pod-level bounds are refused when they are too small."""

from __future__ import annotations

from typing import Any

import pytest
from deltashard_operator.admission import sidecar_resource
from deltashard_operator.api.refusal import Refusal

from tests.support.operator import sample

GUARANTEED = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1000m", "memory": "1024Mi"}}


def spec(
    *each: dict[str, Any], init: tuple[dict[str, Any], ...] = (), pod: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A pod spec from its containers' resources."""
    return {
        "containers": [{"name": f"c{n}", "resources": r} for n, r in enumerate(each)],
        "initContainers": list(init),
        **({"resources": pod} if pod else {}),
    }


def ours(of: dict[str, Any], policy: dict[str, Any] | None = None, cache: int = 10 << 30) -> dict[str, Any]:
    return sidecar_resource.of_sidecar(of, sample.policy(policy), cache_volume_bytes=cache)


def test_everything_is_stated() -> None:
    """A LimitRange has nothing to fill in but the storage limit, and memory holds the arena."""
    found = ours(spec({}))
    assert found["requests"] == {"cpu": "500m", "memory": "768Mi", "ephemeral-storage": "10Gi"}
    assert found["limits"] == {"cpu": "2", "memory": "1280Mi"}


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    """Requests equal limits, also when they are only implied; init containers count."""
    for each in (GUARANTEED, {"limits": GUARANTEED["limits"]}):
        found = ours(spec(each))
        assert found["limits"] == {"cpu": "2", "memory": "1280Mi"}
        assert found["requests"]["cpu"] == "2"
        assert found["requests"]["memory"] == "1280Mi"
    odd = {"sidecar": {"resources": {"limits": {"cpu": "1500m"}}}}
    assert ours(spec(GUARANTEED), odd)["requests"]["cpu"] == "2", "whole, as static CPU managers pin them"
    burstable = spec(GUARANTEED, init=({"name": "i"},))
    assert ours(burstable)["requests"]["memory"] == "768Mi"


def test_a_storage_limit_is_stated_only_where_all_others_have_one() -> None:
    """The kubelet evicts by the sum of the limits: ours alone would bind the user's containers."""
    limited = {"limits": {"ephemeral-storage": "5Gi"}}
    assert "ephemeral-storage" not in ours(spec(limited, {}))["limits"]
    assert ours(spec(limited, limited))["limits"]["ephemeral-storage"] == "11Gi"
    assert "ephemeral-storage" not in ours(spec(limited), cache=0)["limits"]
    stated = {"sidecar": {"resources": {"limits": {"ephemeral-storage": "30Gi"}}}}
    assert ours(spec({}), stated)["limits"]["ephemeral-storage"] == "30Gi", "the policy's word"


def test_the_policy_says_what_is_requested_of_the_nodes_disk() -> None:
    for stated, request in (("0", None), ("2Gi", "2Gi")):
        spec_of = {"sidecar": {"resources": {"requests": {"ephemeral-storage": stated}}}}
        assert ours(spec({}), spec_of)["requests"].get("ephemeral-storage") == request


def test_pod_level_resources_that_suffice_bound_our_limit() -> None:
    """A container's limit may not exceed the pod's."""
    pod = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "1500m", "memory": "4Gi"}}
    assert ours(spec({"requests": {"cpu": "1", "memory": "1Gi"}}, pod=pod))["limits"]["cpu"] == "1500m"


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        (
            {"requests": {"cpu": "1200m"}},
            (
                "spec.resources.requests.cpu: it is 1200m, and 1 that the containers request and 500m for "
                "deltashard-sidecar make 1500m; raise it to at least 1500m (PodResourcesTooSmall)"
            ),
        ),
        (
            {"limits": {"memory": "2Gi"}},
            (
                "spec.resources.limits.memory: it is 2Gi, and 1Gi that the containers request and 1280Mi for "
                "deltashard-sidecar make 2304Mi; raise it to at least 2304Mi (PodResourcesTooSmall)"
            ),
        ),
    ],
)
def test_pod_level_resources_that_are_too_small_are_refused_with_the_sum(
    pod: dict[str, Any], said: str
) -> None:
    """The user reads what to write."""
    with pytest.raises(Refusal) as caught:
        ours(spec({"requests": {"cpu": "1", "memory": "1Gi"}}, pod=pod))
    assert caught.value.sentence == said


def test_the_sum_counts_init_containers_as_the_scheduler_does() -> None:
    """The peak of start-up or the sum at work, native sidecars in both."""
    init = (
        {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
        {"name": "i", "resources": {"requests": {"cpu": "5"}}},
    )
    assert sidecar_resource.requested(spec({"requests": {"cpu": "2"}}, init=init), "cpu") == 6
    assert sidecar_resource.requested(spec({"requests": {"cpu": "9"}}, init=init), "cpu") == 10


def test_a_quantity_that_is_none_is_refused() -> None:
    """Not a crash: the API server would refuse it too."""
    with pytest.raises(Refusal, match="is no quantity"):
        ours(spec({"limits": {"cpu": "many", "memory": "1"}}))
