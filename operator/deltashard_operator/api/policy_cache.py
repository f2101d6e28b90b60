"""CheckpointPolicies of both kinds in memory, as watches tell them, and one live read of what is not there.

The cache is `synced` from its first list on and stays so through an outage of the API: an admission only comes when the
API works. A policy that is not in the cache may have been created a moment ago: it is read once, live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deltashard_operator.api import workload_policy
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.call import ApiUnavailable, Caller, object_at
from deltashard_operator.kube.object_watch import ObjectKey, WatchedKind
from deltashard_operator.kube.webhook_configuration import TIMEOUT_S

GROUP, VERSION = "deltashard.io", "v1alpha1"
NAMESPACED, CLUSTERS = "checkpointpolicies", "clustercheckpointpolicies"
ROOT = f"/apis/{GROUP}/{VERSION}"
BUDGET_S = TIMEOUT_S - 1.0
"""How long an admission may take; the API server's last second is for the way here and back."""
Spec = Mapping[str, Any]


class PolicyCache:
    """All policies' specs by (namespace, name), as `workload_policy.key_of` says. Watch its `kinds`."""

    def __init__(self, call: Caller) -> None:
        self._call = call
        self._specs: dict[tuple[str, str], Spec] = {}
        self.synced = False
        """Whether the policies were listed once."""
        self.kinds = policy_kinds(self._upsert, self._remove)

    def _upsert(self, item: Mapping[str, Any]) -> None:
        metadata = item["metadata"]
        self._specs[metadata.get("namespace", ""), metadata["name"]] = item.get("spec") or {}

    def _remove(self, key: ObjectKey, _item: Mapping[str, Any] | None) -> None:
        self._specs.pop((key.namespace, key.name), None)

    def on_list(self) -> None:
        self.synced = True

    def get(self, namespace: str, name: str) -> Spec | None:
        """The spec of the policy that a workload of this namespace names so."""
        return self._specs.get(workload_policy.key_of(namespace, name))

    async def fetch(self, namespace: str, name: str) -> Spec | None:
        """The policy's spec from the API itself, None when there is none; raises `Refusal` (PolicyUnavailable)."""
        try:
            document = await object_at(self._call, policy_path(workload_policy.key_of(namespace, name)))
        except ApiUnavailable as error:
            raise unavailable(name, error.what) from error
        return None if document is None else document.get("spec") or {}


def policy_kinds(
    on_object: Callable[[Any], None], on_deleted: Callable[[ObjectKey, Any], None]
) -> tuple[WatchedKind, ...]:
    """Both kinds of policies, to be watched."""
    clusters = WatchedKind(
        "cluster policies", f"{ROOT}/{CLUSTERS}", on_object, on_deleted, namespaced=False, everywhere=True
    )
    return WatchedKind("policies", f"{ROOT}/{NAMESPACED}", on_object, on_deleted), clusters


def policy_path(key: tuple[str, str]) -> str:
    """URL path of the policy with this key."""
    namespace, name = key
    return f"{ROOT}/{f'namespaces/{namespace}/{NAMESPACED}' if namespace else CLUSTERS}/{name}"


def unavailable(name: str, why: str) -> Refusal:
    """The refusal of a workload whose policy cannot be read just now."""
    return Refusal(
        "PolicyUnavailable",
        f"{workload_policy.display_name(name)} could not be read: {why}",
        where="deltashard.io/policy",
        remedy="try again",
    )
