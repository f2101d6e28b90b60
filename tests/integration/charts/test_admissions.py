"""The admission objects of the chart are those of the code, which a real API server tests."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from deltashard_operator.kube import webhook_configuration

from tests.integration.charts.helm import CERTIFICATE, NAMESPACE, Document, Rendering, render

SERVICE = {
    "name": "deltashard-webhook",
    "namespace": NAMESPACE,
    "path": webhook_configuration.PATH,
    "port": 443,
}
EXISTING = {"mode": "existing", "existing": {"webhookCa": CERTIFICATE, "fleetCa": CERTIFICATE}}


def bare(document: Document) -> Document:
    """An object without what Helm and cert-manager put on its metadata."""
    return {**document, "metadata": {"name": document["metadata"]["name"]}}


def policies(rendering: Rendering) -> list[Any]:
    """ValidatingAdmissionPolicies and their bindings, by name."""
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    return by_name([bare(document) for kind in kinds for document in rendering.all(kind)])


def by_name(documents: list[Any]) -> list[Any]:
    return sorted(documents, key=lambda document: (document["metadata"]["name"], document["kind"]))


@pytest.mark.parametrize("failure_policy", ["Fail", "Ignore"])
@pytest.mark.parametrize("exempt", [(), ("legacy", "batch-system")])
@pytest.mark.parametrize("mode", ["builtin", "cert-manager"])
def test_the_webhook_configuration(failure_policy: str, exempt: tuple[str, ...], mode: str) -> None:
    """Equal, word for word, but for the authority, which is not the chart's to say."""
    rendering = render(
        {
            "certificates": {"mode": mode},
            "webhook": {"failurePolicy": failure_policy, "exemptNamespaces": list(exempt)},
        }
    )
    assert bare(rendering.find("MutatingWebhookConfiguration")) == webhook_configuration.mutating(
        {"service": SERVICE}, failure_policy=failure_policy, exempt=(NAMESPACE, *exempt)
    )


def test_with_an_authority_of_yours() -> None:
    """It is the bundle."""
    webhooks = render({"certificates": EXISTING}).find("MutatingWebhookConfiguration")["webhooks"]
    bundles = {base64.b64decode(each["clientConfig"]["caBundle"]).decode() for each in webhooks}
    assert bundles == {CERTIFICATE}


def test_what_one_test_does_to_a_rendering_no_other_sees() -> None:
    """Each gets its own, though Helm runs once for each set of values: which files share a process is chance."""
    render().documents[0].clear()
    assert render().documents[0]


@pytest.mark.parametrize("missing", ["webhookCa", "fleetCa"])
def test_an_authority_of_yours_must_be_there(missing: str) -> None:
    """Without it the API server, or every sidecar, would refuse the certificate."""
    existing = {key: value for key, value in EXISTING["existing"].items() if key != missing}  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=f"certificates.existing.{missing} is needed"):
        render({"certificates": {"mode": "existing", "existing": existing}})


def test_the_validating_policies() -> None:
    """Equal, word for word, where Kubernetes has them."""
    exempt = ("legacy",)
    rendering = render({"webhook": {"exemptNamespaces": list(exempt)}})
    assert policies(rendering) == by_name(webhook_configuration.validating((NAMESPACE, *exempt)))


def test_with_a_list_of_namespaces() -> None:
    """Equal, too; where Kubernetes has no such policies, the webhook is sent what it has to refuse."""
    some = ("team-a", "team-b")
    rendering = render({"watchNamespaces": list(some)})
    exempt = (NAMESPACE,)
    assert policies(rendering) == by_name(webhook_configuration.validating(exempt, namespaces=some))
    configured = bare(rendering.find("MutatingWebhookConfiguration"))
    assert configured == webhook_configuration.mutating({"service": SERVICE}, exempt=exempt, namespaces=some)
    older = render({"watchNamespaces": list(some)}, version="1.29.0")
    assert bare(older.find("MutatingWebhookConfiguration")) == webhook_configuration.mutating(
        {"service": SERVICE}, exempt=exempt
    )


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
