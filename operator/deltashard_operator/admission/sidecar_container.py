"""Sidecar container: a native sidecar (init container with restartPolicy Always) that complies with PSA *restricted*.

Probes and hook are commands over the unix socket, because a pod on the host's network must not use a port for them. The
startup probe checks only that the arena is mapped and the socket is served, and its timeout grows with the arena;
`Attach` waits for the store, the controller and the restore plan. The liveness probe restarts a sidecar whose main loop
has been blocked for minutes: the arena is kept, and trainers attach again. The hook reports "stopping", not "evicted",
because the kubelet also runs it at normal completion. It returns immediately and has no effect without a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard_checkpoint.process import ANY_ADDRESS

from deltashard_operator.admission import sidecar_resource, sidecar_volume
from deltashard_operator.api import store_access, workload_policy
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import restricted, run_identity
from deltashard_operator.kube.cluster_name import (
    CACHE_PATH,
    METRICS_PORT_NAME,
    SHM_PATH,
    SIDECAR,
    SOCKET_PATH,
    SOCKET_VARIABLE,
    TOKEN_PATH,
    USER_ID,
)
from deltashard_operator.kube.run_identity import IdentityRecipe

Document = dict[str, Any]
COMMAND = "deltashard-sidecar"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Node label."""
STARTUP_TIMEOUT_S = 120
"""Startup timeout with the smallest arena. Python starts slowly on a busy node."""
STARTUP_TIMEOUT_S_PER_GIB = 4
"""Additional startup timeout per GiB of arena, every page of which is touched."""
EXIT_RESERVE_S = 5
"""Seconds of the grace period that are reserved for process exits."""


def sidecar(
    spec: Mapping[str, Any],
    trainer: Mapping[str, Any],
    policy: Policy,
    recipe: IdentityRecipe,
    *,
    grace_s: int,
    queued: bool,
) -> tuple[Document, list[Document]]:
    """Return the container and the volumes that the pod needs for it. Raises `Refusal`.

    Args:
        spec: pod spec without the sidecar.
        trainer: the training container.
        policy: policy resolved for this workload.
        recipe: how the pods determine their identity.
        grace_s: grace period of the pod.
        queued: Kueue admits the workload by its requested resources.
    """
    volumes, port = sidecar_volume.of_pod(spec, policy), metrics_port(spec, policy)
    save_s = str(max(1, grace_s - EXIT_RESERVE_S))
    start_s = STARTUP_TIMEOUT_S + STARTUP_TIMEOUT_S_PER_GIB * -(-policy.arena_bytes // (1 << 30))
    settings = {
        "DELTASHARD_URL": policy.url,
        "DELTASHARD_DIR": SHM_PATH,
        SOCKET_VARIABLE: SOCKET_PATH,
        "DELTASHARD_CACHE_DIR": CACHE_PATH + "/packs",
        "DELTASHARD_ARENA_BYTES": str(policy.arena_bytes),
        "DELTASHARD_CACHE_BYTES": str(volumes.cache_bytes),
        "DELTASHARD_EVERY_S": "0",
        "DELTASHARD_EVERY_STEPS": "0",
        **{f"DELTASHARD_{f.name.upper()}": number(value) for f, value in policy.saving.ListFields()},
        "DELTASHARD_PROFILE_KEY": _profile_key(spec, trainer) if policy.saving.goal else "",
        "DELTASHARD_KEEP_LAST": str(policy.keep_last),
        "DELTASHARD_TERM_DEADLINE_S": save_s,
        "DELTASHARD_METRICS_PORT": str(port or -1),
        "DELTASHARD_METRICS_HOST": ANY_ADDRESS,
        "DELTASHARD_POLICY": policy.name,
        "DELTASHARD_RUNS": policy.annotations.runs,
        "DELTASHARD_RESTORE_FROM": restore_from(policy.annotations.restore_from),
        "DELTASHARD_PODS": str(recipe.pods or ""),
        **restricted.HOME,
        **store_access.settings(policy),
        "DELTASHARD_FLEET": policy.fleet,
        "DELTASHARD_FLEET_TOKEN_FILE": TOKEN_PATH + "/fleet" if policy.fleet else "",
        "DELTASHARD_FLEET_CA": policy.fleet_ca if policy.fleet else "",
    }
    env = [
        *run_identity.environment(recipe, policy.annotations.run_id),
        *({"name": name, "value": value} for name, value in settings.items() if value),
    ]
    _check_env(policy, {each["name"] for each in env})
    probe = {"exec": {"command": [COMMAND, "health"]}, "timeoutSeconds": 10}
    container = {
        "name": SIDECAR,
        "image": policy.sidecar["image"],
        "imagePullPolicy": policy.sidecar["imagePullPolicy"],
        "restartPolicy": "Always",
        "command": [COMMAND],
        "args": ["serve"],
        "env": [*env, *policy.sidecar["env"]],
        "resources": sidecar_resource.of_sidecar(
            spec, policy, cache_volume_bytes=volumes.node_disk_bytes, queued=queued
        ),
        "securityContext": restricted.security_context(policy.sidecar["runAsUser"], group_of(spec)),
        "startupProbe": probe | {"periodSeconds": 2, "failureThreshold": -(-start_s // 2)},
        "livenessProbe": probe | {"periodSeconds": 60, "failureThreshold": 5},
        "lifecycle": {
            "preStop": {
                "exec": {"command": [COMMAND, "notify", "--reason", "stopping", "--deadline-s", save_s]}
            }
        },
        "volumeMounts": volumes.mounts,
    }
    if port and not spec.get("hostNetwork"):  # there, a declared port reserves the node's port
        container["ports"] = [{"name": METRICS_PORT_NAME, "containerPort": port, "protocol": "TCP"}]
    return container, volumes.added


def number(value: Any) -> str:
    """Format a setting's value for a variable, with the milliseconds of an interval and no further digits."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def restore_from(annotation: str) -> str:
    """Return the sidecar's setting for the annotation: a run in the pod's namespace."""
    return f"$(POD_NAMESPACE)/{annotation}" if annotation else ""


def group_of(spec: Mapping[str, Any]) -> int:
    """Return the group that shares arena and socket: the first supplemental group, the fsGroup, or the default."""
    context = spec.get("securityContext") or {}
    return int((context.get("supplementalGroups") or [context.get("fsGroup", USER_ID)])[0])


def metrics_port(spec: Mapping[str, Any], policy: Policy) -> int:
    """Return the port of the sidecar's metrics in this pod, or 0 (off) if another container declares it."""
    port = int(policy.sidecar["hostNetworkMetricsPort" if spec.get("hostNetwork") else "metricsPort"])
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    declared = [each.get("containerPort") for one in containers for each in one.get("ports") or []]
    return 0 if port in declared else port


def _profile_key(spec: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """Return the key of measured save costs: image and resources of the trainer, and the selected instance type."""
    resources = trainer.get("resources") or {}
    limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    node = (spec.get("nodeSelector") or {}).get(INSTANCE_TYPE, "")
    parts = [trainer.get("image", ""), *(f"{name} {limits[name]}" for name in sorted(limits)), node]
    return ", ".join(str(each) for each in parts if each)


def _check_env(policy: Policy, taken: set[str]) -> None:
    for each in policy.sidecar["env"]:
        if each["name"] in taken:
            raise Refusal(
                "BadPolicy",
                f"spec.sidecar.env sets {each['name']}, which another field of this policy sets, too",
                where=workload_policy.display_name(policy.name),
                remedy="leave one of them out",
            )
