"""An AdmissionReview in, an AdmissionReview out: `parse`, then `answer`. Pure; `resolution` stands between the two.

    parse(body) -> Request | Answer         the object, its kind, its annotations, read once
    resolution.resolve(request)             its policies: what the API is asked for
    answer(request, policies) -> Answer     the injected object as a patch, and warnings

What needs no look at the API is answered by `parse`: an object to leave alone, a manifest that contradicts itself.

Nothing but the CREATE of what is annotated is ever changed or refused, and the update of a JobSet or a PyTorchJob that
was injected: there what an applied manifest took out is put back. The webhook configuration's conditions
keep everything else away, and what comes anyway is admitted untouched. A refusal carries its code as the status'
reason and a sentence as its message. What our own code gets wrong is raised, for the API server to treat by its
failure policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltashard_checkpoint.errors import UserError

from deltashard_operator import VERSION
from deltashard_operator.admission import run_claim, warning, workload_kind
from deltashard_operator.admission.injection import check_marked, inject, is_injected, put_back
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
class AnnotatedTemplate:
    """An annotated Job or pod, or the template of one."""

    target: Target
    annotations: Annotations
    claim: RunClaim | None = None
    """The run it goes on with; None: it begins a new one, or it is not the one that would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The CREATE of an object with annotated parts."""

    uid: str
    """The review's, which its answer bears."""
    namespace: str
    kind: str
    document: Mapping[str, Any]
    parts: tuple[AnnotatedTemplate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The review to send back, and what happened, for log and metrics."""

    review: dict[str, Any]
    kind: str
    """Of those that are injected, or other."""
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
    document, before = request.get("object") or {}, None
    if request.get("operation") == "UPDATE" and (group, kind) in workload_kind.TEMPLATED:
        before = request.get("oldObject")
    if (group, kind) not in workload_kind.ADMITTED or not _is_whole(request, before):
        return _unchanged(uid, "other")
    try:
        parts = parts_of(kind, document)
        if before is not None:
            return _updated(uid, kind, document, parts, parts_of(kind, before))
    except Refusal as refusal:
        return refused(uid, kind, refusal)
    if not parts:
        return _unchanged(uid, kind)
    if (group, kind) not in workload_kind.TEMPLATED:
        parts = tuple(_claiming(each, kind, namespace) for each in parts)
    return Request(uid=uid, namespace=namespace, kind=kind, document=document, parts=parts)


def parts_of(kind: str, document: Mapping[str, Any]) -> tuple[AnnotatedTemplate, ...]:
    """The annotated parts of an object; raises `Refusal` where one contradicts itself."""
    parts = []
    for target in workload_kind.targets(kind, document):
        if not annotation.opted_in(*target.annotations):
            continue
        said = annotation.read(*target.annotations)
        workload_kind.check(target)
        if is_injected(target.template):
            check_marked(target.template, said, target.recipe)
        parts.append(AnnotatedTemplate(target=target, annotations=said))
    return tuple(parts)


def _claiming(part: AnnotatedTemplate, kind: str, namespace: str) -> AnnotatedTemplate:
    run_id, target = part.annotations.run_id, part.target
    workload_uid = run_identity.workload_uid(kind, target.document)
    if run_id is None and not workload_uid:
        return part
    claim = RunClaim(
        namespace=namespace,
        run_id=run_id or "",
        workload_uid=workload_uid,
        numbering=run_claim.numbering_of_object(kind, target.document),
    )
    return replace(part, claim=claim)


def injected(
    document: Mapping[str, Any], parts: Iterable[tuple[AnnotatedTemplate, Policy]]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The object with a sidecar in each of these parts, and warnings; raises `Refusal`."""
    changed: list[tuple[Target, Mapping[str, Any]]] = []
    warnings: list[str] = []
    for part, policy in parts:
        target = part.target
        keep_grace = workload_kind.states_grace(target)
        template = inject(
            target.template,
            policy,
            target.recipe,
            keep_grace=keep_grace,
            queued=workload_kind.is_queued(target),
        )
        if template != target.template:
            changed.append((target, target.put(template, part.annotations.run_id)))
            warnings += warning.of_workload(target, policy, keep_grace=keep_grace)
    return workload_kind.with_each(document, changed), tuple(dict.fromkeys(warnings))


def answer(request: Request, policies: Sequence[Policy]) -> Answer:
    """The object with its sidecar, by the policy of each part; raises `Refusal`, `InternalBug` for a fault of ours."""
    document, warnings = injected(request.document, zip(request.parts, policies, strict=True))
    names = ",".join(dict.fromkeys(each.name for each in policies))
    return _patched(request.uid, request.kind, request.document, document, policy=names, warnings=warnings)


def _updated(
    uid: str,
    kind: str,
    document: Mapping[str, Any],
    parts: tuple[AnnotatedTemplate, ...],
    before: tuple[AnnotatedTemplate, ...],
) -> Answer:
    """What was injected when the object was created, again in what was applied over it."""
    old = {each.target.name: each for each in before if is_injected(each.target.template)}
    changed = []
    for part in parts:
        was = old.get(part.target.name)
        if was is None:
            continue
        if part.annotations != was.annotations:
            raise Refusal(
                "BadAnnotation",
                f"the {kind} got its sidecar when it was created, by other annotations than these",
                where=part.target.name,
                remedy="create it anew",
            )
        template = put_back(part.target.template, was.target.template)
        changed.append((part.target, part.target.put(template, part.annotations.run_id)))
    return _patched(uid, kind, document, workload_kind.with_each(document, changed))


def _patched(
    uid: str,
    kind: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    policy: str = "",
    warnings: tuple[str, ...] = (),
) -> Answer:
    if before == after:
        return _unchanged(uid, kind)
    review = _review(
        uid,
        allowed=True,
        patchType="JSONPatch",
        patch=json_patch.encoded(json_patch.additions(before, after)),
        auditAnnotations={"injected": VERSION, **({"policy": policy} if policy else {})},
        **({"warnings": list(warnings)} if warnings else {}),
    )
    return Answer(review=review, kind=kind, outcome="injected")


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


def _is_whole(request: Mapping[str, Any], before: object) -> bool:
    """Whether an object of its own, not a subresource of one, is created, or updated from `before`."""
    return (
        (request.get("operation") == "CREATE" or isinstance(before, Mapping))
        and not request.get("subResource")
        and isinstance(request.get("object"), Mapping)
    )


def _unchanged(uid: str, kind: str) -> Answer:
    return Answer(review=_review(uid, allowed=True), kind=kind, outcome="unchanged")


def refused(uid: str, kind: str, refusal: Refusal) -> Answer:
    """Why the workload may not be admitted."""
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
