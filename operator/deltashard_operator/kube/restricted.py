"""What makes a container of ours fit for PodSecurity *restricted*, and a Job of ours for a mesh. Pure."""

from __future__ import annotations

from typing import Any

from deltashard_operator.kube.cluster_name import CACHE_PATH


def security_context(run_as_user: int | None, group: int) -> dict[str, Any]:
    """Its securityContext; without a user the choice is the cluster's."""
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
"""Metadata of a Job's pods: beside a proxy that does not end, no Job completes."""
HOME = {"HOME": CACHE_PATH, "TMPDIR": CACHE_PATH}
"""Variables that say where it may write: its root file system is read-only."""
