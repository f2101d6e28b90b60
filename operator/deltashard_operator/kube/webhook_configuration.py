"""Admission objects of the cluster: what reaches the webhook, and what holds without it. The chart renders the same.

IMPORTANT: `failurePolicy: Fail` is bearable only because matchConditions keep every workload that is not annotated
from reaching us at all. They use CEL's optional types: `object.metadata.annotations['...']` is an *error* on an
object with no annotations map, and under Fail an error blocks it, and with it the whole cluster, without ever calling
the webhook.
"""

from __future__ import annotations

from typing import Any

from deltashard_operator.kube import watched_namespace
from deltashard_operator.kube.cluster_name import INJECTED, POLICY, SIDECAR

CONFIGURATION = "deltashard-webhook"
TIMEOUT_S = 5
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
PATH = "/mutate"


def _has(where: str, key: str) -> str:
    return f"{where}[?'{key}'].hasValue()"


_OWN = "object.metadata.?annotations"
_TEMPLATE = "object.spec.template.?metadata.?annotations"
JOB_CONDITION = f"{_has(_OWN, POLICY)} || {_has(_TEMPLATE, POLICY)}"
"""CEL: an annotated Job."""
_MIRROR = _has(_OWN, "kubernetes.io/config.mirror")
_OF_JOB = (
    "object.metadata.?ownerReferences.orValue([]).exists(o, "
    "o.kind == 'Job' && o.apiVersion.startsWith('batch/') && o.?controller.orValue(false))"
)
POD_CONDITION = f"{_has(_OWN, POLICY)} && !{_MIRROR} && !({_has(_OWN, INJECTED)} && {_OF_JOB})"
"""CEL: an annotated pod, but for those whose sidecar their Job's template brings, which need no webhook."""

_HAS_ONE = f"{_has('t.?metadata.?annotations', POLICY)} || {_has('t.?spec.?template.?metadata.?annotations', POLICY)}"
TEMPLATES = {
    "jobsets": "object.spec.?replicatedJobs.orValue([]).map(r, r.template)",
    "pytorchjobs": "object.spec.?pytorchReplicaSpecs.orValue({}).map(k, object.spec.pytorchReplicaSpecs[k].template)",
}
"""CEL: the templates in a JobSet and in a PyTorchJob, by resource."""


def _changed(resource: str) -> str:
    """CEL: a created object, or one whose templates an update changes."""
    before = TEMPLATES[resource].replace("object", "oldObject")
    return f"request.operation == 'CREATE' || {TEMPLATES[resource]} != {before}"


_SIDECAR_IN = "{spec}.?initContainers.orValue([]).exists(c, c.name == '" + SIDECAR + "')"
JOB_HAS_SIDECAR = _SIDECAR_IN.format(spec="object.spec.template.spec")
POD_HAS_SIDECAR = _SIDECAR_IN.format(spec="object.spec")
POD_OPTED_IN = f"{_has(_OWN, POLICY)} && !{_MIRROR}"
ANNOTATED_BEFORE = JOB_CONDITION.replace("object", "oldObject")
"""CEL, of an UPDATE: the Job was annotated before."""


