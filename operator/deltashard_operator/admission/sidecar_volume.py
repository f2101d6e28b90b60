"""Volumes and mounts of the sidecar.

`deltashard-shm` is memory for arena and socket, shared with the training container only. `deltashard-cache` is disk for
spooled packs and the local copy of checkpoints, private to the sidecar like the files for store access
(`api.store_access`). A user-declared volume `deltashard-cache` replaces the default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_operator.api import store_access
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import quantity
from deltashard_operator.kube.cluster_name import (
    CACHE_PATH,
    CACHE_VOLUME,
    FLEET_AUDIENCE,
    SHM_PATH,
    SHM_VOLUME,
    STORE_VOLUME,
)

Document = dict[str, Any]
SHM_SLACK_BYTES = 16 << 20
"""Size of the memory volume in addition to the arena: file header, socket, locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """Volumes of a pod and the resulting sizes."""

    added: list[Document]
    mounts: list[Document]
    cache_bytes: int
    node_disk_bytes: int
    """Maximum cache size on the node's disk; 0 if the cache is elsewhere."""


def of_pod(spec: Mapping[str, Any], policy: Policy) -> Volumes:
    """Return the volumes for this pod spec. Raises `Refusal` (VolumeUnsupported) if a declared volume is unsuitable."""
    declared = {each["name"]: each for each in spec.get("volumes") or []}
    shm = {"medium": "Memory", "sizeLimit": quantity.format_bytes(policy.arena_bytes + SHM_SLACK_BYTES)}
    disk = {"sizeLimit": quantity.format_bytes(policy.cache_bytes)}
    claimed = _claimed(declared, policy.store.get("claim"))
    tokens = [(FLEET_AUDIENCE, "fleet")] if policy.fleet else []
    volumes, mounts = store_access.files(policy, tokens, claim_volume=claimed or STORE_VOLUME)
    added: list[Document] = [
        {"name": SHM_VOLUME, "emptyDir": shm},
        {"name": CACHE_VOLUME, "emptyDir": disk},
        *volumes,
    ]
    for each in added:
        if each["name"] in declared and each["name"] != (
            claimed if "persistentVolumeClaim" in each else CACHE_VOLUME
        ):
            raise Refusal(
                "VolumeUnsupported",
                "the name is taken",
                where=f"volume {each['name']}",
                remedy="rename this volume or the policy's",
            )
    cache_bytes, on_node = _cache(declared.get(CACHE_VOLUME, added[1]), policy.cache_bytes)
    return Volumes(
        added=[each for each in added if each["name"] not in declared],
        mounts=[
            {"name": SHM_VOLUME, "mountPath": SHM_PATH},
            {"name": CACHE_VOLUME, "mountPath": CACHE_PATH},
            *mounts,
        ],
        cache_bytes=cache_bytes * 9 // 10,  # exceeding a volume's size evicts the pod
        node_disk_bytes=cache_bytes if on_node else 0,
    )


def _claimed(declared: Mapping[str, Mapping[str, Any]], claim: str | None) -> str:
    """Return the pod's volume of the store's claim, or "". A kubelet waits forever for a second volume of a claim."""
    for name, volume in declared.items():
        source = volume.get("persistentVolumeClaim")
        if source is None or claim is None or source.get("claimName") != claim:
            continue
        if source.get("readOnly"):
            raise Refusal(
                "VolumeUnsupported",
                f"it is a read-only volume of the store's claim {claim}",
                where=f"volume {name}",
                remedy="declare it without persistentVolumeClaim.readOnly; your mounts of it may be readOnly",
            )
        return name
    return ""


def _cache(volume: Mapping[str, Any], default_bytes: int) -> tuple[int, bool]:
    """Return (maximum cache size in bytes, whether it is on the node's disk)."""
    source = volume.get("emptyDir")
    if source is None:
        return default_bytes, False
    if source.get("medium"):
        raise Refusal(
            "VolumeUnsupported",
            "it is in memory, but the cache needs a disk",
            where=f"volume {CACHE_VOLUME}",
            remedy="remove emptyDir.medium or the volume",
        )
    try:
        return quantity.bytes_of(source.get("sizeLimit") or default_bytes), True
    except ValueError as error:
        raise Refusal("BadTemplate", str(error), where=f"volume {CACHE_VOLUME}") from None
