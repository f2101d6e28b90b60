"""Injection over generated pod templates, validated by a real API server.

A dry run decides whether a Job is valid and returns it with its defaults, as the webhook would receive it.
A valid Job is either refused with a message or injected. After injection the applied patch equals the injected object,
the API server accepts it, a second admission changes nothing, and the user's fields change only as documented.
`DELTASHARD_FUZZ=5000` (or more) sets the number of templates.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
from deltashard_operator.api.refusal import CODES
from deltashard_operator.kube import cluster_name
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.operator import template as templates
from tests.support.operator import sample
from tests.support.server.apiserver import ApiServer, Rest

EXAMPLES = int(os.environ.get("DELTASHARD_FUZZ", "340"))


class DryRunValidator:
    """Runs dry runs and counts their outcomes."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self.last_refusal: Any = None
        self.counts: dict[str, int] = {}

    def created(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Return the Job as a dry run would create it, or None when it is not valid."""
        reply = self._rest.create(job, dry_run=True)
        if reply.status == 201:
            return reply.document
        assert reply.status in {400, 422}, reply
        self.last_refusal = reply.document
        return None

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def as_admitted(job: dict[str, Any]) -> dict[str, Any]:
    """Return the Job as the webhook receives it, without the fields that the server adds after admission."""
    job = copy.deepcopy(job)
    for key in ("uid", "creationTimestamp", "generation", "managedFields", "resourceVersion"):
        job["metadata"].pop(key, None)
    job["spec"].pop("selector", None)
    job.pop("status", None)
    for key in list((job["spec"]["template"]["metadata"]).get("labels") or {}):
        if key.endswith(("controller-uid", "job-name")):
            del job["spec"]["template"]["metadata"]["labels"][key]
    (job["metadata"].get("labels") or {}).clear()
    return {"apiVersion": "batch/v1", "kind": "Job", **job}


def strip_injected(job: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the injected Job without the fields that injection may add or change."""
    job = copy.deepcopy(job)
    pod, old = job["spec"]["template"], before["spec"]["template"]
    spec, was = pod["spec"], old["spec"]
    inits = [c for c in spec["initContainers"] if c["name"] != cluster_name.SIDECAR]
    had_names = {v["name"] for v in was.get("volumes") or []}
    kept = [v for v in spec["volumes"] if v["name"] in had_names or not v["name"].startswith("deltashard-")]
    for key, value in (("initContainers", inits), ("volumes", kept)):
        spec[key] = value
        if not value and key not in was:
            del spec[key]
    for container, had in zip(spec["containers"], was["containers"], strict=True):
        for key, ours in (
            ("env", {"name": cluster_name.SOCKET_VARIABLE, "value": cluster_name.SOCKET_PATH}),
            ("volumeMounts", {"name": cluster_name.SHM_VOLUME, "mountPath": cluster_name.SHM_PATH}),
        ):
            if container.get(key) != had.get(key):
                assert container[key] == [*(had.get(key) or []), ours]
                container[key] = had.get(key)
                if key not in had:
                    del container[key]
    if was.get("terminationGracePeriodSeconds") == 30:
        assert spec["terminationGracePeriodSeconds"] in {20, 30, 120}
        spec["terminationGracePeriodSeconds"] = 30
    context = was.get("securityContext") or {}
    if not context.get("supplementalGroups") and "fsGroup" not in context:
        assert spec["securityContext"].pop("supplementalGroups") == [cluster_name.USER_ID]
        if "supplementalGroups" in context:
            spec["securityContext"]["supplementalGroups"] = context["supplementalGroups"]
    if spec.get("imagePullSecrets") != was.get("imagePullSecrets"):
        assert spec.pop("imagePullSecrets") == [*(was.get("imagePullSecrets") or []), {"name": "pull"}]
        if "imagePullSecrets" in was:
            spec["imagePullSecrets"] = was["imagePullSecrets"]
    for mine, had in ((pod["metadata"], old["metadata"]), (job["metadata"], before["metadata"])):
        for key, ours in (
            ("labels", [cluster_name.MANAGED_BY, cluster_name.RUN_ID]),
            (
                "annotations",
                [
                    cluster_name.INJECTED,
                    cluster_name.POLICY,
                    cluster_name.EVICTABLE_VOLUMES,
                    cluster_name.BACKUP_EXCLUDED_VOLUMES,
                ],
            ),
        ):
            here, there = mine.get(key) or {}, had.get(key) or {}
            for name in ours:
                here.pop(name, None)
                if name in there:
                    here[name] = there[name]
            if not here and key not in had:
                mine.pop(key, None)
    return job


def check(
    validator: DryRunValidator, template: dict[str, Any], annotations: dict[str, str], policy: dict[str, Any]
) -> None:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "fuzz", "annotations": annotations},
        "spec": {"template": template},
    }
    created = validator.created(job)
    if created is None:
        validator.count("invalid")
        return
    seen = as_admitted(created)
    response = sample.answer(seen, policy)
    if not response["allowed"]:
        assert response["status"]["reason"] in CODES
        assert response["status"]["message"].endswith(f"({response['status']['reason']})")
        validator.count(response["status"]["reason"])
        return
    validator.count("injected")
    operations = sample.operations(response)
    assert {o["op"] for o in operations} == {"add"}
    injected = sample.applied(seen, response)
    assert strip_injected(injected, seen) == seen
    again = sample.answer(injected, policy)
    assert again["allowed"]
    assert "patch" not in again
    assert validator.created(injected) is not None, validator.last_refusal
    inits = [c["name"] for c in injected["spec"]["template"]["spec"]["initContainers"]]
    assert inits.index(cluster_name.SIDECAR) == (
        inits.index("istio-proxy") + 1 if "istio-proxy" in inits else 0
    )


@pytest.mark.timeout(3600)
def test_generated_templates(apiserver: ApiServer) -> None:
    """At least two thirds of the templates are valid, and most of these are injected."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        # CI checks the same templates each time, and the long run generates new ones.
        derandomize=EXAMPLES < 1000,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(templates.pod_templates(), templates.ANNOTATIONS, templates.POLICIES)
    def run(template: dict[str, Any], annotations: dict[str, str], policy: dict[str, Any]) -> None:
        check(validator, template, annotations, policy)

    with apiserver.http() as rest:
        validator = DryRunValidator(rest)
        run()
    print(validator.counts)
    assert sum(validator.counts.values()) >= 300
    assert validator.counts["injected"] > sum(validator.counts.values()) / 4
    assert len(set(validator.counts) - {"injected", "invalid"}) >= 3, "refusals of several kinds occur"


@given(templates.pod_templates(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_injection_never_crashes(template: dict[str, Any], data: st.DataObject) -> None:
    """Templates that no API server would accept, and incomplete ones, give an answer and never an exception."""
    for part in (template, template["spec"], *template["spec"]["containers"]):
        for key in data.draw(st.lists(st.sampled_from(sorted(part)), max_size=1)):
            del part[key]
    document = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"annotations": {cluster_name.POLICY: "default"}},
        "spec": {"template": template},
    }
    response = sample.answer(document)
    if response["allowed"]:
        result = sample.applied(document, response)
        assert "patch" not in sample.answer(result)
