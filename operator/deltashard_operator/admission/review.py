"""An AdmissionReview in, an AdmissionReview out: `parse`, then `answer`. Pure; `webhook` stands between the two.

    parse(body) -> Request | Answer         the object, its kind, its annotations, read once
    webhook                                 its policies: what the API is asked for
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_operator import VERSION
from deltashard_operator.admission import warning, workload_kind
from deltashard_operator.admission.injection import check_marked, inject, is_injected, put_back
from deltashard_operator.admission.run_holder import RunClaim
from deltashard_operator.admission.workload_kind import Target
from deltashard_operator.api import annotation
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.kube import json_patch, run_identity
from deltashard_operator.kube.cluster_name import QUEUE_LABEL


class BadReview(UserError):
    """The request body is no AdmissionReview that can be answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedTemplate:
    """An annotated Job or pod, or the template of one."""

    target: Target
    said: Annotations
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
    review = json.loads(body)
    request = review.get("request") if isinstance(review, Mapping) else None
    known = isinstance(request, Mapping) and review.get("apiVersion") == "admission.k8s.io/v1"
    if not isinstance(request, Mapping) or not known or not isinstance(request.get("uid"), str):
        raise BadReview("no AdmissionReview of admission.k8s.io/v1 with a request", where="request body")
    uid, namespace = request["uid"], str(request.get("namespace", ""))
    group, kind = (str((request.get("kind") or {}).get(key, "")) for key in ("group", "kind"))
    document, operation = request.get("object"), request.get("operation")
    templated = (group, kind) in workload_kind.TEMPLATED
    before = request.get("oldObject") if templated and operation == "UPDATE" else None
    asked = (group, kind) in workload_kind.ADMITTED and not request.get("subResource")
    if not asked or not isinstance(document, Mapping) or (operation != "CREATE" and before is None):
        return _answer(uid, "other", "unchanged", allowed=True)
    try:
        parts = _parts(kind, document, "" if templated else namespace)
        if before is not None:
            return _updated(uid, kind, document, parts, _parts(kind, before))
    except Refusal as refusal:
        return refused(uid, kind, refusal)
    if not parts:
        return _answer(uid, kind, "unchanged", allowed=True)
    return Request(uid=uid, namespace=namespace, kind=kind, document=document, parts=parts)


def _parts(kind: str, document: Mapping[str, Any], namespace: str = "") -> tuple[AnnotatedTemplate, ...]:
    """The annotated parts of an object; raises `Refusal` where one contradicts itself.

    `namespace`: where it claims a run, if it is no template of what will.
    """
    parts = []
    for target in workload_kind.targets(kind, document):
        if not annotation.opted_in(*target.annotations):
            continue
        said = annotation.read(*target.annotations)
        workload_kind.check(target)
        if is_injected(target.template):
            check_marked(target.template, said, target.recipe)
        claim = RunClaim(
            namespace=namespace,
            run_id=said.run_id,
            workload_uid=run_identity.workload_uid(kind, target.document),
            per_pod=said.runs == RUN_PER_POD,
            kind=target.recipe.kind,
            pods=target.recipe.pods,
        )
        claims = namespace and (claim.run_id or claim.workload_uid)
        parts.append(AnnotatedTemplate(target=target, said=said, claim=claim if claims else None))
    return tuple(parts)


def answer(request: Request, policies: Sequence[Policy]) -> Answer:
    """The object with its sidecar, by the policy of each part; raises `Refusal`, `InternalBug` for a fault of ours."""
    changed: list[tuple[Target, Mapping[str, Any]]] = []
    warnings: list[str] = []
    for part, policy in zip(request.parts, policies, strict=True):
        target = part.target
        queued = QUEUE_LABEL in target.labels
        template = inject(
            target.template, policy, target.recipe, keep_grace=target.states_grace, queued=queued
        )
        if template != target.template:
            changed.append((target, target.put(template, part.said.run_id)))
            warnings += warning.of_workload(target, policy)
    audit = {"policy": ",".join(dict.fromkeys(each.name for each in policies))}
    return _patched(request.uid, request.kind, request.document, changed, audit, warnings)


def _updated(
    uid: str,
    kind: str,
    document: Mapping[str, Any],
    parts: tuple[AnnotatedTemplate, ...],
    before: tuple[AnnotatedTemplate, ...],
) -> Answer:
    """What was injected when the object was created, again in what was applied over it."""
    old = {each.target.path: each for each in before if is_injected(each.target.template)}
    changed = []
    for part in parts:
        was = old.get(part.target.path)
        if was is None:
            continue
        if part.said != was.said:
            raise Refusal(
                "BadAnnotation",
                f"the {kind} got its sidecar when it was created, by other annotations than these",
                where=".".join(map(str, part.target.path)),
                remedy="create it anew",
            )
        template = put_back(part.target.template, was.target.template)
        changed.append((part.target, part.target.put(template, part.said.run_id)))
    return _patched(uid, kind, document, changed)


def _patched(
    uid: str,
    kind: str,
    before: Mapping[str, Any],
    changed: Sequence[tuple[Target, Mapping[str, Any]]],
    audit: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
) -> Answer:
    after = workload_kind.with_each(before, changed)
    if before == after:
        return _answer(uid, kind, "unchanged", allowed=True)
    more: dict[str, Any] = {"warnings": list(dict.fromkeys(warnings))} if warnings else {}
    patch = json_patch.encoded(json_patch.additions(before, after))
    notes = {"injected": VERSION, **(audit or {})}
    more |= {"patchType": "JSONPatch", "patch": patch, "auditAnnotations": notes}
    return _answer(uid, kind, "injected", allowed=True, **more)


def refused(uid: str, kind: str, refusal: Refusal) -> Answer:
    """Why the workload may not be admitted."""
    code, sentence = 503 if refusal.code == "PolicyUnavailable" else 422, refusal.sentence
    status = {"code": code, "reason": refusal.code, "message": sentence}
    return _answer(uid, kind, refusal.code, sentence, allowed=False, status=status)


def _answer(uid: str, kind: str, outcome: str, sentence: str = "", **response: Any) -> Answer:
    review = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": uid, **response},
    }
    return Answer(review=review, kind=kind, outcome=outcome, sentence=sentence)
