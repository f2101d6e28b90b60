"""Install, upgrade, uninstall and reinstall with Helm on a real API server. No pod runs, so no webhook answers."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, watch

from tests.support.eventually import eventually
from tests.support.helm import CERTIFICATE, NAMESPACE, RELEASE, HelmError, Release, render
from tests.support.machine import limit_s
from tests.support.operator.sample import policy_object
from tests.support.operator.webhook_process import job
from tests.support.server.apiserver import ApiServer, Rest, collection

CA = base64.b64encode(b"the authority").decode()
DATA = {"tls.crt": base64.b64encode(b"certificate").decode(), "tls.key": base64.b64encode(b"key").decode()}
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/deltashard-tls"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/deltashard-webhook"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


@pytest.fixture
def release(apiserver: ApiServer, http: Rest, tmp_path: Path) -> Any:
    """Yield a release that is uninstalled at the end of the test. Objects that Helm keeps remain."""
    release = Release(apiserver.kubeconfig, tmp_path)
    yield release
    if RELEASE in release("list", "--short"):
        release.uninstall()


def fill_as_controller(http: Rest) -> None:
    """Fill the objects that the chart creates empty, as the controller does in mode builtin."""
    webhooks = [
        {"name": w["name"], "clientConfig": {"caBundle": CA}} for w in _configuration(http)["webhooks"]
    ]
    assert http("PATCH", CONFIGURATION, {"webhooks": webhooks}, content=STRATEGIC).status == 200
    assert http("PATCH", SECRET, {"data": DATA}, content=MERGE).status == 200
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/deltashard-fleet-ca"
    assert http("PATCH", path, {"data": {"ca.crt": "pem"}}, content=MERGE).status == 200


def _configuration(http: Rest) -> dict[str, Any]:
    return http("GET", CONFIGURATION).document


def bundles(http: Rest) -> set[str | None]:
    return {w["clientConfig"].get("caBundle") for w in _configuration(http)["webhooks"]}


def is_kept(http: Rest) -> bool:
    bundle = http("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps/deltashard-fleet-ca").document
    return http("GET", SECRET).document.get("data") == DATA and bundle.get("data") == {"ca.crt": "pem"}


def test_upgrade_keeps_controller_data(release: Release, http: Rest) -> None:
    """Authority and certificates survive upgrades that change their objects, a rollback, and a no-op."""
    release.install()
    assert bundles(http) == {None}
    fill_as_controller(http)
    changed = {
        "webhook": {"failurePolicy": "Ignore", "exemptNamespaces": ["other"]},
        "commonLabels": {"a": "b"},
    }
    release.upgrade(changed)
    assert [w["failurePolicy"] for w in _configuration(http)["webhooks"]] == ["Ignore"] * 4
    assert _configuration(http)["metadata"]["labels"]["a"] == "b"
    assert bundles(http) == {CA}
    assert is_kept(http)
    release.upgrade(changed)
    release("rollback", RELEASE, "1")
    assert [w["failurePolicy"] for w in _configuration(http)["webhooks"]] == ["Fail"] * 4
    assert bundles(http) == {CA}
    assert is_kept(http)


def test_certificate_mode_switch_and_back(release: Release, http: Rest) -> None:
    """An external authority replaces the built-in one.

    After the switch back the controller fills the empty field again.
    """
    release.install()
    fill_as_controller(http)
    existing = {"webhookCa": CERTIFICATE, "fleetCa": CERTIFICATE}
    release.upgrade({"certificates": {"mode": "existing", "existing": existing}})
    assert bundles(http) == {base64.b64encode(CERTIFICATE.encode()).decode()}
    assert http("GET", SECRET).document["data"] == DATA  # running pods trust it
    path = f"/api/v1/namespaces/{NAMESPACE}/configmaps/deltashard-fleet-ca"
    assert http("GET", path).document["data"] == {"ca.crt": CERTIFICATE}
    release.upgrade()
    assert bundles(http) == {None}
    assert http("GET", SECRET).document["data"] == DATA


def test_uninstall_removes_webhook_first(release: Release, apiserver: ApiServer, http: Rest) -> None:
    """The webhook configuration is deleted before the pods, so that no annotated Job is refused in between.

    Without the chart's hooks Helm deletes in the opposite order.
    """
    release.install()
    fill_as_controller(http)
    since = http("GET", "/api/v1/namespaces").document["metadata"][
        "resourceVersion"
    ]  # resource version of the whole store
    release.uninstall()
    with apiserver.api() as api:  # the hooks' stand-ins are also deleted
        admission = client.AdmissionregistrationV1Api(api)
        webhook = deletions(admission.list_mutating_webhook_configuration, since, 2)
        bindings = deletions(admission.list_validating_admission_policy_binding, since, 8)
        deployments = deletions(client.AppsV1Api(api).list_deployment_for_all_namespaces, since, 2)
    assert set(webhook) == {"deltashard-webhook"}
    assert set(deployments) == {"deltashard-webhook", "deltashard-controller"}
    assert len(bindings) == 4
    assert max(min(at) for at in bindings.values()) < min(webhook["deltashard-webhook"])
    assert max(webhook["deltashard-webhook"]) < min(min(at) for at in deployments.values())


def test_uninstall_keeps_resources_and_leaves_no_blockers(release: Release, http: Rest) -> None:
    """Resources, runs and certificates remain. No admission configuration remains."""
    release.install()
    fill_as_controller(http)
    policy = policy_object("kept", store={"url": "s3://bucket/prefix"})
    poll_until(lambda: http.create(policy), lambda reply: reply.status in {201, 409})
    release.uninstall()
    root = "/apis/admissionregistration.k8s.io/v1"
    for kind in (
        "mutatingwebhookconfigurations",
        "validatingadmissionpolicies",
        "validatingadmissionpolicybindings",
    ):
        names = [item["metadata"]["name"] for item in http("GET", f"{root}/{kind}").document["items"]]
        assert not [name for name in names if "deltashard" in name]
    annotated = job("train", {"deltashard.io/policy": "default"})
    assert poll_until(lambda: http.create(annotated, dry_run=True), lambda reply: reply.status == 201)
    assert is_kept(http)
    path = "/apis/deltashard.io/v1alpha1/namespaces/default/checkpointpolicies/kept"
    assert http("GET", path).document["spec"] == policy["spec"]
    left = [
        document
        for document in render().documents
        if http("GET", path_of(document)).status == 200
        and document["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep"
    ]
    assert left == []
    release.install()
    assert is_kept(http), "the second installation adopts the kept objects"
    assert bundles(http) == {None}, "the webhook's CA bundle is empty again"


def poll_until(ask: Any, good: Any) -> Any:
    """Return the first accepted answer. The API server applies new resources and policies with a delay."""
    answers: list[Any] = []

    def met() -> bool:
        answers[:] = [ask()]
        return bool(good(answers[0]))

    eventually(met, lambda: f"an accepted answer instead of {answers}")
    return answers[0]


def deletions(listing: Any, since: str, n: int) -> dict[str, list[int]]:
    """Wait for `n` deletions of the release's objects and return their revisions by name."""
    found: dict[str, list[int]] = {}
    for event in watch.Watch().stream(listing, resource_version=since, timeout_seconds=120):
        metadata = event["object"].metadata
        if event["type"] == "DELETED" and "deltashard" in metadata.name:
            found.setdefault(metadata.name, []).append(int(metadata.resource_version))
            if sum(map(len, found.values())) == n:
                return found
    pytest.fail(f"{n} deletions were not seen, only {found}")