def mutating(
    client_config: dict[str, Any],
    *,
    failure_policy: str = "Fail",
    exempt: tuple[str, ...] = (),
    namespaces: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The MutatingWebhookConfiguration.

    Args:
        client_config: `clientConfig` of both webhooks (a service or a URL, and the caBundle).
        failure_policy: Fail or Ignore.
        exempt: namespaces left alone besides kube-system (the chart's own).
        namespaces: those whose workloads are sent to the webhook; none named: all others. Where the API server has no
            ValidatingAdmissionPolicies to refuse what is annotated elsewhere, name none: the webhook refuses it.
    """
    selector = _selector(exempt)
    if namespaces:
        watched = {"key": NAMESPACE_LABEL, "operator": "In", "values": list(namespaces)}
        selector = {"matchExpressions": [*selector["matchExpressions"], watched]}
    shared = {
        "admissionReviewVersions": ["v1"],
        "clientConfig": client_config,
        "failurePolicy": failure_policy,
        "matchPolicy": "Equivalent",
        "namespaceSelector": selector,
        "reinvocationPolicy": "IfNeeded",
        "sideEffects": "None",
        "timeoutSeconds": TIMEOUT_S,
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": CONFIGURATION},
        "webhooks": [
            {
                "name": "jobs.deltashard.io",
                "rules": [_rule("batch", "jobs", "CREATE")],
                "matchConditions": [{"name": "annotated", "expression": JOB_CONDITION}],
                **shared,
            },
            *(
                {
                    "name": f"{resource}.deltashard.io",
                    "rules": [_rule(group, resource, "CREATE", "UPDATE", version=version)],
                    "matchConditions": [
                        {"name": "annotated", "expression": f"{TEMPLATES[resource]}.exists(t, {_HAS_ONE})"},
                        {"name": "templates", "expression": _changed(resource)},
                    ],
                    **shared,
                }
                for group, version, resource in (
                    ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
                    ("kubeflow.org", "v1", "pytorchjobs"),
                )
            ),
            {
                "name": "pods.deltashard.io",
                "rules": [_rule("", "pods", "CREATE")],
                "matchConditions": [{"name": "annotated", "expression": POD_CONDITION}],
                **shared,
            },
        ],
    }


def _selector(exempt: tuple[str, ...]) -> dict[str, Any]:
    values = ["kube-system", *exempt]
    return {"matchExpressions": [{"key": NAMESPACE_LABEL, "operator": "NotIn", "values": values}]}


def _rule(group: str, resource: str, *operations: str, version: str = "v1") -> dict[str, Any]:
    return {
        "apiGroups": [group],
        "apiVersions": [version],
        "operations": list(operations),
        "resources": [resource],
        "scope": "Namespaced",
    }


def validating(exempt: tuple[str, ...] = (), *, namespaces: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """ValidatingAdmissionPolicies and their bindings (Kubernetes 1.30 and later), which need no webhook to be alive.

    An annotated Job or pod that ends up without the sidecar is denied: training that silently saves nothing is worse
    than training that does not start. So is one of a namespace that is not among `namespaces` (none named: all are
    watched), unless it has its sidecar from a time when it was: the next pod of a Job goes on. Adding the annotation to
    a Job that exists draws a warning: templates are immutable, so it is too late.
    """
    missing = f"it has the annotation {POLICY} but no {SIDECAR}: the webhook did not see it; create it again"
    late = f"{POLICY} was added to a Job that exists, which does nothing: create the Job anew"
    said = _missing_in(namespaces, missing)
    return [
        *_policy(
            "deltashard-jobs-have-sidecar",
            rule=_rule("batch", "jobs", "CREATE"),
            when=JOB_CONDITION,
            must=JOB_HAS_SIDECAR,
            message=missing,
            said=said,
            action="Deny",
            exempt=exempt,
        ),
        *_policy(
            "deltashard-pods-have-sidecar",
            rule=_rule("", "pods", "CREATE"),
            when=POD_OPTED_IN,
            must=POD_HAS_SIDECAR,
            message=missing,
            said=said,
            action="Deny",
            exempt=exempt,
        ),
        *_policy(
            "deltashard-annotated-too-late",
            rule=_rule("batch", "jobs", "UPDATE"),
            when=JOB_CONDITION,
            must=ANNOTATED_BEFORE,
            message=late,
            action="Warn",
            exempt=exempt,
        ),
    ]


def _missing_in(namespaces: tuple[str, ...], missing: str) -> str:
    """CEL: why there is no sidecar, which in a namespace that is not watched is another reason."""
    if not namespaces:
        return ""
    listed = ", ".join(f"'{each}'" for each in namespaces)
    elsewhere = watched_namespace.not_watched("' + request.namespace + '")
    return f"request.namespace in [{listed}] ? '{missing}' : '{elsewhere}; {watched_namespace.REMEDY}'"


def _policy(
    name: str,
    *,
    rule: dict[str, Any],
    when: str,
    must: str,
    message: str,
    action: str,
    exempt: tuple[str, ...],
    said: str = "",
) -> list[dict[str, Any]]:
    """`said`: CEL that gives the message where one does not fit all."""
    validation = {"expression": must, "message": message, "reason": "Invalid"}
    if said:
        validation["messageExpression"] = said
    return [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule], "namespaceSelector": _selector(exempt)},
                "matchConditions": [{"name": "annotated", "expression": when}],
                "validations": [validation],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": [action]},
        },
    ]
