"""Invalid values that the chart rejects at rendering, and the schema of each value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.integration.charts.value import VALUES, leaves, nested, pod_specs
from tests.support.helm import CERTIFICATE, CHART, HelmError, render

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def schemas(
    schema: Mapping[str, Any], values: Any, path: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the schema of every value by path. A value without a schema is an error."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    yield path, schema
    if isinstance(values, dict) and "properties" in schema:
        assert set(values) <= set(schema["properties"]), path
        for key, value in values.items():
            yield from schemas(schema["properties"][key], value, f"{path}.{key}" if path else key)


@pytest.mark.parametrize(
    "path", [path for path, schema in schemas(SCHEMA, VALUES) if "properties" in schema and path != "global"]
)
def test_unknown_value_is_refused(path: str) -> None:
    """A typo is an error at every level, and not a default. `global` also holds other charts' values."""
    with pytest.raises(HelmError, match="'typo' not allowed"):
        render(nested(f"{path}.typo" if path else "typo", 1))


@pytest.mark.parametrize("path", sorted(leaves(VALUES)))
def test_value_of_wrong_type_is_refused(path: str) -> None:
    """A list of lists is valid for no value."""
    with pytest.raises(HelmError, match="values don't meet the specifications"):
        render(nested(path, [[1.5]]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("webhook.replicas", 0),
        ("webhook.failurePolicy", "fail"),
        ("webhook.podDisruptionBudget.maxUnavailable", 0),
        ("watchNamespaces", ["team-*"]),
        ("test.namespace", "team_a"),
        ("image.digest", "sha256:abc"),
        ("image.repository", "registry.example/operator:tag"),
        ("certificates.mode", "certmanager"),
        ("certificates.existing.webhookCa", "/etc/ca.crt"),
        ("networkPolicies.apiServerPorts", []),
        ("monitoring.interval", "30"),
        ("defaultPolicy", {"precision": {"encoding": "q5"}}),
        ("defaultPolicy", {"intervalSecond": 5}),
        ("defaultPolicy", {"sidecar": {"env": [{"name": "DELTASHARD_URL", "value": "x"}]}}),
        ("webhook.port", 443),
        ("webhook.timeoutSeconds", 4),
        ("controller.replicas", 0),
        ("controller.disruptionTaints", ["a key"]),
        ("service.ipFamilies", ["v6"]),
        ("logLevel", "verbose"),
        ("monitoring.rules.alerts", {"SavesFailing": {"for": "1m"}}),
        ("runAsUser", 0),
    ],
)
def test_nonsense_is_refused(path: str, value: Any) -> None:
    """The default policy has the resource's schema, whose own tests cover each field."""
    with pytest.raises(HelmError, match="values don't meet the specifications"):
        render(nested(path, value))


@pytest.mark.parametrize(
    "values",
    [
        {"store": {"url": "gs://bkt", "region": "eu"}},
        {"store": {"url": "s3://bkt/../x"}},
        {"interval": {"goal": {"type": "LostWork"}}},
        {"sidecar": {"volumes": [{"name": "v", "mountPath": "/etc", "configMap": {"name": "c"}}]}},
    ],
)
def test_conflicting_policy_settings_are_refused(values: dict[str, Any]) -> None:
    """The webhook would refuse every annotated Job under such a policy."""
    with pytest.raises(HelmError, match="values don't meet the specifications"):
        render({"defaultPolicy": values})


def test_unsupported_removal_is_refused() -> None:
    with pytest.raises(HelmError, match=r"reclaim\.policy Delete removes nothing without reclaim\.enabled"):
        render({"defaultPolicy": {"reclaim": {"policy": "Delete"}}})


@pytest.mark.parametrize("component", ["webhook", "controller"])
def test_external_service_account_requires_name(component: str) -> None:
    with pytest.raises(
        HelmError, match=f"{component}.serviceAccount.name must be the name of an existing account"
    ):
        render({component: {"serviceAccount": {"create": False}}})


def test_duplicate_port_is_refused() -> None:
    with pytest.raises(HelmError, match="both 9090"):
        render({"webhook": {"port": 9090}})


@pytest.mark.parametrize(("missing", "there"), [("webhookCa", "fleetCa"), ("fleetCa", "webhookCa")])
def test_external_authority_must_exist(missing: str, there: str) -> None:
    """Without the authority the API server, or every sidecar, would reject the certificate."""
    with pytest.raises(HelmError, match=f"certificates.existing.{missing} is needed"):
        render({"certificates": {"mode": "existing", "existing": {there: CERTIFICATE}}})


def test_kubernetes_1_28_is_refused() -> None:
    """Kubernetes 1.28 has no native sidecars."""
    with pytest.raises(HelmError, match="chart requires kubeVersion: >=1.29"):
        render(version="1.28.9")


def test_kubernetes_1_29_renders_no_admission_policies() -> None:
    """The webhook then also receives the requests in unwatched namespaces that it has to refuse."""
    older = render({"watchNamespaces": ["team-a"]}, version="1.29.0")
    assert not [each for each in older.documents if each["kind"].startswith("ValidatingAdmissionPolicy")]
    for each in older.find("MutatingWebhookConfiguration")["webhooks"]:
        (left_alone,) = each["namespaceSelector"]["matchExpressions"]
        assert left_alone["operator"] == "NotIn"


@pytest.mark.parametrize(("replicas", "away"), [(2, 2), (3, 5), (2, "51%"), (3, "99%")])
def test_budget_allowing_full_disruption_is_refused(replicas: int, away: int | str) -> None:
    """During a drain no annotated Job could start. The message names the remedy."""
    webhook = {"replicas": replicas, "podDisruptionBudget": {"maxUnavailable": away}}
    with pytest.raises(
        HelmError, match=rf"maxUnavailable \({away}\) allows all {replicas} replicas.* keep one"
    ):
        render({"webhook": webhook})
    webhook["podDisruptionBudget"] = {"maxUnavailable": away, "enabled": False}
    assert not render({"webhook": webhook}).all("PodDisruptionBudget", "deltashard-webhook")


@pytest.mark.parametrize(("replicas", "away"), [(1, 1), (2, "50%"), (3, 2), (3, "66%"), (100, "99%")])
def test_budget_keeping_a_replica_is_accepted(replicas: int, away: int | str) -> None:
    """A single replica is an explicit choice and needs no budget."""
    rendering = render({"webhook": {"replicas": replicas, "podDisruptionBudget": {"maxUnavailable": away}}})
    assert rendering.find("PodDisruptionBudget", "deltashard-webhook")["spec"]["maxUnavailable"] == away


@pytest.mark.parametrize("left", ["kube-system", "deltashard-system", "legacy"])
def test_watched_and_excluded_namespace_is_refused(left: str) -> None:
    """The message names the namespace and both lists."""
    values = {"watchNamespaces": ["team-a", left], "webhook": {"exemptNamespaces": ["legacy"]}}
    with pytest.raises(HelmError, match=f"watchNamespaces has {left}, which is exempt"):
        render(values)


def test_value_can_be_left_to_cluster_default() -> None:
    """OpenShift assigns a separate range of user IDs to each namespace."""
    rendering = render({"runAsUser": None})
    keys = ("runAsUser", "runAsGroup", "fsGroup")
    assert not any(key in spec["securityContext"] for spec in pod_specs(rendering) for key in keys)
    assert {spec["securityContext"]["runAsNonRoot"] for spec in pod_specs(rendering)} == {True}