def path_of(document: dict[str, Any]) -> str:
    metadata = document["metadata"]
    return f"{collection(document, metadata.get('namespace', ''))}/{metadata['name']}"


def allowed(http: Rest, account: str, namespace: str, verb: str, resource: str, name: str = "") -> bool:
    """Return whether the API server allows the action for an account of the release."""
    group, _, rest = resource.rpartition("/") if resource.count("/") else ("", "", resource)
    plural, _, subresource = rest.partition(":")
    everybody = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "name": name}
    who = f"system:serviceaccount:{NAMESPACE}:{account}"
    return http.is_allowed(who, *everybody, **attributes, namespace=namespace)


READ = {"get", "list", "watch"}
RIGHTS: dict[str, dict[str, set[str]]] = {
    "deltashard-webhook": {
        "deltashard.io/checkpointpolicies": READ,
        "deltashard.io/clustercheckpointpolicies": READ,
        "deltashard.io/checkpointruns": {"list"},
        "batch/jobs": {"get", "list"},
        "pods": {"get"},
    },
    "deltashard-controller": {
        "batch/jobs": READ,
        "pods": READ,
        "nodes": READ,
        "deltashard.io/checkpointpolicies": READ,
        "deltashard.io/clustercheckpointpolicies": READ,
        "deltashard.io/clustercheckpointpolicies:status": {"patch"},
        "deltashard.io/checkpointruns": READ | {"create", "delete"},
        "deltashard.io/checkpointruns:status": {"patch"},
        "deltashard.io/checkpointrequests": READ | {"delete"},
        "deltashard.io/checkpointrequests:status": {"patch"},
        "deltashard.io/checkpointpolicies:status": {"patch"},
        "events": {"create"},
        "authentication.k8s.io/tokenreviews": {"create"},
    },
}
"""The complete rights in any namespace."""
RESOURCES = {resource for rights in RIGHTS.values() for resource in rights} | {
    "secrets",
    "configmaps",
    "namespaces",
    "serviceaccounts",
    "serviceaccounts:token",
    "pods:exec",
    "pods:eviction",
    "pods:status",
    "batch/jobs:status",
    "apps/deployments",
    "apps/statefulsets",
    "coordination.k8s.io/leases",
    "apiextensions.k8s.io/customresourcedefinitions",
    "admissionregistration.k8s.io/mutatingwebhookconfigurations",
    "admissionregistration.k8s.io/validatingadmissionpolicies",
    "rbac.authorization.k8s.io/clusterroles",
}
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
LEASES = "coordination.k8s.io/leases"
CREATED = {"create"}
"""Verbs whose rights cannot be limited to named objects."""
OWN = {
    "secrets": ("deltashard-tls",),
    "configmaps": ("deltashard-fleet-ca",),
    LEASES: ("deltashard-controller",),
}


