"""What the sidecar asks for, so that the pod stays what it was: its QoS class, its quota, its LimitRange.

The sidecar states every request and limit itself (a LimitRange's defaults would otherwise size it). Its memory limit
is the arena plus overhead, since it touches the whole arena at start. In a Guaranteed pod requests are the limits, and
its processors whole ones: what encodes and encrypts may not be held to what a Burstable pod requests of them.

It states an `ephemeral-storage` *limit* only where every other container has one, or the policy states it: the kubelet
evicts a pod that uses more than the sum of its limits, whoever wrote them, and a sum with only ours in it would hold
the user's containers to our cache. Where a LimitRange has a default for storage, the policy has to state one.

It *requests* the cache's `ephemeral-storage`, but for a workload of a Kueue queue: a ClusterQueue admits nothing that
requests a resource it does not cover, and few cover storage. The volume's size still bounds the cache.

Pod-level resources (`spec.resources`) bound the sum. Too small for the sidecar beside what the containers request is
refused, with the sum; nothing of the user's is ever changed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import quantity
from deltashard_operator.kube.cluster_name import SIDECAR

Document = dict[str, dict[str, str]]
STORAGE = "ephemeral-storage"
STORAGE_SLACK_BYTES = 1 << 30
"""Room for the sidecar's log beside its cache, where it has a storage limit."""


def of_sidecar(
    spec: Mapping[str, Any], policy: Policy, *, cache_volume_bytes: int, queued: bool = False
) -> Document:
    """The sidecar's `resources` in a pod with this spec; raises `Refusal` (PodResourcesTooSmall, BadTemplate).

    `cache_volume_bytes` is what the cache may take of the node's disk, 0 when it does not lie there. `queued`: Kueue
    admits the workload.
    """
    try:
        return _of_sidecar(spec, policy, cache_volume_bytes, queued=queued)
    except ValueError as error:
        raise Refusal("BadTemplate", str(error), where="resources of the pod template") from None


def _of_sidecar(spec: Mapping[str, Any], policy: Policy, cache_bytes: int, *, queued: bool) -> Document:
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    limited = all(STORAGE in _part(each, "limits") for each in containers)
    cpu_request, cpu_limit = policy.cpu_request_millis, policy.cpu_limit_millis
    memory_request = policy.arena_bytes + policy.memory_request_bytes
    memory_limit = policy.arena_bytes + policy.memory_limit_bytes
    if all(_guaranteed(each) for each in containers):
        cpu_request = cpu_limit = -(-cpu_limit // 1000) * 1000
        memory_request = memory_limit
    pod_limit = _part(spec, "limits").get("cpu")
    if pod_limit is not None:  # a container's limit may not exceed the pod's
        cpu_limit = max(cpu_request, min(cpu_limit, quantity.millis_of(pod_limit)))
    storage_limit = cache_bytes + STORAGE_SLACK_BYTES if cache_bytes and limited else 0
    if policy.storage_limit_bytes:
        storage_limit = max(policy.storage_limit_bytes, policy.storage_request_bytes or 0, cache_bytes)
    storage_request = policy.storage_request_bytes
    if storage_request is None:  # beside a limit the API would request all of it
        storage_request = cache_bytes if storage_limit or not queued else 0
    ours = {
        "requests": _stated(cpu_request, memory_request, storage_request),
        "limits": _stated(cpu_limit, memory_limit, storage_limit),
    }
    _check_pod_level(spec, ours)
    return ours


def _stated(cpu_millis: int, memory_bytes: int, storage_bytes: int) -> dict[str, str]:
    stated = {"cpu": quantity.format_millis(cpu_millis), "memory": quantity.format_bytes(memory_bytes)}
    return stated | ({STORAGE: quantity.format_bytes(storage_bytes)} if storage_bytes else {})


def _part(container: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    return (container.get("resources") or {}).get(part) or {}


def _guaranteed(container: Mapping[str, Any]) -> bool:
    """Whether this container alone would leave the pod Guaranteed: limits, and requests that equal them."""
    limits, requests = _part(container, "limits"), _part(container, "requests")
    return all(
        name in limits
        and quantity.parse(limits[name]) > 0
        and quantity.parse(requests.get(name, limits[name])) == quantity.parse(limits[name])
        for name in ("cpu", "memory")
    )


def requested(spec: Mapping[str, Any], name: str) -> Fraction:
    """What the pod's containers request of a resource: at start or at work, whichever is more."""
    beside, peak = Fraction(0), Fraction(0)
    for each in spec.get("initContainers") or []:
        asks = _request(each, name)
        if each.get("restartPolicy") == "Always":
            beside += asks
            peak = max(peak, beside)
        else:
            peak = max(peak, beside + asks)
    return max(peak, beside + sum(_request(each, name) for each in spec.get("containers") or []))


def _request(container: Mapping[str, Any], name: str) -> Fraction:
    return quantity.parse(_part(container, "requests").get(name, _part(container, "limits").get(name, "0")))


def _check_pod_level(spec: Mapping[str, Any], ours: Document) -> None:
    for part, name in itertools.product(("requests", "limits"), ("cpu", "memory")):
        stated = _part(spec, part).get(name)
        if stated is None:
            continue
        # The sidecar's own limit of processors is above its request for bursts, which nobody has to leave room for.
        ask = quantity.parse(ours["requests" if name == "cpu" else part][name])
        theirs = requested(spec, name)
        if theirs + ask > quantity.parse(stated):
            text = _shown(name)
            raise Refusal(
                "PodResourcesTooSmall",
                f"it is {stated}, and {text(theirs)} that the containers request and {text(ask)} "
                f"for {SIDECAR} make {text(theirs + ask)}",
                where=f"spec.resources.{part}.{name}",
                remedy=f"raise it to at least {text(theirs + ask)}",
            )


def _shown(name: str) -> Callable[[Fraction], str]:
    if name == "cpu":
        return lambda n: quantity.format_millis(math.ceil(n * 1000))
    return lambda n: quantity.format_bytes(math.ceil(n))
