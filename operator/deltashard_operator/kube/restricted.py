"""What makes a container of ours fit for PodSecurity *restricted*: the sidecar, and a Job that removes bytes. Pure."""

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


HOME = {"HOME": CACHE_PATH, "TMPDIR": CACHE_PATH}
"""Variables that say where it may write: its root file system is read-only."""
