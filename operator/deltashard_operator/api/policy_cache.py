"""Cache of CheckpointPolicies and ClusterCheckpointPolicies, with a live read on a miss.

The cache is `synced` from its first list on, also during an outage of the API, because admissions arrive only while the
API works. A policy that is missing may have just been created, so it is read once from the API.
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
"""Time budget of an admission. The last second of the API server's timeout is for transport."""
Spec = Mapping[str, Any]


class PolicyCache:
    """Specs of all policies by (namespace, name); see `workload_policy.key_of`. Watch its `kinds`."""

    def __init__(self, call: Caller) -> None:
        self._call = call
        self._specs: dict[tuple[str, str], Spec] = {}
        self.synced = False
        self.kinds = policy_kinds(self._upsert, self._remove)

    def _upsert(self, item: Mapping[str, Any]) -> None:
        metadata = item["metadata"]
        self._specs[metadata.get("namespace", ""), metadata["name"]] = item.get("spec") or {}

    def _remove(self, key: ObjectKey, _item: Mapping[str, Any] | None) -> None:
        self._specs.pop((key.namespace, key.name), None)

    def on_list(self) -> None:
        self.synced = True

    def get(self, namespace: str, name: str) -> Spec | None:
        return self._specs.get(workload_policy.key_of(namespace, name))

    async def fetch(self, namespace: str, name: str) -> Spec | None:
        """Read the policy's spec from the API; None if it does not exist. Raises `Refusal` (PolicyUnavailable)."""
        try:
            document = await object_at(self._call, policy_path(workload_policy.key_of(namespace, name)))
        except ApiUnavailable as error:
            raise unavailable(name, error.what) from error
        return None if document is None else document.get("spec") or {}


def policy_kinds(
    on_object: Callable[[Any], None], on_deleted: Callable[[ObjectKey, Any], None]
) -> tuple[WatchedKind, ...]:
    clusters = WatchedKind(
        "cluster policies", f"{ROOT}/{CLUSTERS}", on_object, on_deleted, namespaced=False, everywhere=True
    )
    return WatchedKind("policies", f"{ROOT}/{NAMESPACED}", on_object, on_deleted), clusters


def policy_path(key: tuple[str, str]) -> str:
    namespace, name = key
    return f"{ROOT}/{f'namespaces/{namespace}/{NAMESPACED}' if namespace else CLUSTERS}/{name}"


def unavailable(name: str, why: str) -> Refusal:
    """Return the refusal of a workload whose policy is temporarily unreadable."""
    return Refusal(
        "PolicyUnavailable",
        f"{workload_policy.display_name(name)} could not be read: {why}",
        where="deltashard.io/policy",
        remedy="try again",
    )
