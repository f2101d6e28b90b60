"""What trainer and sidecar of a run's pods logged, the end of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from deltashard_checkpoint.errors import DeltashardError

from deltashard_cli.kubectl.cluster import Cluster

SIDECAR = "deltashard-sidecar"
SOCKET = "DELTASHARD_SOCKET"
"""By which variable a trainer's container is known."""
MAX_BYTES = 1 << 20
"""Of one log."""
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLog:
    """The end of one container's log, or why there is none."""

    pod: str
    container: str
    text: str = ""
    error: str = ""


def containers(pod: Document) -> list[str]:
    """Trainer and sidecar of a pod, by name; of a pod without a trainer's mark, all its containers."""
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
    """Of each pod that the CheckpointRun names, or of one of them.

    Args:
        cluster: where they are.
        run: the CheckpointRun.
        tail: so many lines of each.
        previous: of the container's life before its last restart.
        pod: only this one.
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
