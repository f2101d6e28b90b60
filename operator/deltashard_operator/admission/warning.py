"""Admission warnings: the workload is admitted, and its author should know something. At most 200 characters each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from deltashard_operator.admission import injection, workload_kind
from deltashard_operator.admission.workload_kind import Target
from deltashard_operator.api.workload_policy import DELETE, Policy
from deltashard_operator.kube.cluster_name import CACHE_VOLUME, EVICTABLE_VOLUMES, SIDECAR, is_mesh_proxy

SPOT = "cloud.google.com/gke-spot"
"""Label of nodes that may be taken away at short notice."""
SPOT_GRACE_S = 15


def of_workload(target: Target, policy: Policy, *, keep_grace: bool) -> tuple[str, ...]:
    """What to warn the author of an injected workload about, by what was written."""
    spec = target.template.get("spec") or {}
    warnings = _of_grace(spec, policy, keep_grace=keep_grace)
    if not spec.get("hostNetwork") and policy.metrics_port and not injection.metrics_port(spec, policy):
        warnings.append(
            f"deltashard: a container declares port {policy.metrics_port}, so {SIDECAR} serves no metrics"
        )
    if spec.get("hostNetwork") and _needs_names(spec, policy):
        warnings.append(
            "deltashard: on hostNetwork with this dnsPolicy the sidecar cannot find the controller, or a store in the "
            "cluster, by a Service's name: set dnsPolicy ClusterFirstWithHostNet"
        )
    stated = ((target.template.get("metadata") or {}).get("annotations") or {}).get(EVICTABLE_VOLUMES)
    if stated is not None and CACHE_VOLUME not in stated.split(","):
        warnings.append(
            f"deltashard: the autoscaler keeps the pod's node for the volume {CACHE_VOLUME}: add it to the annotation "
            f"{EVICTABLE_VOLUMES}"
        )
    proxy = next((each["name"] for each in spec.get("containers") or [] if is_mesh_proxy(each["name"])), "")
    if proxy:
        warnings.append(
            f"deltashard: {proxy} is no native sidecar: it ends with the trainer, and what {SIDECAR} still uploads "
            "then has no network"
        )
    if policy.storage_request_bytes and workload_kind.is_queued(target):
        warnings.append(
            f"deltashard: policy {policy.name} requests ephemeral-storage: Kueue "
            "admits the workload only if the ClusterQueue covers it"
        )
    if policy.reclaim == DELETE and not policy.reclaims:
        warnings.append(
            f"deltashard: policy {policy.name} has reclaim.policy Delete, and the chart's reclaim.enabled is false: "
            "the checkpoints of this run will stay"
        )
    unknown = workload_kind.unknown_owner(target)
    if unknown:
        warnings.append(
            f"deltashard: {unknown} is not supported: if it makes its pods anew they may not go on with their run, "
            "and several of its pods would fence one another; use run-id, and one pod"
        )
    if target.kind == "Job":
        job = target.document.get("spec") or {}
        if job.get("podReplacementPolicy") == "Failed" or job.get("podFailurePolicy"):
            warnings.append(
                "deltashard: with podFailurePolicy or podReplacementPolicy Failed, a pod on a lost node is not "
                "replaced until its Node object is deleted or tainted out-of-service"
            )
        if (job.get("parallelism") or 1) > 1 and job.get("completionMode") != "Indexed":
            warnings.append(
                "deltashard: pods of a Job without completionMode Indexed cannot be told apart: unless they are ranks "
                "of one training, one of them trains and fences the others"
            )
    return tuple(warnings)


def _of_grace(spec: Mapping[str, Any], policy: Policy, *, keep_grace: bool) -> list[str]:
    warnings = []
    grace_s = spec.get("terminationGracePeriodSeconds", injection.DEFAULT_GRACE_S)
    kept = grace_s != injection.DEFAULT_GRACE_S or keep_grace
    if kept and grace_s < policy.grace_s:
        warnings.append(
            f"deltashard: terminationGracePeriodSeconds is {grace_s} s and policy {policy.name} asks for "
            f"{policy.grace_s} s; a save at eviction may not end in time"
        )
    if _asks_for_spot(spec) and (grace_s if kept else policy.grace_s) > SPOT_GRACE_S:
        warnings.append(
            f"deltashard: {SPOT} nodes give a pod {SPOT_GRACE_S} s to end, whatever its grace period is: set "
            f"gracePeriod {SPOT_GRACE_S}s in policy {policy.name}, or a save may not end in time"
        )
    return warnings


def _asks_for_spot(spec: Mapping[str, Any]) -> bool:
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms") or []
    asked = [
        rule.get("key")
        for term in terms
        for rule in term.get("matchExpressions") or []
        if rule.get("operator") in {"In", "Exists"}
    ]
    return SPOT in (spec.get("nodeSelector") or {}) or SPOT in asked


def _needs_names(spec: Mapping[str, Any], policy: Policy) -> bool:
    """Whether something is to be reached by a name of the cluster's that the node's resolver does not know."""
    if spec.get("dnsPolicy", "ClusterFirst") not in {"ClusterFirst", "Default"}:
        return False
    endpoint = parse_qs(urlsplit(policy.url).query).get("endpoint", [""])[0]
    hosts = (policy.fleet.rpartition(":")[0], urlsplit(endpoint).hostname or "")
    # `service`, `service.namespace` and `service.namespace.svc...`; addresses and others are left to the node.
    return any(host and ":" not in host and (host.count(".") < 2 or ".svc" in host) for host in hosts)
