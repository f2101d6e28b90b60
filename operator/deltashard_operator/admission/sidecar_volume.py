"""The sidecar's volumes and mounts. A volume that the user declares under one of our names takes the place of ours.

`deltashard-shm` is memory: arena and socket, shared with the training container and nobody else. `deltashard-cache`
is disk: spooled packs and the local copy of checkpoints, the sidecar's alone, as are the files by which the store is
reached (`api.store_access`).
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

SHM_SLACK_BYTES = 16 << 20
"""Memory volume beyond the arena: the file's header, the socket, locks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """Volumes of a pod, and what they mean for the sidecar."""

    added: tuple[dict[str, Any], ...]
    """Volumes that the pod has not declared itself."""
    mounts: tuple[dict[str, Any], ...]
    """Mounts of the sidecar."""
    cache_bytes: int
    """Bytes of the sidecar's cache."""
    node_disk_bytes: int
    """What the cache may take of the node's own disk; 0 when it lies elsewhere."""


def of_pod(spec: Mapping[str, Any], policy: Policy) -> Volumes:
    """Volumes for a pod with this spec; raises `Refusal` (VolumeUnfit) for a declared volume that cannot serve."""
    declared = {each["name"]: each for each in spec.get("volumes") or []}
    need = policy.arena_bytes + SHM_SLACK_BYTES
    added: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = [
        {"name": SHM_VOLUME, "mountPath": SHM_PATH},
        {"name": CACHE_VOLUME, "mountPath": CACHE_PATH},
    ]
    if SHM_VOLUME in declared:
        _check_memory(declared[SHM_VOLUME], need)
    else:
        added.append(_empty_dir(SHM_VOLUME, need, medium="Memory"))
    volume_bytes, on_node = policy.cache_bytes, True
    if CACHE_VOLUME in declared:
        volume_bytes, on_node = _check_disk(declared[CACHE_VOLUME], policy.cache_bytes)
    else:
        added.append(_empty_dir(CACHE_VOLUME, volume_bytes))
    claimed = _claimed(declared, policy.claim)
    tokens = [(FLEET_AUDIENCE, "fleet")] if policy.fleet else []
    files = store_access.files(policy, tokens, claim_volume=claimed or STORE_VOLUME)
    for each in files.volumes:
        if each["name"] not in declared:
            added.append(each)
        elif each["name"] != (claimed if "persistentVolumeClaim" in each else STORE_VOLUME):
            raise Refusal(
                "VolumeUnfit",
                "the name is taken",
                where=f"volume {each['name']}",
                remedy="rename your volume"
                + (", or the policy's" if each in policy.extension.volumes else ""),
            )
    mounts += files.mounts
    return Volumes(
        added=tuple(added),
        mounts=tuple(mounts),
        cache_bytes=volume_bytes * 9 // 10,  # going over a volume's size evicts the pod
        node_disk_bytes=volume_bytes if on_node else 0,
    )


def _claimed(declared: Mapping[str, Mapping[str, Any]], claim: str) -> str:
    """The pod's own volume of the store's claim; empty: it has none.

    It serves the sidecar, too: a kubelet waits forever for a second volume of one claim.
    """
    for name, volume in declared.items():
        source = volume.get("persistentVolumeClaim")
        if source is None or not claim or source.get("claimName") != claim:
            continue
        if source.get("readOnly"):
            raise Refusal(
                "VolumeUnfit",
                f"it is the store's claim {claim}, and read-only",
                where=f"volume {name}",
                remedy="declare it without persistentVolumeClaim.readOnly; your mounts of it may be readOnly",
            )
        return name
    return ""


def _empty_dir(name: str, size_bytes: int, *, medium: str = "") -> dict[str, Any]:
    source = {"sizeLimit": quantity.format_bytes(size_bytes)}
    return {"name": name, "emptyDir": {"medium": medium, **source} if medium else source}


def _size_limit(volume: Mapping[str, Any]) -> int | None:
    limit = volume["emptyDir"].get("sizeLimit")
    try:
        return None if limit is None else quantity.bytes_of(limit)
    except ValueError as error:
        raise Refusal("BadTemplate", str(error), where=f"volume {volume['name']}") from None


def _check_memory(volume: Mapping[str, Any], need: int) -> None:
    source = volume.get("emptyDir")
    if source is None or source.get("medium") != "Memory":
        raise Refusal(
            "VolumeUnfit",
            "it is no emptyDir in memory",
            where=f"volume {SHM_VOLUME}",
            remedy="declare it with emptyDir.medium Memory, or not at all",
        )
    limit = _size_limit(volume)
    if limit is not None and limit < need:
        raise Refusal(
            "VolumeUnfit",
            f"its sizeLimit is {source['sizeLimit']}, too small for the arena",
            where=f"volume {SHM_VOLUME}",
            remedy=f"give it at least {quantity.format_bytes(need)}, or lower deltashard.io/arena-size",
        )


def _check_disk(volume: Mapping[str, Any], default_bytes: int) -> tuple[int, bool]:
    """(bytes the cache may take, whether of the node's disk)."""
    source = volume.get("emptyDir")
    if source is None:
        return default_bytes, False
    if source.get("medium") not in (None, ""):
        raise Refusal(
            "VolumeUnfit",
            "it lies in memory, the cache needs a disk",
            where=f"volume {CACHE_VOLUME}",
            remedy="declare it without emptyDir.medium, or not at all",
        )
    limit = _size_limit(volume)
    return (default_bytes, True) if limit is None else (limit, True)
