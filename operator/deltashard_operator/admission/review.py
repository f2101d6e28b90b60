"""An AdmissionReview in, an AdmissionReview out. Pure: the policy comes from a function the caller gives.

Nothing but the CREATE of an annotated Job or pod is ever changed or refused; the webhook configuration's conditions
keep everything else away, and what comes anyway is admitted untouched. A refusal carries its code as the status'
reason and a sentence as its message. What our own code gets wrong is raised, for the API server to treat by its
failure policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.errors import UserError

from deltashard_operator import VERSION
from deltashard_operator.admission import numbering as numberings
from deltashard_operator.admission import reinjection, warning, workload_kind
from deltashard_operator.admission.injection import inject, is_injected
from deltashard_operator.admission.numbering import Numbering
from deltashard_operator.kube import json_patch, run_identity
from deltashard_operator.policy import annotation as notes
from deltashard_operator.policy import workload_policy
from deltashard_operator.policy.refusal import Refusal

Spec = Mapping[str, Any]
SpecOf = Callable[[str, str], Spec]
"""(namespace, name) -> the policy's merged spec; raises `Refusal` when there is none."""


class BadReview(UserError):
    """The request body is no AdmissionReview that can be answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The review to send back, and what happened, for metrics."""

    review: dict[str, Any]
    kind: str
    """Job, Pod or other."""
    outcome: str
    """injected, unchanged, or the code of a refusal."""
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What has to be known to answer a request."""

    namespace: str
    name: str
    """Of the policy."""
    run_id: str = ""
    """The run that the user wants to go on with; empty: a new one."""
    workload_uid: str = ""
    """Of the workload, where it exists already (a JobSet, a StatefulSet)."""
    numbering: Numbering | None = None
    """How its pods are numbered, each of which may be a run of its own."""


def asked(review: Mapping[str, Any]) -> Asked | None:
    """What has to be known to answer, or None when the answer needs nothing; raises `BadReview`."""
    request = _request(review)
    found = _annotated(request)
    if found is None:
        return None
    try:
        said = notes.read(*found.annotations)
    except Refusal:
        return None  # `answer` says so
    return Asked(
        namespace=str(request.get("namespace", "")),
        name=said.policy,
        run_id=said.run_id or "",
        workload_uid=run_identity.workload_uid(found.kind, request["object"]),
        numbering=numberings.of_object(found.kind, request["object"]),
    )


def answer(review: Mapping[str, Any], spec_of: SpecOf) -> Answer:
    """The answer to a review; raises `BadReview`, or `InternalBug` for a fault of ours."""
    request = _request(review)
    kind = str((request.get("kind") or {}).get("kind", ""))
    kind = kind if kind in {"Job", "Pod"} else "other"
    found = _annotated(request)
    if found is None:
        return Answer(review=_reply(request, allowed=True), kind=kind, outcome="unchanged")
    try:
        return _injected(request, found, spec_of)
    except Refusal as refusal:
        status = {
            "code": 503 if refusal.code == "PolicyUnavailable" else 422,
            "reason": refusal.code,
            "message": refusal.sentence,
        }
        reply = _reply(request, allowed=False, status=status)
        return Answer(review=reply, kind=kind, outcome=refusal.code, sentence=refusal.sentence)


def _injected(request: Mapping[str, Any], found: workload_kind.Target, spec_of: SpecOf) -> Answer:
    said = notes.read(*found.annotations)
    document = request["object"]
    workload_kind.check(found.kind, document)
    if is_injected(found.template):
        reinjection.check(found.template, said, found.recipe)
    policy = workload_policy.resolve(
        said.policy, spec_of(str(request.get("namespace", "")), said.policy), said
    )
    keep_grace = workload_kind.states_grace(document, found.grace_path)
    after = inject(found.template, policy, found.recipe, keep_grace=keep_grace)
    operations = json_patch.additions(document, found.put(document, after))
    if after == found.template:
        return Answer(review=_reply(request, allowed=True), kind=found.kind, outcome="unchanged")
    warnings = warning.of_workload(found.kind, document, found.template, policy, keep_grace=keep_grace)
    reply = _reply(
        request,
        allowed=True,
        patchType="JSONPatch",
        patch=json_patch.encoded(operations),
        auditAnnotations={"injected": VERSION, "policy": policy.name},
        **({"warnings": list(warnings)} if warnings else {}),
    )
    return Answer(review=reply, kind=found.kind, outcome="injected")


def _request(review: Mapping[str, Any]) -> Mapping[str, Any]:
    request = review.get("request") if isinstance(review, Mapping) else None
    if (
        not isinstance(request, Mapping)
        or not isinstance(request.get("uid"), str)
        or review.get("apiVersion") != "admission.k8s.io/v1"
    ):
        raise BadReview("no AdmissionReview of admission.k8s.io/v1 with a request", where="request body")
    return request


def _annotated(request: Mapping[str, Any]) -> workload_kind.Target | None:
    document = request.get("object")
    if (
        request.get("operation") != "CREATE"
        or request.get("subResource")
        or not isinstance(document, Mapping)
    ):
        return None
    kind = request.get("kind") or {}
    found = workload_kind.target(str(kind.get("group", "")), str(kind.get("kind", "")), document)
    return found if found is not None and notes.opted_in(*found.annotations) else None


def _reply(request: Mapping[str, Any], *, allowed: bool, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": request["uid"], "allowed": allowed, **more},
    }
