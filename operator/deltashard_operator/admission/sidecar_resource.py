"""Resources of the sidecar, chosen so that the pod keeps its QoS class and fits its quota and LimitRange.

All requests and limits are explicit, because a LimitRange's defaults would otherwise apply. The memory limit is the
arena plus overhead, since the whole arena is touched at start. In a Guaranteed pod, requests equal limits and CPUs are
whole: encoding and encryption must not be limited to the request that a Burstable pod has.

An `ephemeral-storage` *limit* is set only if every other container has one or the policy sets it: the kubelet evicts a
pod that uses more than the sum of its limits, so a sum with only the sidecar's limit would restrict the user's
containers to the cache size. If a LimitRange has a default for storage, the policy must set a limit.

The cache's `ephemeral-storage` is *requested*, except for a workload in a Kueue queue: a ClusterQueue rejects requests
for resources that it does not cover, and few cover storage. The volume's sizeLimit still bounds the cache.

Pod-level resources (`spec.resources`) bound the sum. If they are too small for the sidecar and the other containers'
requests, the pod is rejected with the required sum; the user's values are never changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import quantity
from deltashard_operator.kube.cluster_name import SIDECAR

Amounts = dict[str, Fraction]
STORAGE = "ephemeral-storage"
STORAGE_SLACK_BYTES = 1 << 30
"""Storage for the sidecar's log in addition to its cache, if it has a storage limit."""


def of_sidecar(
    spec: Mapping[str, Any], policy: Policy, *, cache_volume_bytes: int, queued: bool = False
) -> dict[str, dict[str, str]]:
    """Return the sidecar's `resources` for this pod spec. Raises `Refusal` (PodResourcesTooSmall, BadTemplate).

    `cache_volume_bytes`: maximum cache size on the node's disk, or 0 if it is elsewhere. `queued`: Kueue admits the
    workload.
    """
    try:
        requests, limits = _amounts(spec, policy, Fraction(cache_volume_bytes), queued=queued)
        _check_pod_level(spec, requests, limits)
    except ValueError as error:
        raise Refusal("BadTemplate", str(error), where="resources of the pod template") from None
    return {
        part: {name: _text(name, amount) for name, amount in amounts.items() if amount}
        for part, amounts in (("requests", requests), ("limits", limits))
    }


def _amounts(
    spec: Mapping[str, Any], policy: Policy, cache: Fraction, *, queued: bool
) -> tuple[Amounts, Amounts]:
    stated = policy.sidecar["resources"]
    requests, limits = (
        {name: quantity.parse(amount) for name, amount in stated[part].items()}
        for part in ("requests", "limits")
    )
    for name, arena in (("cpu", 0), ("memory", policy.arena_bytes)):
        limits[name] = max(requests[name], limits[name]) + arena
        requests[name] += arena
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    if all(_guaranteed(each) for each in containers):
        limits["cpu"] = Fraction(math.ceil(limits["cpu"]))
        requests |= {name: limits[name] for name in ("cpu", "memory")}
    if (pod_limit := _part(spec, "limits").get("cpu")) is not None:  # a container's limit must not exceed it
        limits["cpu"] = max(requests["cpu"], min(limits["cpu"], quantity.parse(pod_limit)))
    if limits.get(STORAGE):
        limits[STORAGE] = max(limits[STORAGE], requests.get(STORAGE, cache), cache)
    elif cache and all(STORAGE in _part(each, "limits") for each in containers):
        limits[STORAGE] = cache + STORAGE_SLACK_BYTES
    # With only a limit set, the API would use the limit as the request.
    requests.setdefault(STORAGE, cache if limits.get(STORAGE) or not queued else Fraction(0))
    return requests, limits


def _text(name: str, amount: Fraction) -> str:
    if name == "cpu":
        return quantity.format_millis(math.ceil(amount * 1000))
    return quantity.format_bytes(math.ceil(amount))


def _part(container: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    return (container.get("resources") or {}).get(part) or {}


def _guaranteed(container: Mapping[str, Any]) -> bool:
    """Return whether this container keeps the pod Guaranteed: limits are set and requests equal them."""
    limits, requests = _part(container, "limits"), _part(container, "requests")
    return all(
        name in limits
        and quantity.parse(limits[name]) > 0
        and quantity.parse(requests.get(name, limits[name])) == quantity.parse(limits[name])
        for name in ("cpu", "memory")
    )


def _requested(spec: Mapping[str, Any], name: str) -> Fraction:
    """Return the pod's effective request of a resource: the maximum of startup and running phase."""
    beside = peak = Fraction(0)
    for each in spec.get("initContainers") or []:
        peak = max(peak, beside + (asks := _request(each, name)))
        if each.get("restartPolicy") == "Always":
            beside += asks
    return max(peak, beside + sum(_request(each, name) for each in spec.get("containers") or []))


def _request(container: Mapping[str, Any], name: str) -> Fraction:
    return quantity.parse(_part(container, "requests").get(name, _part(container, "limits").get(name, "0")))


def _check_pod_level(spec: Mapping[str, Any], requests: Amounts, limits: Amounts) -> None:
    for part, name in itertools.product(("requests", "limits"), ("cpu", "memory")):
        stated = _part(spec, part).get(name)
        if stated is None:
            continue
        # The sidecar's CPU limit exceeds its request only for bursts, which need no reserved capacity.
        ask = limits[name] if (part, name) == ("limits", "memory") else requests[name]
        theirs = _requested(spec, name)
        if theirs + ask > quantity.parse(stated):
            raise Refusal(
                "PodResourcesTooSmall",
                f"it is {stated}, but the containers request {_text(name, theirs)} and "
                f"{SIDECAR} needs {_text(name, ask)}, together {_text(name, theirs + ask)}",
                where=f"spec.resources.{part}.{name}",
                remedy=f"raise it to at least {_text(name, theirs + ask)}",
            )
