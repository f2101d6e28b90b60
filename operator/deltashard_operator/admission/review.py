"""An AdmissionReview in, an AdmissionReview out: `parse`, then `answer`. Pure; `resolution` stands between the two.

    parse(body) -> Request | Answer         the object, its kind, its annotations, read once
    resolution.resolve(request) -> Resolved its policy, or why it may not be admitted: what the API has to be asked for
    answer(resolved) -> Answer              the injected object as a patch, and warnings

What needs no look at the API is answered by `parse`: an object to leave alone, a manifest that contradicts itself.

Nothing but the CREATE of an annotated Job or pod is ever changed or refused; the webhook configuration's conditions
keep everything else away, and what comes anyway is admitted untouched. A refusal carries its code as the status'
reason and a sentence as its message. What our own code gets wrong is raised, for the API server to treat by its
failure policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.errors import UserError

from deltashard_operator import VERSION
from deltashard_operator.admission import run_claim, warning, workload_kind
from deltashard_operator.admission.injection import check_marked, inject, is_injected
from deltashard_operator.admission.run_claim import RunClaim
from deltashard_operator.admission.workload_kind import Target
from deltashard_operator.api import annotation
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import json_patch, run_identity


class BadReview(UserError):
    """The request body is no AdmissionReview that can be answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The CREATE of an annotated Job or pod."""

    uid: str
    """The review's, which its answer bears."""
    namespace: str
    target: Target
    annotations: Annotations
    claim: RunClaim | None
    """The older run it asks to go on with; None: it begins a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A request, and what the API and the chart have to say to it."""

    request: Request
    policy: Policy | Refusal
    """The policy to inject by, or why the workload may not be admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The review to send back, and what happened, for log and metrics."""

    review: dict[str, Any]
    kind: str
    """Job, Pod or other."""
    outcome: str
    """injected, unchanged, or the code of a refusal."""
    sentence: str = ""
    """What a refused user reads."""


def parse(body: bytes) -> Request | Answer:
    """What is asked for, or the answer where nothing has to be looked up for it.

    Raises:
        ValueError: the body is no JSON.
        BadReview: it is no review.
    """
    request = _request(json.loads(body))
    uid, namespace = request["uid"], str(request.get("namespace", ""))
    group, kind = (str((request.get("kind") or {}).get(key, "")) for key in ("group", "kind"))
    target = workload_kind.target(group, kind, request["object"]) if _is_create(request) else None
    if target is None or not annotation.opted_in(*target.annotations):
        return _unchanged(uid, kind if kind in {"Job", "Pod"} else "other")
    try:
        said = annotation.read(*target.annotations)
        workload_kind.check(target)
        if is_injected(target.template):
            check_marked(target.template, said, target.recipe)
    except Refusal as refusal:
        return _refused(uid, kind, refusal)
    claim = None
    if said.run_id is not None:
        claim = RunClaim(
            namespace=namespace,
            run_id=said.run_id,
            workload_uid=run_identity.workload_uid(kind, target.document),
            numbering=run_claim.numbering_of_object(kind, target.document),
        )
    return Request(uid=uid, namespace=namespace, target=target, annotations=said, claim=claim)


def answer(resolved: Resolved) -> Answer:
    """The object with its sidecar, or the refusal; raises `InternalBug` for a fault of ours."""
    request, policy = resolved.request, resolved.policy
    uid, target = request.uid, request.target
    if isinstance(policy, Refusal):
        return _refused(uid, target.kind, policy)
    keep_grace = workload_kind.states_grace(target)
    try:
        template = inject(
            target.template,
            policy,
            target.recipe,
            keep_grace=keep_grace,
            queued=workload_kind.is_queued(target),
        )
    except Refusal as refusal:
        return _refused(uid, target.kind, refusal)
    if template == target.template:
        return _unchanged(uid, target.kind)
    operations = json_patch.additions(target.document, target.put(template, request.annotations.run_id))
    warnings = warning.of_workload(target, policy, keep_grace=keep_grace)
    review = _review(
        uid,
        allowed=True,
        patchType="JSONPatch",
        patch=json_patch.encoded(operations),
        auditAnnotations={"injected": VERSION, "policy": policy.name},
        **({"warnings": list(warnings)} if warnings else {}),
    )
    return Answer(review=review, kind=target.kind, outcome="injected")


def _request(review: object) -> Mapping[str, Any]:
    request = review.get("request") if isinstance(review, Mapping) else None
    if (
        not isinstance(review, Mapping)
        or not isinstance(request, Mapping)
        or not isinstance(request.get("uid"), str)
        or review.get("apiVersion") != "admission.k8s.io/v1"
    ):
        raise BadReview("no AdmissionReview of admission.k8s.io/v1 with a request", where="request body")
    return request


def _is_create(request: Mapping[str, Any]) -> bool:
    """Whether an object of its own is created, not a subresource of one."""
    return (
        request.get("operation") == "CREATE"
        and not request.get("subResource")
        and isinstance(request.get("object"), Mapping)
    )


def _unchanged(uid: str, kind: str) -> Answer:
    return Answer(review=_review(uid, allowed=True), kind=kind, outcome="unchanged")


def _refused(uid: str, kind: str, refusal: Refusal) -> Answer:
    status = {
        "code": 503 if refusal.code == "PolicyUnavailable" else 422,
        "reason": refusal.code,
        "message": refusal.sentence,
    }
    review = _review(uid, allowed=False, status=status)
    return Answer(review=review, kind=kind, outcome=refusal.code, sentence=refusal.sentence)


def _review(uid: str, *, allowed: bool, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": uid, "allowed": allowed, **more},
    }
