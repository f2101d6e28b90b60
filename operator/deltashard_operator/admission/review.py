"""Processing of AdmissionReviews: `parse`, then `answer`. Pure; `webhook` does the lookups in between.

    parse(body) -> AdmissionRequest | ReviewResult      the object, its kind and its annotations
    webhook                                             looks up the policies in the API
    answer(request, policies) -> ReviewResult           the injected object as a patch, and warnings

`parse` answers requests that need no lookup: objects without annotations, and contradictory manifests.

Only the CREATE of annotated objects, and the update of an injected JobSet or PyTorchJob (to restore parts that the
applied manifest lacks), are changed or rejected. The webhook configuration's conditions filter everything else, and
unexpected requests are admitted unchanged. A rejection has its code as the status' reason and a sentence as its
message. Internal errors are raised, so that the API server applies the failure policy. The patch replaces the changed
members of the object, `metadata` and `spec`, as a whole.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.errors import UserError

from deltashard_operator.admission import workload_kind
from deltashard_operator.admission.injection import (
    DEFAULT_GRACE_S,
    check_marked,
    inject,
    is_injected,
    restore_injected,
)
from deltashard_operator.admission.run_holder import RunClaim
from deltashard_operator.admission.workload_kind import InjectionTarget
from deltashard_operator.api import annotation
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import DELETE, Policy
from deltashard_operator.kube import run_identity
from deltashard_operator.kube.cluster_name import QUEUE_LABEL


class InvalidReview(UserError):
    """The request body is not a valid AdmissionReview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedTemplate:
    """Annotated Job, pod or template."""

    target: InjectionTarget
    annotations: Annotations
    claim: RunClaim | None = None
    """The existing run that it may continue; None for a new run or if the object itself is only a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """CREATE of an object with annotated parts."""

    uid: str
    """UID of the review, repeated in the answer."""
    namespace: str
    kind: str
    document: Mapping[str, Any]
    parts: tuple[AnnotatedTemplate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewResult:
    """AdmissionReview to return, and its outcome for log and metrics."""

    review: dict[str, Any]
    kind: str
    """An injected kind, or other."""
    outcome: str
    sentence: str = ""


def parse(body: bytes) -> AdmissionRequest | ReviewResult:
    """Parse a review. Returns the request, or the answer if no lookup is needed.

    Raises:
        ValueError: the body is not JSON.
        InvalidReview: the body is not an AdmissionReview.
    """
    review = json.loads(body)
    request = review.get("request") if isinstance(review, Mapping) else None
    known = isinstance(request, Mapping) and review.get("apiVersion") == "admission.k8s.io/v1"
    if not isinstance(request, Mapping) or not known or not isinstance(request.get("uid"), str):
        raise InvalidReview(
            "not an AdmissionReview of admission.k8s.io/v1 with a request", where="request body"
        )
    uid, namespace = request["uid"], str(request.get("namespace", ""))
    group, kind = (str((request.get("kind") or {}).get(key, "")) for key in ("group", "kind"))
    document, operation = request.get("object"), request.get("operation")
    templated = (group, kind) in workload_kind.TEMPLATED
    before = request.get("oldObject") if templated and operation == "UPDATE" else None
    asked = (group, kind) in workload_kind.ADMITTED and not request.get("subResource")
    if not asked or not isinstance(document, Mapping) or (operation != "CREATE" and before is None):
        return _answer(uid, "other", "unchanged", allowed=True)
    try:
        parts = _annotated_parts(kind, document, "" if templated else namespace)
        if before is not None:
            return _update_response(uid, kind, document, parts, _annotated_parts(kind, before))
    except Refusal as refusal:
        return rejection(uid, kind, refusal)
    if not parts:
        return _answer(uid, kind, "unchanged", allowed=True)
    return AdmissionRequest(uid=uid, namespace=namespace, kind=kind, document=document, parts=parts)


def _annotated_parts(
    kind: str, document: Mapping[str, Any], namespace: str = ""
) -> tuple[AnnotatedTemplate, ...]:
    """Return the annotated parts of an object. Raises `Refusal` if a part is contradictory.

    `namespace`: namespace of the claimed run; empty for a template, which claims none.
    """
    parts = []
    for target in workload_kind.targets(kind, document):
        if not annotation.has_policy(*target.annotations):
            continue
        annotations = annotation.read(*target.annotations)
        workload_kind.check_supported(target)
        if is_injected(target.template):
            check_marked(target.template, annotations, target.recipe)
        claim = RunClaim(
            namespace=namespace,
            run_id=annotations.run_id,
            workload_uid=run_identity.workload_uid(kind, target.document),
        )
        claims = namespace and (claim.run_id or claim.workload_uid)
        parts.append(
            AnnotatedTemplate(target=target, annotations=annotations, claim=claim if claims else None)
        )
    return tuple(parts)


def answer(request: AdmissionRequest, policies: Sequence[Policy]) -> ReviewResult:
    """Inject the sidecar by the policy of each part. Raises `Refusal`, or `InternalBug` for an internal error."""
    changed: list[tuple[InjectionTarget, Mapping[str, Any]]] = []
    warnings: list[str] = []
    for part, policy in zip(request.parts, policies, strict=True):
        target = part.target
        queued = QUEUE_LABEL in target.labels
        template = inject(
            target.template, policy, target.recipe, keep_grace=target.has_explicit_grace, queued=queued
        )
        if template != target.template:
            changed.append((target, target.with_template(template, part.annotations.run_id)))
            warnings += _warnings(target, policy)
    return _patch_response(request.uid, request.kind, request.document, changed, warnings)


def _warnings(target: InjectionTarget, policy: Policy) -> Iterator[str]:
    """Yield warnings for the author of an injected workload, at most 200 characters each."""
    spec, job = target.template.get("spec") or {}, target.document.get("spec") or {}
    grace_s = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
    if grace_s < policy.grace_s and (grace_s != DEFAULT_GRACE_S or target.has_explicit_grace):
        yield (
            f"deltashard: terminationGracePeriodSeconds is {grace_s} s and policy {policy.name} asks for "
            f"{policy.grace_s} s; a save at eviction may not end in time"
        )
    node_names = spec.get("hostNetwork") and spec.get("dnsPolicy") in {None, "ClusterFirst", "Default"}
    if node_names and ".svc" in f"{policy.fleet} {policy.store.get('endpoint', '')}":
        yield (
            "deltashard: on hostNetwork with this dnsPolicy the sidecar cannot resolve the Service names of the "
            "controller or of a store in the cluster: set dnsPolicy ClusterFirstWithHostNet"
        )
    if policy.reclaim == DELETE and not policy.can_reclaim:
        yield (
            f"deltashard: policy {policy.name} has reclaim.policy Delete, and the chart's reclaim.enabled is false: "
            "the checkpoints of this run will stay"
        )
    if target.kind != "Job":
        return
    if job.get("podReplacementPolicy") == "Failed" or job.get("podFailurePolicy"):
        yield (
            "deltashard: with podFailurePolicy or podReplacementPolicy Failed, a pod on a lost node is not replaced "
            "until its Node object is deleted or tainted out-of-service"
        )
    if (job.get("parallelism") or 1) > 1 and job.get("completionMode") != "Indexed":
        yield (
            "deltashard: pods of a Job without completionMode Indexed are indistinguishable: unless they are ranks of "
            "one training, one of them trains and fences the others"
        )


def _update_response(
    uid: str,
    kind: str,
    document: Mapping[str, Any],
    parts: tuple[AnnotatedTemplate, ...],
    before: tuple[AnnotatedTemplate, ...],
) -> ReviewResult:
    """Restore the injected parts of an object after an update."""
    old = {each.target.path: each for each in before if is_injected(each.target.template)}
    changed = []
    for part in parts:
        was = old.get(part.target.path)
        if was is None:
            continue
        if part.annotations != was.annotations:
            raise Refusal(
                "BadAnnotation",
                f"the sidecar of the {kind} was injected with other annotations",
                where=".".join(map(str, part.target.path)),
                remedy="delete it and create it again",
            )
        template = restore_injected(part.target.template, was.target.template)
        changed.append((part.target, part.target.with_template(template, part.annotations.run_id)))
    return _patch_response(uid, kind, document, changed)


def _patch_response(
    uid: str,
    kind: str,
    before: Mapping[str, Any],
    changed: Sequence[tuple[InjectionTarget, Mapping[str, Any]]],
    warnings: Sequence[str] = (),
) -> ReviewResult:
    after = workload_kind.with_targets(before, changed)
    if before == after:
        return _answer(uid, kind, "unchanged", allowed=True)
    more: dict[str, Any] = {"warnings": list(dict.fromkeys(warnings))} if warnings else {}
    # `add` of a member that exists replaces it (RFC 6902, 4.1).
    patch = [
        {"op": "add", "path": f"/{key}", "value": value}
        for key, value in after.items()
        if before.get(key) != value
    ]
    more |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    return _answer(uid, kind, "injected", allowed=True, **more)


def rejection(uid: str, kind: str, refusal: Refusal) -> ReviewResult:
    code, sentence = 503 if refusal.code == "PolicyUnavailable" else 422, refusal.sentence
    status = {"code": code, "reason": refusal.code, "message": sentence}
    return _answer(uid, kind, refusal.code, sentence, allowed=False, status=status)


def _answer(uid: str, kind: str, outcome: str, sentence: str = "", **response: Any) -> ReviewResult:
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": uid, **response},
    }
    return ReviewResult(review=review, kind=kind, outcome=outcome, sentence=sentence)
