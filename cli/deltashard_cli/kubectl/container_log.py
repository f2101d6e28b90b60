"""Tails of the trainer and sidecar logs of a run's pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from deltashard_checkpoint.errors import DeltashardError

from deltashard_cli.kubectl.cluster import Cluster

SIDECAR = "deltashard-sidecar"
SOCKET = "DELTASHARD_SOCKET"
"""Environment variable that identifies a trainer's container."""
MAX_BYTES = 1 << 20
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLog:
    """The tail of one container's log, or the reason why it is unavailable."""

    pod: str
    container: str
    text: str = ""
    error: str = ""


def containers(pod: Document) -> list[str]:
    """Return the names of a pod's trainer and sidecar containers; without a marked trainer, of all containers."""
    spec = pod.get("spec") or {}
    all_ = [each["name"] for each in spec.get("containers") or ()]
    trainers = [
        each["name"]
        for each in spec.get("containers") or ()
        if any(variable.get("name") == SOCKET for variable in each.get("env") or ())
    ]
    sidecars = [each["name"] for each in spec.get("initContainers") or () if each["name"] == SIDECAR]
    return [*(trainers or all_), *sidecars]


def logs(
    cluster: Cluster, run: Document, *, tail: int, previous: bool, pod: str | None, container: str
) -> Iterator[ContainerLog]:
    """Yield the logs of each pod that the CheckpointRun names.

    Args:
        cluster: the run's cluster.
        run: the CheckpointRun.
        tail: number of lines per log.
        previous: read the logs of the containers before their last restart.
        pod: only this pod.
        container: trainer, sidecar or all.
    """
    namespace = run["metadata"]["namespace"]
    named = [each["name"] for each in (run.get("status") or {}).get("pods") or ()]
    for name in [each for each in named if pod in {None, each}] or ([pod] if pod else []):
        path = f"/api/v1/namespaces/{namespace}/pods/{quote(name, safe='')}"
        try:
            found = cluster.get(path)
        except DeltashardError as error:
            yield ContainerLog(pod=name, container="", error=error.what)
            continue
        for each in containers(found):
            if container != "all" and (each == SIDECAR) != (container == "sidecar"):
                continue
            query = {"container": each, "tailLines": str(tail), "limitBytes": str(MAX_BYTES)}
            if previous:
                query["previous"] = "true"
            try:
                yield ContainerLog(pod=name, container=each, text=cluster.text(f"{path}/log", query))
            except DeltashardError as error:
                yield ContainerLog(pod=name, container=each, error=error.what)