def test_rights_are_minimal(release: Release, http: Rest) -> None:
    """Other namespaces get the rights in the table only. The controller also has its certificates by name."""
    release.install()
    for account, rights in RIGHTS.items():
        poll_until(
            lambda account=account: allowed(http, account, "team-a", "list", "deltashard.io/checkpointruns"),
            bool,
        )
        for resource in sorted(RESOURCES):
            for namespace in ("team-a", NAMESPACE):
                may = {verb for verb in VERBS if allowed(http, account, namespace, verb, resource)}
                lease = (account, namespace, resource) == ("deltashard-controller", NAMESPACE, LEASES)
                assert may == (CREATED if lease else rights.get(resource, set())), (account, resource)
    for resource, names in OWN.items():
        for name in (*names, "another"):
            for account in RIGHTS:
                may = {verb for verb in VERBS if allowed(http, account, NAMESPACE, verb, resource, name)}
                has = account == "deltashard-controller" and name != "another"
                made = CREATED if (account, resource) == ("deltashard-controller", LEASES) else set()
                assert may == ({"get", "update"} if has else set()) | made, (account, resource, name)
    configurations_ = "admissionregistration.k8s.io/mutatingwebhookconfigurations"
    for name, rights in (("deltashard-webhook", {"get", "patch"}), ("another", set())):
        may = {v for v in VERBS if allowed(http, "deltashard-controller", "", v, configurations_, name)}
        assert may == rights


@pytest.mark.parametrize("mode", ["cert-manager", "existing"])
def test_controller_has_no_secret_rights_with_external_issuer(mode: str) -> None:
    existing = {"webhookCa": CERTIFICATE, "fleetCa": CERTIFICATE}
    roles = render({"certificates": {"mode": mode, "existing": existing}})
    resources = {
        resource
        for role in [*roles.all("ClusterRole"), *roles.all("Role")]
        for rule in role["rules"]
        for resource in rule["resources"]
    }
    assert not resources & {"secrets", "configmaps", "mutatingwebhookconfigurations"}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_chart_test_rights_are_removed_after_run(release: Release, http: Rest, phase: str) -> None:
    """While the test pod runs, its account may create Jobs in one namespace. Afterwards it has no rights.

    The test takes the kubelet's part.
    """
    release.install()
    created = "batch/jobs"
    assert not allowed(http, "deltashard-test", "default", "create", created)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/deltashard-test"
    with ThreadPoolExecutor(1) as pool:
        test = pool.submit(release, "test", RELEASE, "--timeout", f"{limit_s(180):.0f}s")
        eventually(
            lambda: test.done() or http("GET", path).status == 200, what="the test's pod", timeout_s=120
        )
        assert poll_until(lambda: allowed(http, "deltashard-test", "default", "create", created), bool)
        for resource in sorted(RESOURCES):
            may = {verb for verb in VERBS if allowed(http, "deltashard-test", "default", verb, resource)}
            assert may == ({"create"} if resource == created else set()), resource
        assert not allowed(http, "deltashard-test", "team-a", "create", created)
        status = {"status": {"phase": phase}}
        assert http("PATCH", f"{path}/status", status, content=MERGE).status == 200
        if phase == "Succeeded":
            assert "Phase:          Succeeded" in test.result(limit_s(180))
        else:
            with pytest.raises(HelmError, match="failed"):
                test.result(limit_s(180))
    root = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"
    left = (f"{root}/roles", f"{root}/rolebindings", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts")
    assert [http("GET", f"{each}/deltashard-test").status for each in left] == [404, 404, 404]
    assert http("GET", path).status == 200  # its log is readable
    assert http("DELETE", f"{path}?gracePeriodSeconds=0").status == 200
