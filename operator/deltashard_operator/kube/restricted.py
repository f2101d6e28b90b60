"""Settings for PodSecurity *restricted* containers and for Jobs without mesh proxies. Pure."""

from __future__ import annotations

from typing import Any

from deltashard_operator.kube.cluster_name import CACHE_PATH


def security_context(run_as_user: int | None, group: int) -> dict[str, Any]:
    """Return the securityContext. Without a user, the cluster chooses one."""
    context: dict[str, Any] = {} if run_as_user is None else {"runAsUser": run_as_user}
    return context | {
        "runAsGroup": group,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


NO_MESH = {
    "labels": {"sidecar.istio.io/inject": "false"},
    "annotations": {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"},
}
"""Metadata of a Job's pods. A mesh proxy that never exits would keep the Job from completing."""
HOME = {"HOME": CACHE_PATH, "TMPDIR": CACHE_PATH}
"""Variables with writable paths, because the root file system is read-only."""
