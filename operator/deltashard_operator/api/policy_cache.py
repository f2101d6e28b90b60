"""CheckpointPolicies of both kinds in memory, as watches tell them, and one live look for what is not there.

The cache is `synced` from its first list on and stays so through an outage of the API: an admission only comes when the
API works.

A policy that is not in the cache may have been created a moment ago: it is asked for once, live. Only that answer
makes a refusal. Most workloads ask for `default` where the namespace has none of that name and the chart's is meant:
that answer holds for `ABSENT_S`, else every admission of theirs would cost a call to the API.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from deltashard_operator.api import workload_policy
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.call import ApiClient, NoReply, Requester
from deltashard_operator.kube.object_watch import ObjectKey, WatchedKind

GROUP, VERSION = "deltashard.io", "v1alpha1"
NAMESPACED, CLUSTERS = "checkpointpolicies", "clustercheckpointpolicies"
ABSENT_S = 1.0
"""How long the answer that a policy is not there may be used again; the watch brings a new one sooner."""
MAX_ABSENT = 4096
Spec = Mapping[str, Any]


class PolicyCache:
    """All policies' specs by (namespace, name), as `workload_policy.key_of` says. Watch its `kinds`.

    Reads are from any thread.
    """

    def __init__(self, api: ApiClient, *, on_restart: Callable[[], None] = lambda: None) -> None:
        """`on_restart` is called when the policies were listed anew."""
        self._request = Requester(api)
        self._specs: dict[tuple[str, str], Spec] = {}
        self._absent_s: dict[tuple[str, str], float] = {}
        """When it was looked for and not there, by the monotonic clock."""
        self._on_restart = on_restart
        self.synced = False
        """Whether the policies were listed once."""
        self.kinds = policy_kinds(self._take, self._drop)

    def __len__(self) -> int:
        return len(self._specs)

    def _take(self, item: Mapping[str, Any]) -> None:
        metadata = item["metadata"]
        self._specs[metadata.get("namespace", ""), metadata["name"]] = _spec_of(item)

    def _drop(self, key: ObjectKey, _item: Mapping[str, Any] | None) -> None:
        self._specs.pop((key.namespace, key.name), None)

    def on_list(self) -> None:
        if self.synced:
            self._on_restart()
        self.synced = True

    def get(self, namespace: str, name: str) -> Spec | None:
        """The spec of the policy that a workload of this namespace names so."""
        return self._specs.get(workload_policy.key_of(namespace, name))

    def absent(self, namespace: str, name: str) -> bool:
        """Whether a live look of a moment ago did not find it."""
        key = workload_policy.key_of(namespace, name)
        return time.monotonic() - self._absent_s.get(key, float("-inf")) < ABSENT_S

    def look(self, namespace: str, name: str, deadline: Deadline) -> Spec | None:
        """The policy's spec from the API itself, None when there is none; raises `Refusal` (PolicyUnavailable)."""
        key = workload_policy.key_of(namespace, name)
        try:
            found = self._request("GET", policy_path(key), timeout_s=deadline.left_s())
        except NoReply as error:
            raise unavailable(name, f"the API did not answer: {type(error.__cause__).__name__}") from error
        if found.status == 404:
            if len(self._absent_s) >= MAX_ABSENT:
                self._absent_s = {}
            self._absent_s[key] = time.monotonic()
            return None
        if not found.ok:
            raise unavailable(name, f"the API answered {found.sentence}")
        return _spec_of(found.document)


def policy_kinds(
    on_object: Callable[[Any], None], on_gone: Callable[[ObjectKey, Any], None]
) -> tuple[WatchedKind, ...]:
    """Both kinds of policies, to be watched."""
    root = f"/apis/{GROUP}/{VERSION}"
    return (
        WatchedKind("policies", f"{root}/{NAMESPACED}", on_object, on_gone, by_name=True),
        WatchedKind(
            "cluster policies",
            f"{root}/{CLUSTERS}",
            on_object,
            on_gone,
            by_name=True,
            namespaced=False,
            everywhere=True,
        ),
    )


def policy_path(key: tuple[str, str]) -> str:
    """URL path of the policy with this key."""
    namespace, name = key
    place = f"namespaces/{namespace}/{NAMESPACED}" if namespace else CLUSTERS
    return f"/apis/{GROUP}/{VERSION}/{place}/{name}"


def _spec_of(item: Mapping[str, Any]) -> Spec:
    spec = item.get("spec")
    return spec if isinstance(spec, dict) else {}


def unavailable(name: str, why: str) -> Refusal:
    """The refusal of a workload whose policy cannot be read just now."""
    return Refusal(
        "PolicyUnavailable",
        f"{workload_policy.called(name)} could not be read: {why}",
        where="deltashard.io/policy",
        remedy="try again",
    )
