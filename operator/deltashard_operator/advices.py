"""Admission warnings: the workload is admitted, and its author should know something. At most 200 characters each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard_operator import injects
from deltashard_operator.names import SIDECAR
from deltashard_operator.policies import Policy


def of_workload(
    kind: str, document: Mapping[str, Any], template: Mapping[str, Any], policy: Policy, *, keep_grace: bool
) -> tuple[str, ...]:
    """What to warn the author of an injected workload about; `template` is as it was written."""
    spec = template.get("spec") or {}
    warnings = []
    grace_s = spec.get("terminationGracePeriodSeconds", injects.DEFAULT_GRACE_S)
    kept = grace_s != injects.DEFAULT_GRACE_S or keep_grace
    if kept and grace_s < policy.grace_s:
        warnings.append(
            f"deltashard: terminationGracePeriodSeconds is {grace_s} s and policy {policy.name} asks for "
            f"{policy.grace_s} s; a save at eviction may not end in time"
        )
    if not spec.get("hostNetwork") and policy.metrics_port and not injects.metrics_port(spec, policy):
        warnings.append(
            f"deltashard: a container declares port {policy.metrics_port}, so {SIDECAR} serves no metrics"
        )
    if kind == "Job":
        job = document.get("spec") or {}
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
