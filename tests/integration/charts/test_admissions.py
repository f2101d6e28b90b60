"""The chart's admission objects: what values do to them. `admission/test_webhook.py` has them on a real API server."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from deltashard_operator.kube import webhook_configuration

from tests.support.helm import CERTIFICATE, NAMESPACE, render

SERVICE = {
    "name": "deltashard-webhook",
    "namespace": NAMESPACE,
    "path": webhook_configuration.PATH,
    "port": 443,
}
EXISTING = {"mode": "existing", "existing": {"webhookCa": CERTIFICATE, "fleetCa": CERTIFICATE}}


def selector(*namespaces: str, watched: tuple[str, ...] = ()) -> dict[str, Any]:
    """A namespaceSelector that leaves these namespaces alone, besides kube-system."""
    key = "kubernetes.io/metadata.name"
    found = [{"key": key, "operator": "NotIn", "values": ["kube-system", *namespaces]}]
    if watched:
        found.append({"key": key, "operator": "In", "values": list(watched)})
    return {"matchExpressions": found}


@pytest.mark.parametrize("failure_policy", ["Fail", "Ignore"])
@pytest.mark.parametrize("exempt", [(), ("legacy", "batch-system")])
@pytest.mark.parametrize("mode", ["builtin", "cert-manager"])
def test_the_webhook_configuration(failure_policy: str, exempt: tuple[str, ...], mode: str) -> None:
    """Every webhook calls the Service, spares the exempt namespaces, and is asked only for what is annotated."""
    rendering = render(
        {
            "certificates": {"mode": mode},
            "webhook": {"failurePolicy": failure_policy, "exemptNamespaces": list(exempt)},
        }
    )
    hooks = rendering.find("MutatingWebhookConfiguration", webhook_configuration.CONFIGURATION)["webhooks"]
    assert [each["name"].partition(".")[0] for each in hooks] == ["jobs", "jobsets", "pytorchjobs", "pods"]
    for each in hooks:
        assert each["clientConfig"]["service"] == SERVICE
        assert each["failurePolicy"] == failure_policy
        assert each["namespaceSelector"] == selector(NAMESPACE, *exempt)
        assert each["matchConditions"][0]["name"] == "annotated"
        assert each["timeoutSeconds"] == webhook_configuration.TIMEOUT_S


def test_with_an_authority_of_yours() -> None:
    """It is the bundle."""
    webhooks = render({"certificates": EXISTING}).find("MutatingWebhookConfiguration")["webhooks"]
    bundles = {base64.b64decode(each["clientConfig"]["caBundle"]).decode() for each in webhooks}
    assert bundles == {CERTIFICATE}


@pytest.mark.parametrize("missing", ["webhookCa", "fleetCa"])
def test_an_authority_of_yours_must_be_there(missing: str) -> None:
    """Without it the API server, or every sidecar, would refuse the certificate."""
    existing = {key: value for key, value in EXISTING["existing"].items() if key != missing}  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=f"certificates.existing.{missing} is needed"):
        render({"certificates": {"mode": "existing", "existing": existing}})


def test_with_a_list_of_namespaces() -> None:
    """Where Kubernetes has no ValidatingAdmissionPolicies, the webhook is sent what it has to refuse."""
    some = ("team-a", "team-b")
    values = {"watchNamespaces": list(some), "webhook": {"exemptNamespaces": ["legacy"]}}
    rendering, older = render(values), render(values, version="1.29.0")
    for each in rendering.all("ValidatingAdmissionPolicy"):
        constraints = each["spec"]["matchConstraints"]
        assert constraints["namespaceSelector"] == selector(NAMESPACE, "legacy")
    for each in rendering.find("MutatingWebhookConfiguration")["webhooks"]:
        assert each["namespaceSelector"] == selector(NAMESPACE, "legacy", watched=some)
    for each in older.find("MutatingWebhookConfiguration")["webhooks"]:
        assert each["namespaceSelector"] == selector(NAMESPACE, "legacy")


def test_kubernetes_1_29_has_none() -> None:
    """And nothing of theirs, hooks included, is sent to it."""
    rendering = render(version="1.29.0")
    assert not [d for d in rendering.documents if d["kind"].startswith("ValidatingAdmissionPolicy")]
    assert render(version="1.30.0").all("ValidatingAdmissionPolicy")


def test_kubernetes_1_28_is_refused() -> None:
    """It has no native sidecars."""
    with pytest.raises(Exception, match="chart requires kubeVersion: >=1.29"):
        render(version="1.28.9")


def test_nothing_stands_in_for_another() -> None:
    """Who applies the output of `helm template` gets each object once, and no hook of the uninstall in its place."""
    documents = render().documents
    names = [(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)
    hooks = {d["metadata"].get("annotations", {}).get("helm.sh/hook") for d in documents}
    assert hooks == {None, "test"}
