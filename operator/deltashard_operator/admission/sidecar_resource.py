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
"""Room for the sidecar's log beside its cache, where it has a storage limit."""


def of_sidecar(
    spec: Mapping[str, Any], policy: Policy, *, cache_volume_bytes: int, queued: bool = False
) -> dict[str, dict[str, str]]:
    """The sidecar's `resources` in a pod with this spec; raises `Refusal` (PodResourcesTooSmall, BadTemplate).

    `cache_volume_bytes` is what the cache may take of the node's disk, 0 when it does not lie there. `queued`: Kueue
    admits the workload.
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
    if (pod_limit := _part(spec, "limits").get("cpu")) is not None:  # which a container's may not exceed
        limits["cpu"] = max(requests["cpu"], min(limits["cpu"], quantity.parse(pod_limit)))
    if limits.get(STORAGE):
        limits[STORAGE] = max(limits[STORAGE], requests.get(STORAGE, cache), cache)
    elif cache and all(STORAGE in _part(each, "limits") for each in containers):
        limits[STORAGE] = cache + STORAGE_SLACK_BYTES
    # Beside a limit the API would request all of it.
    requests.setdefault(STORAGE, cache if limits.get(STORAGE) or not queued else Fraction(0))
    return requests, limits


def _text(name: str, amount: Fraction) -> str:
    if name == "cpu":
        return quantity.format_millis(math.ceil(amount * 1000))
    return quantity.format_bytes(math.ceil(amount))


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


def _requested(spec: Mapping[str, Any], name: str) -> Fraction:
    """What the pod's containers request of a resource: at start or at work, whichever is more."""
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
        # The sidecar's own limit of processors is above its request for bursts, which nobody has to leave room for.
        ask = limits[name] if (part, name) == ("limits", "memory") else requests[name]
        theirs = _requested(spec, name)
        if theirs + ask > quantity.parse(stated):
            raise Refusal(
                "PodResourcesTooSmall",
                f"it is {stated}, and {_text(name, theirs)} that the containers request and "
                f"{_text(name, ask)} for {SIDECAR} make {_text(name, theirs + ask)}",
                where=f"spec.resources.{part}.{name}",
                remedy=f"raise it to at least {_text(name, theirs + ask)}",
            )
