"""The sidecar container: a native sidecar (an init container with restartPolicy Always), fit for PSA *restricted*.

Probe and hook are commands over the unix socket, the same in every pod: a pod on the host's network may not take a
port for them. The startup probe asks only whether the arena is mapped and the socket served, and its patience grows
with the arena; the store, the controller and a restore plan are `Attach`'s to wait for. The liveness probe restarts a
sidecar whose main loop stood still for minutes: the arena stays, and trainers attach again. The hook means "stopping",
never "evicted": the kubelet runs it at normal completion too. It returns at once, and without a trainer does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.process import EVERY_ADDRESS

from deltashard_operator.admission.sidecar_volume import Volumes
from deltashard_operator.api import annotation as notes
from deltashard_operator.api import store_access, workload_policy
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import FIXED, Policy
from deltashard_operator.kube import restricted, run_identity
from deltashard_operator.kube.cluster_name import (
    CACHE_PATH,
    METRICS_PORT_NAME,
    SHM_PATH,
    SIDECAR,
    SOCKET_PATH,
    SOCKET_VARIABLE,
    TOKEN_PATH,
)
from deltashard_operator.kube.run_identity import IdentityRecipe

COMMAND = "deltashard-sidecar"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Label of nodes."""
PROBE_PERIOD_S = 2
PROBE_TIMEOUT_S = 10
LIVENESS_PERIOD_S = 60
LIVENESS_FAILURES = 5
START_S = 120
"""Patience of the startup probe with the smallest arena; Python starts slowly on a busy node."""
START_S_PER_GIB = 4
"""More patience for each GiB of arena, all of which has to be touched."""
LEAVE_S = 5
"""Seconds of the grace period that are kept back for exits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the sidecar must know of the pod it is put into."""

    recipe: IdentityRecipe
    volumes: Volumes
    resources: Mapping[str, Any]
    group: int
    """Group shared by the sidecar and the training container: owner group of arena and socket."""
    metrics_port: int
    """Port of the sidecar's metrics; 0: off."""
    declares_port: bool
    """Whether the container declares it; not on the host's network, where a declared port is a claim on the node's."""
    grace_s: int
    profile_key: str
    """Image and limits of the training container, and the node type that the pod asks for."""


def sidecar(policy: Policy, place: Place) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": SIDECAR,
        "image": policy.image,
        "imagePullPolicy": policy.image_pull_policy,
        "restartPolicy": "Always",
        "command": [COMMAND],
        "args": ["serve"],
        "env": environment(policy, place),
        "resources": place.resources,
        "securityContext": restricted.security_context(policy.run_as_user, place.group),
        "startupProbe": {
            "exec": {"command": [COMMAND, "health"]},
            "periodSeconds": PROBE_PERIOD_S,
            "timeoutSeconds": PROBE_TIMEOUT_S,
            "failureThreshold": _patience(policy.arena_bytes),
        },
        "livenessProbe": {
            "exec": {"command": [COMMAND, "health"]},
            "periodSeconds": LIVENESS_PERIOD_S,
            "timeoutSeconds": PROBE_TIMEOUT_S,
            "failureThreshold": LIVENESS_FAILURES,
        },
        "lifecycle": {"preStop": {"exec": {"command": _hook(place.grace_s)}}},
        "volumeMounts": [dict(mount) for mount in place.volumes.mounts],
    }
    if place.metrics_port and place.declares_port:
        port = {"name": METRICS_PORT_NAME, "containerPort": place.metrics_port, "protocol": "TCP"}
        container["ports"] = [port]
    return container


def _patience(arena_bytes: int) -> int:
    return -(-(START_S + START_S_PER_GIB * -(-arena_bytes // (1 << 30))) // PROBE_PERIOD_S)


def saving_s(grace_s: int) -> int:
    return max(1, grace_s - LEAVE_S)


def _hook(grace_s: int) -> list[str]:
    return [COMMAND, "notify", "--reason", "stopping", "--deadline-s", str(saving_s(grace_s))]


def profile_key(spec: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """What a save's cost is remembered under, beside what the sidecar sees of its node by itself."""
    resources = trainer.get("resources") or {}
    limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    node = (spec.get("nodeSelector") or {}).get(INSTANCE_TYPE, "")
    said = [trainer.get("image", ""), *(f"{name} {limits[name]}" for name in sorted(limits)), node]
    return ", ".join(str(each) for each in said if each)


def _saving(policy: Policy, place: Place) -> dict[str, str]:
    """Settings of how it saves: each field of the sidecar's policy is one of the same name."""
    found = {
        f"DELTASHARD_{field.name.upper()}": notes.seconds(value) if isinstance(value, float) else str(value)
        for field, value in policy.saving.ListFields()
    }
    return found if policy.goal == FIXED else {**found, "DELTASHARD_PROFILE_KEY": place.profile_key}


def restore_from(said: str) -> str:
    """The sidecar's setting for what the annotation says: a run of the pod's own namespace."""
    return f"$(POD_NAMESPACE)/{said}" if said else ""


def environment(policy: Policy, place: Place) -> list[dict[str, Any]]:
    """The sidecar's environment: who it is, then its settings (each is a field of the sidecar's `Settings`)."""
    settings: dict[str, str] = {
        "DELTASHARD_URL": policy.url,
        "DELTASHARD_DIR": SHM_PATH,
        SOCKET_VARIABLE: SOCKET_PATH,
        "DELTASHARD_CACHE_DIR": CACHE_PATH + "/packs",
        "DELTASHARD_ARENA_BYTES": str(policy.arena_bytes),
        "DELTASHARD_CACHE_BYTES": str(place.volumes.cache_bytes),
        "DELTASHARD_EVERY_S": "0",
        "DELTASHARD_EVERY_STEPS": "0",
        **_saving(policy, place),
        "DELTASHARD_KEEP_LAST": str(policy.keep_last),
        "DELTASHARD_TERM_DEADLINE_S": str(saving_s(place.grace_s)),
        "DELTASHARD_METRICS_PORT": str(place.metrics_port or -1),
        "DELTASHARD_METRICS_HOST": EVERY_ADDRESS,
        "DELTASHARD_POLICY": policy.name,
        "DELTASHARD_RUNS": policy.runs,
        "DELTASHARD_RESTORE_FROM": restore_from(policy.restore_from),
        "DELTASHARD_PODS": str(place.recipe.pods or ""),
        **restricted.HOME,
    }
    settings |= store_access.settings(policy)
    if policy.fleet:
        settings |= {
            "DELTASHARD_FLEET": policy.fleet,
            "DELTASHARD_FLEET_TOKEN_FILE": TOKEN_PATH + "/fleet",
            "DELTASHARD_FLEET_CA": policy.fleet_ca,
        }
    ours = [
        *run_identity.environment(place.recipe, policy.run_id),
        *({"name": name, "value": value} for name, value in settings.items() if value),
    ]
    taken = {each["name"] for each in ours}
    for name, _ in policy.extension.env:
        if name in taken:
            raise Refusal(
                "BadPolicy",
                f"spec.sidecar.env states {name}, which this policy sets by another field",
                where=workload_policy.called(policy.name),
                remedy="leave one of them out",
            )
    return [*ours, *({"name": name, "value": value} for name, value in policy.extension.env)]
