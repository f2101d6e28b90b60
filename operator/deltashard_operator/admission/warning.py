"""Admission warnings: the workload is admitted, and its author should do something. At most 200 characters each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deltashard_operator.admission.injection import DEFAULT_GRACE_S
from deltashard_operator.admission.sidecar_container import metrics_port
from deltashard_operator.admission.sidecar_resource import STORAGE
from deltashard_operator.admission.workload_kind import Target
from deltashard_operator.api.workload_policy import DELETE, Policy
from deltashard_operator.kube import owner_reference, quantity
from deltashard_operator.kube.cluster_name import (
    CACHE_VOLUME,
    EVICTABLE_VOLUMES,
    QUEUE_LABEL,
    SIDECAR,
    is_mesh_proxy,
)

SPOT = "cloud.google.com/gke-spot"
"""Label of nodes that may be taken away at short notice."""
SPOT_GRACE_S = 15


def of_workload(target: Target, policy: Policy) -> list[str]:
    """What to warn the author of an injected workload about, by what was written."""
    spec, job = target.template.get("spec") or {}, target.document.get("spec") or {}
    grace_s = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    if grace_s == DEFAULT_GRACE_S and not target.states_grace:
        grace_s = policy.grace_s
    host_network, port = spec.get("hostNetwork"), policy.sidecar["metricsPort"]
    node_names = host_network and spec.get("dnsPolicy", "ClusterFirst") in {"ClusterFirst", "Default"}
    addresses = f"{policy.fleet} {policy.store.get('endpoint', '')}"
    stated = policy.sidecar["resources"]
    disk = any(quantity.parse(stated[part].get(STORAGE, 0)) for part in ("requests", "limits"))
    volumes = ((target.template.get("metadata") or {}).get("annotations") or {}).get(EVICTABLE_VOLUMES)
    proxy = next((each["name"] for each in spec.get("containers") or [] if is_mesh_proxy(each["name"])), "")
    owner, is_job = target.owner, target.kind == "Job"
    applies = {
        f"terminationGracePeriodSeconds is {grace_s} s and policy {policy.name} asks for {policy.grace_s} s; a save at "
        "eviction may not end in time": grace_s < policy.grace_s,
        f"{SPOT} nodes give a pod {SPOT_GRACE_S} s to end, whatever its grace period is: set gracePeriod "
        f"{SPOT_GRACE_S}s in policy {policy.name}, or a save may not end in time": (
            _wants_spot(spec) and grace_s > SPOT_GRACE_S
        ),
        f"a container declares port {port}, so {SIDECAR} serves no metrics": (
            port and not host_network and not metrics_port(spec, policy)
        ),
        "on hostNetwork with this dnsPolicy the sidecar cannot find the controller, or a store in the cluster, by a "
        "Service's name: set dnsPolicy ClusterFirstWithHostNet": (
            node_names and re.search(r"\.svc|//[a-z0-9-]+(\.[a-z0-9-]+)?(:[0-9]+)?/?$", addresses)
        ),
        f"the autoscaler keeps the pod's node for the volume {CACHE_VOLUME}: add it to the annotation "
        f"{EVICTABLE_VOLUMES}": volumes is not None and CACHE_VOLUME not in volumes.split(","),
        f"{proxy} is no native sidecar: it ends with the trainer, and what {SIDECAR} still uploads then has no "
        "network": proxy,
        f"policy {policy.name} requests {STORAGE}: Kueue admits the workload only if the ClusterQueue covers it": (
            disk and QUEUE_LABEL in target.labels
        ),
        f"policy {policy.name} has reclaim.policy Delete, and the chart's reclaim.enabled is false: the checkpoints of "
        "this run will stay": policy.reclaim == DELETE and not policy.reclaims,
        f"{owner and owner.kind} of {owner and owner.api_version} is not supported: if it makes its pods anew they may "
        "not go on with their run, and several would fence one another; use run-id, and one pod": (
            owner is not None and owner.group_kind not in owner_reference.KNOWN
        ),
        "with podFailurePolicy or podReplacementPolicy Failed, a pod on a lost node is not replaced until its Node "
        "object is deleted or tainted out-of-service": (
            is_job and (job.get("podReplacementPolicy") == "Failed" or job.get("podFailurePolicy"))
        ),
        "pods of a Job without completionMode Indexed cannot be told apart: unless they are ranks of one training, one "
        "of them trains and fences the others": (
            is_job and (job.get("parallelism") or 1) > 1 and job.get("completionMode") != "Indexed"
        ),
    }
    return [f"deltashard: {sentence}" for sentence, true in applies.items() if true]


def _wants_spot(spec: Mapping[str, Any]) -> bool:
    """Whether the pod asks for such nodes, by selector or affinity."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    needs = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    rules = [
        rule for term in needs.get("nodeSelectorTerms") or [] for rule in term.get("matchExpressions") or []
    ]
    asked = [rule.get("key") for rule in rules if rule.get("operator") in {"In", "Exists"}]
    return SPOT in (spec.get("nodeSelector") or {}) or SPOT in asked
