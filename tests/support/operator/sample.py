"""Policies, reviews and an independent way to apply patches, for the tests of injection."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

import jsonpatch
from deltashard_operator.admission import review as admissions
from deltashard_operator.admission.review import AdmissionRequest, ReviewResult
from deltashard_operator.api.annotation import Annotations
from deltashard_operator.api.policy_cache import GROUP, VERSION
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy, merged, read

DEFAULTS: dict[str, Any] = {
    "store": {
        "url": "s3://checkpoints/team-a",
        "secretRef": {"name": "deltashard-store"},
        "endpoint": "http://minio:9000",
    },
    "sidecar": {"image": "registry.example/deltashard-sidecar:0.1.0", "imagePullSecrets": ["pull"]},
    "fleet": {"address": "deltashard-operator.deltashard.svc:9443", "ca": "-----BEGIN CERTIFICATE-----\n"},
}


def policy(spec: Mapping[str, Any] | None = None, /, **annotations: Any) -> Policy:
    return read("default", over_defaults(spec or {}), Annotations(policy="default", **annotations))


def over_defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `spec` over the defaults; its `fleet`, if any, replaces the default one."""
    return merged(spec, {**DEFAULTS, "fleet": spec.get("fleet", DEFAULTS["fleet"])})


def template(**spec: Any) -> dict[str, Any]:
    """Return a pod template with one container unless `spec` sets another."""
    return {"metadata": {}, "spec": {"containers": [{"name": "trainer", "image": "train"}], **spec}}


def review(
    document: Mapping[str, Any],
    *,
    operation: str = "CREATE",
    namespace: str = "team-a",
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the AdmissionReview an API server would send for an object."""
    group, _, version = document["apiVersion"].rpartition("/")
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "0b4f3c1e-0000-0000-0000-000000000001",
            "kind": {"group": group, "version": version, "kind": document["kind"]},
            "operation": operation,
            "namespace": namespace,
            "object": document,
            "oldObject": before,
        },
    }


def answer(
    document: Mapping[str, Any], spec: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Return the webhook's `response` for an object, every policy being `spec` over the defaults."""
    return answered(parsed(document, **kwargs), spec).review["response"]


def parsed(document: Mapping[str, Any], **kwargs: Any) -> AdmissionRequest | ReviewResult:
    """Return the request for an object, or its answer where no lookup is necessary."""
    return admissions.parse(json.dumps(review(document, **kwargs)).encode())


def answered(request: AdmissionRequest | ReviewResult, spec: Mapping[str, Any] | None = None) -> ReviewResult:
    """Return the answer to a request, every policy being `spec` over the defaults."""
    if isinstance(request, ReviewResult):
        return request
    try:
        found = [
            read(each.annotations.policy, over_defaults(spec or {}), each.annotations)
            for each in request.parts
        ]
        return admissions.answer(request, found)
    except Refusal as refusal:
        return admissions.rejection(request.uid, request.kind, refusal)


def operations(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    return json.loads(base64.b64decode(response["patch"])) if "patch" in response else []


def applied(document: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object after the response's patch, by an independent JSON patch library."""
    return jsonpatch.apply_patch(copy.deepcopy(document), operations(response))


def sidecar_of(document: Mapping[str, Any]) -> dict[str, Any]:
    return next(c for c in document["spec"]["initContainers"] if c["name"] == "deltashard-sidecar")


def expanded(container: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, str]:
    """Return a container's environment as a kubelet would fill it, from the pod's fields by path ('' where one is missing)."""
    values: dict[str, str] = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            values[entry["name"]] = fields.get(entry["valueFrom"]["fieldRef"]["fieldPath"], "")
            continue
        text = entry.get("value", "")
        for name, value in values.items():
            text = text.replace(f"$({name})", value)
        values[entry["name"]] = text
    return values


def policy_object(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "CheckpointPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }
