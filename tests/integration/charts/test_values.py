"""Every value of values.yaml changes what is rendered, where its comment says; a value without a case fails here."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from deltashard_operator.api import workload_policy

from tests.integration.charts.helm import CERTIFICATE, CHART, Document, HelmRefused, Rendering, render

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

WHOLE = {"resources", "labels", "annotations", "apiServerPorts"}
"""Values that are set as a whole."""


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all values that a user may set, `a.b.c`."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(*many: Mapping[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm does it."""
    result: dict[str, Any] = {}
    for values in many:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def of_pod(component: str, *path: str) -> Callable[[Rendering], Any]:
    """A field of a component's pod template."""

    def look(rendering: Rendering) -> Any:
        value: Any = rendering.find("Deployment", f"deltashard-{component}")["spec"]["template"]
        for key in path:
            value = value.get(key) if isinstance(value, dict) else value[int(key)]
        return value

    return look


def container(component: str, key: str) -> Callable[[Rendering], Any]:
    """A field of a component's container."""
    return of_pod(component, "spec", "containers", "0", key)


def ports(rendering: Rendering) -> dict[str, int]:
    """Ports of the webhook's container, by name."""
    return {each["name"]: each["containerPort"] for each in container("webhook", "ports")(rendering)}


def policy(rendering: Rendering) -> Any:
    return yaml.safe_load(rendering.find("ConfigMap", "deltashard-default-policy")["data"]["policy.yaml"])


def webhooks(rendering: Rendering, key: str) -> list[Any]:
    return [w[key] for w in rendering.find("MutatingWebhookConfiguration")["webhooks"]]


def creates_jobs(rendering: Rendering) -> bool:
    """Whether the controller may."""
    rules = rendering.find("ClusterRole", "deltashard-controller")["rules"]
    return any("jobs" in rule["resources"] and "create" in rule["verbs"] for rule in rules)


def test_pod(rendering: Rendering) -> Document:
    return rendering.find("Pod", "deltashard-test", hook=True)


test_pod.__test__ = False  # type: ignore[attr-defined]  # the chart's, not pytest's


def certificates(rendering: Rendering, key: str) -> list[Any]:
    return [rendering.find("Certificate", f"deltashard-{name}")["spec"][key] for name in ("webhook", "fleet")]


def ingress(rendering: Rendering) -> Any:
    return rendering.find("NetworkPolicy", "deltashard-webhook")["spec"]["ingress"][1]["from"]


def egress(rendering: Rendering) -> list[Any]:
    """Ports of the API server that all policies let through."""
    policies = rendering.all("NetworkPolicy")
    ports = [[p["port"] for p in policy["spec"]["egress"][1]["ports"]] for policy in policies]
    assert len(ports) == 3
    return ports


def labels(kind: str) -> Callable[[Rendering], Any]:
    return lambda rendering: rendering.find(kind)["metadata"]["labels"]


def alert(name: str, key: str = "expr") -> Callable[[Rendering], Any]:

    def look(rendering: Rendering) -> Any:
        groups = rendering.find("PrometheusRule")["spec"]["groups"]
        return next(rule for group in groups for rule in group["rules"] if rule.get("alert") == name)[key]

    return look


def runbooks(rendering: Rendering) -> Any:
    return alert("SavesFailing", "annotations")(rendering)["runbook_url"].rpartition("/")[0]


def count(kind: str) -> Callable[[Rendering], int]:
    return lambda rendering: len(rendering.all(kind))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One value, set; where it shows, and what shows there before and after."""

    path: str
    value: Any
    look: Callable[[Rendering], Any]
    before: Any
    after: Any
    given: tuple[tuple[str, Any], ...] = ()
    """Other values that it needs."""


POLICIES = (("networkPolicies.enabled", True),)
CERT_MANAGER = (("certificates.mode", "cert-manager"),)
EXISTING = (
    ("certificates.mode", "existing"),
    ("certificates.existing.webhookCa", CERTIFICATE),
    ("certificates.existing.fleetCa", CERTIFICATE),
)
MONITORS = (("monitoring.podMonitor.enabled", True), ("monitoring.serviceMonitor.enabled", True))
RULES = (("monitoring.rules.enabled", True),)
DASHBOARD = (("monitoring.dashboard.enabled", True),)
DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = "-----BEGIN CERTIFICATE-----\nMIIC\n-----END CERTIFICATE-----\n"
STORE = {"store": {"url": "s3://bucket/prefix"}, "intervalSeconds": 60}
TOLERATION = [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
AFFINITY = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
SMALL = {"requests": {"cpu": "1m"}, "limits": {"cpu": 1}}
OPERATOR = "ghcr.io/deltashard/deltashard-operator"
SIDECAR = "ghcr.io/deltashard/deltashard-sidecar"
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def images(rendering: Rendering) -> set[str]:
    made = [container(component, "image")(rendering) for component in ("webhook", "controller")]
    return {*made, test_pod(rendering)["spec"]["containers"][0]["image"]}


def pull_policies(rendering: Rendering) -> set[str]:
    made = [container(component, "imagePullPolicy")(rendering) for component in ("webhook", "controller")]
    return {*made, test_pod(rendering)["spec"]["containers"][0]["imagePullPolicy"]}


def pod_specs(rendering: Rendering) -> list[Document]:
    """Of all pods of the chart."""
    made = [of_pod(component, "spec")(rendering) for component in ("webhook", "controller")]
    return [*made, test_pod(rendering)["spec"]]


def users(rendering: Rendering) -> set[Any]:
    keys = ("runAsUser", "runAsGroup", "fsGroup")
    return {spec["securityContext"].get(key) for spec in pod_specs(rendering) for key in keys}


def spread(rendering: Rendering) -> Any:
    constraints = of_pod("webhook", "spec", "topologySpreadConstraints")(rendering)
    return {each["whenUnsatisfiable"] for each in constraints}


def scheduling(component: str) -> Iterator[Case]:
    """What webhook and controller have alike."""

    def case(key: str, value: Any, before: Any, *path: str) -> Case:
        return Case(
            path=f"{component}.{key}", value=value, look=of_pod(component, *path), before=before, after=value
        )

    yield case("priorityClassName", "system-cluster-critical", None, "spec", "priorityClassName")
    yield case("nodeSelector", {"pool": "system"}, None, "spec", "nodeSelector")
    yield case("tolerations", TOLERATION, None, "spec", "tolerations")
    yield case("affinity", AFFINITY, None, "spec", "affinity")
    defaults = VALUES[component]["resources"]
    yield Case(
        path=f"{component}.resources",
        value=SMALL,
        look=container(component, "resources"),
        before=defaults,
        after=merged(defaults, SMALL),
    )
    for key, where in (("podLabels", "labels"), ("podAnnotations", "annotations")):
        yield Case(
            path=f"{component}.{key}",
            value={"team": "training"},
            look=of_pod(component, "metadata", where, "team"),
            before=None,
            after="training",
        )


def watched(rendering: Rendering) -> dict[str, Any]:
    """What stands in for all namespaces, or for some."""
    cluster = rendering.find("ClusterRole", "deltashard-controller")["rules"]
    return {
        "sent": [len(each["matchExpressions"]) for each in webhooks(rendering, "namespaceSelector")],
        "told": [
            [a for a in container(component, "args")(rendering) if "watch" in a]
            for component in ("webhook", "controller")
        ],
        "roles": [
            each["metadata"]["namespace"]
            for kind in ("Role", "RoleBinding")
            for name in ("deltashard-controller", "deltashard-webhook")
            for each in rendering.all(kind, name)
            if each["metadata"]["namespace"] != "deltashard-system"
        ],
        "everywhere": sorted({resource for rule in cluster for resource in rule["resources"]}),
        "webhook's": len(rendering.all("ClusterRole", "deltashard-webhook")),
        "scraped": rendering.find("PodMonitor")["spec"]["namespaceSelector"],
        "tested": test_pod(rendering)["spec"]["containers"][0]["args"],
    }


EVERYWHERE = ["mutatingwebhookconfigurations", "nodes", "tokenreviews"]
FOLLOWED = [
    "checkpointpolicies",
    "checkpointpolicies/status",
    "checkpointruns",
    "checkpointruns/status",
    "events",
    "jobs",
    "pods",
]

CASES = [
    Case(
        path="commonLabels",
        value={"team": "training"},
        look=lambda r: {
            d["metadata"]["labels"].get("team")
            for d in r.documents
            if d["kind"] != "CustomResourceDefinition"
        },
        before={None},
        after={"training"},
    ),
    Case(
        path="imagePullSecrets",
        value=["pull"],
        look=lambda r: [spec.get("imagePullSecrets") for spec in pod_specs(r)],
        before=[None] * 3,
        after=[[{"name": "pull"}]] * 3,
    ),
    Case(
        path="watchNamespaces",
        value=["team-a", "team-b"],
        look=watched,
        before={
            "sent": [1, 1],
            "told": [[], []],
            "roles": [],
            "everywhere": sorted([*EVERYWHERE, *FOLLOWED]),
            "webhook's": 1,
            "scraped": {"any": True},
            "tested": ["--namespace=default"],
        },
        after={
            "sent": [2, 2],
            "told": [["--watch-namespaces=team-a,team-b"]] * 2,
            "roles": ["team-a", "team-b"] * 4,
            "everywhere": EVERYWHERE,
            "webhook's": 0,
            "scraped": {"matchNames": ["team-a", "team-b"]},
            "tested": ["--namespace=team-a"],
        },
        given=MONITORS,
    ),
    Case(
        path="rights.aggregate",
        value=False,
        look=lambda r: [
            each["metadata"]["name"]
            for each in r.all("ClusterRole")
            if any("aggregate" in label for label in each["metadata"]["labels"])
        ],
        before=["deltashard-view", "deltashard-edit"],
        after=[],
    ),
    Case(path="runAsUser", value=1000, look=users, before={65532}, after={1000}),
    Case(
        path="image.repository",
        value="registry.example/operator",
        look=images,
        before={f"{OPERATOR}:0.1.0"},
        after={"registry.example/operator:0.1.0"},
    ),
    Case(
        path="image.tag",
        value="1.2.3",
        look=images,
        before={f"{OPERATOR}:0.1.0"},
        after={f"{OPERATOR}:1.2.3"},
    ),
    Case(
        path="image.digest",
        value=DIGEST,
        look=images,
        before={f"{OPERATOR}:0.1.0"},
        after={f"{OPERATOR}@{DIGEST}"},
    ),
    Case(
        path="image.pullPolicy", value="Always", look=pull_policies, before={"IfNotPresent"}, after={"Always"}
    ),
    Case(
        path="sidecarImage.repository",
        value="registry.example/sidecar",
        look=lambda r: policy(r)["sidecar"]["image"],
        before=f"{SIDECAR}:0.1.0",
        after="registry.example/sidecar:0.1.0",
    ),
    Case(
        path="sidecarImage.tag",
        value="1.2.3",
        look=lambda r: policy(r)["sidecar"]["image"],
        before=f"{SIDECAR}:0.1.0",
        after=f"{SIDECAR}:1.2.3",
    ),
    Case(
        path="sidecarImage.digest",
        value=DIGEST,
        look=lambda r: policy(r)["sidecar"]["image"],
        before=f"{SIDECAR}:0.1.0",
        after=f"{SIDECAR}@{DIGEST}",
    ),
    Case(
        path="sidecarImage.pullPolicy",
        value="Always",
        look=lambda r: policy(r)["sidecar"]["imagePullPolicy"],
        before="IfNotPresent",
        after="Always",
    ),
    Case(
        path="defaultPolicy",
        value=STORE,
        look=lambda r: {key: policy(r).get(key) for key in STORE},
        before=dict.fromkeys(STORE),
        after=STORE,
    ),
    Case(
        path="deciding.enabled",
        value=False,
        look=lambda r: policy(r).get("deciding"),
        before=None,
        after={"enabled": False},
    ),
    Case(
        path="reclaim.enabled",
        value=True,
        look=lambda r: (policy(r).get("reclaiming"), creates_jobs(r)),
        before=(None, False),
        after=({"enabled": True}, True),
    ),
    Case(
        path="webhook.replicas",
        value=3,
        look=lambda r: r.find("Deployment", "deltashard-webhook")["spec"]["replicas"],
        before=2,
        after=3,
    ),
    Case(
        path="webhook.failurePolicy",
        value="Ignore",
        look=lambda r: webhooks(r, "failurePolicy"),
        before=["Fail", "Fail"],
        after=["Ignore", "Ignore"],
    ),
    Case(
        path="webhook.exemptNamespaces",
        value=["legacy"],
        look=lambda r: {
            json.dumps(selector["matchExpressions"][0]["values"])
            for selector in [
                *webhooks(r, "namespaceSelector"),
                *(
                    p["spec"]["matchConstraints"]["namespaceSelector"]
                    for p in r.all("ValidatingAdmissionPolicy")
                ),
            ]
        },
        before={'["kube-system", "deltashard-system"]'},
        after={'["kube-system", "deltashard-system", "legacy"]'},
    ),
    Case(
        path="webhook.drainSeconds",
        value=60,
        look=lambda r: (
            [a for a in container("webhook", "args")(r) if "drain" in a],
            of_pod("webhook", "spec", "terminationGracePeriodSeconds")(r),
        ),
        before=(["--drain-s=10"], 25),
        after=(["--drain-s=60"], 75),
    ),
    Case(
        path="webhook.port",
        value=10250,
        look=lambda r: (
            ports(r)["webhook"],
            f"--port={ports(r)['webhook']}" in container("webhook", "args")(r),
        ),
        before=(9443, True),
        after=(10250, True),
    ),
    Case(
        path="webhook.metricsPort",
        value=9091,
        look=lambda r: (
            ports(r)["metrics"],
            f"--metrics-port={ports(r)['metrics']}" in container("webhook", "args")(r),
        ),
        before=(9090, True),
        after=(9091, True),
    ),
    Case(
        path="webhook.hostNetwork",
        value=True,
        look=lambda r: (
            of_pod("webhook", "spec", "hostNetwork")(r),
            of_pod("webhook", "spec", "dnsPolicy")(r),
            r.find("Deployment", "deltashard-webhook")["spec"]["strategy"]["rollingUpdate"],
        ),
        before=(None, None, {"maxUnavailable": 0, "maxSurge": 1}),
        after=(True, "ClusterFirstWithHostNet", {"maxUnavailable": 1, "maxSurge": 0}),
    ),
    Case(
        path="webhook.podDisruptionBudget.enabled",
        value=False,
        look=count("PodDisruptionBudget"),
        before=1,
        after=0,
    ),
    Case(
        path="webhook.podDisruptionBudget.maxUnavailable",
        value="50%",
        look=lambda r: r.find("PodDisruptionBudget")["spec"]["maxUnavailable"],
        before=1,
        after="50%",
    ),
    Case(
        path="webhook.topologySpread",
        value="DoNotSchedule",
        look=spread,
        before={"ScheduleAnyway"},
        after={"DoNotSchedule"},
    ),
    Case(
        path="controller.keepFinishedDays",
        value=0.5,
        look=lambda r: [a for a in container("controller", "args")(r) if "keep" in a],
        before=["--keep-finished-days=7"],
        after=["--keep-finished-days=0.5"],
    ),
    *scheduling("webhook"),
    *scheduling("controller"),
    Case(
        path="certificates.mode",
        value="cert-manager",
        look=lambda r: (
            [a for a in container("controller", "args")(r) if a.startswith("--certificates")],
            (count("Certificate")(r), count("Secret")(r), len(pod_specs(r)[1]["volumes"])),
        ),
        before=(["--certificates=builtin"], (0, 3, 1)),
        after=(["--certificates=external"], (3, 0, 2)),
    ),
    Case(
        path="certificates.certManager.issuerRef",
        value={"name": "company", "kind": "ClusterIssuer"},
        look=lambda r: (certificates(r, "issuerRef"), count("Issuer")(r)),
        before=([{"name": "deltashard-ca", "kind": "Issuer", "group": "cert-manager.io"}] * 2, 2),
        after=([{"name": "company", "kind": "ClusterIssuer"}] * 2, 0),
        given=CERT_MANAGER,
    ),
    Case(
        path="certificates.certManager.duration",
        value="720h",
        look=lambda r: certificates(r, "duration"),
        before=["2160h"] * 2,
        after=["720h"] * 2,
        given=(*CERT_MANAGER, ("certificates.certManager.renewBefore", "240h")),
    ),
    Case(
        path="certificates.certManager.renewBefore",
        value="240h",
        look=lambda r: certificates(r, "renewBefore"),
        before=["720h"] * 2,
        after=["240h"] * 2,
        given=CERT_MANAGER,
    ),
    Case(
        path="certificates.existing.webhookSecret",
        value="mine",
        look=lambda r: [v["secret"]["secretName"] for v in pod_specs(r)[0]["volumes"] if v["name"] == "tls"],
        before=["deltashard-webhook-tls"],
        after=["mine"],
        given=EXISTING,
    ),
    Case(
        path="certificates.existing.fleetSecret",
        value="mine",
        look=lambda r: [v["secret"]["secretName"] for v in pod_specs(r)[1]["volumes"] if v["name"] == "tls"],
        before=["deltashard-fleet-tls"],
        after=["mine"],
        given=EXISTING,
    ),
    Case(
        path="certificates.existing.webhookCa",
        value=OTHER,
        look=lambda r: {base64.b64decode(w["caBundle"]).decode() for w in webhooks(r, "clientConfig")},
        before={CERTIFICATE},
        after={OTHER},
        given=EXISTING,
    ),
    Case(
        path="certificates.existing.fleetCa",
        value=OTHER,
        look=lambda r: r.find("ConfigMap", "deltashard-fleet-ca")["data"]["ca.crt"],
        before=CERTIFICATE,
        after=OTHER,
        given=EXISTING,
    ),
    Case(path="networkPolicies.enabled", value=True, look=count("NetworkPolicy"), before=0, after=3),
    Case(
        path="networkPolicies.apiServerPorts",
        value=[16443],
        look=egress,
        before=[[443, 6443, 8443]] * 3,
        after=[[16443]] * 3,
        given=POLICIES,
    ),
    Case(
        path="networkPolicies.metricsFrom",
        value=PEERS,
        look=ingress,
        before=[{"namespaceSelector": {}}],
        after=PEERS,
        given=POLICIES,
    ),
    Case(
        path="monitoring.interval",
        value="15s",
        look=lambda r: (
            r.find("PodMonitor")["spec"]["podMetricsEndpoints"][0]["interval"],
            r.find("ServiceMonitor")["spec"]["endpoints"][0]["interval"],
        ),
        before=("30s", "30s"),
        after=("15s", "15s"),
        given=MONITORS,
    ),
    Case(
        path="monitoring.labels",
        value={"release": "prometheus"},
        look=lambda r: {
            labels(kind)(r).get("release") for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")
        },
        before={None},
        after={"prometheus"},
        given=(*MONITORS, *RULES),
    ),
    Case(path="monitoring.podMonitor.enabled", value=True, look=count("PodMonitor"), before=0, after=1),
    Case(
        path="monitoring.serviceMonitor.enabled", value=True, look=count("ServiceMonitor"), before=0, after=1
    ),
    Case(path="monitoring.rules.enabled", value=True, look=count("PrometheusRule"), before=0, after=1),
    Case(
        path="monitoring.rules.runbooks",
        value="https://wiki.example/deltashard",
        look=runbooks,
        before=VALUES["monitoring"]["rules"]["runbooks"],
        after="https://wiki.example/deltashard",
        given=RULES,
    ),
    Case(
        path="monitoring.rules.staleIntervals",
        value=7,
        look=lambda r: "> 7 * deltashard_run_interval_seconds" in alert("CheckpointStale")(r),
        before=False,
        after=True,
        given=RULES,
    ),
    Case(
        path="monitoring.rules.certificateDays",
        value=7,
        look=lambda r: "< 7 * 86400" in alert("CertificateNearExpiry")(r),
        before=False,
        after=True,
        given=RULES,
    ),
    Case(
        path="monitoring.dashboard.enabled",
        value=True,
        look=lambda r: len(r.all("ConfigMap", "deltashard-dashboard")),
        before=0,
        after=1,
    ),
    Case(
        path="monitoring.dashboard.labels",
        value={"grafana": "yes"},
        look=lambda r: r.find("ConfigMap", "deltashard-dashboard")["metadata"]["labels"].get("grafana"),
        before=None,
        after="yes",
        given=DASHBOARD,
    ),
    Case(
        path="monitoring.dashboard.annotations",
        value={"folder": "Training"},
        look=lambda r: r.find("ConfigMap", "deltashard-dashboard")["metadata"].get("annotations"),
        before=None,
        after={"folder": "Training"},
        given=DASHBOARD,
    ),
    Case(
        path="test.namespace",
        value="team-a",
        look=lambda r: (
            {
                r.find(kind, "deltashard-test", hook=True)["metadata"]["namespace"]
                for kind in ("Role", "RoleBinding")
            },
            test_pod(r)["spec"]["containers"][0]["args"],
        ),
        before=({"default"}, ["--namespace=default"]),
        after=({"team-a"}, ["--namespace=team-a"]),
    ),
    Case(
        path="test.resources",
        value=SMALL,
        look=lambda r: test_pod(r)["spec"]["containers"][0]["resources"],
        before=VALUES["test"]["resources"],
        after=merged(VALUES["test"]["resources"], SMALL),
    ),
]


def test_every_value_has_a_case() -> None:
    """And no case is for a value that is gone."""
    assert sorted(case.path for case in CASES) == sorted(leaves(VALUES))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_a_value_shows(case: Case) -> None:
    """Where its comment says, and the default there is the documented one."""
    given = merged(*(nested(*each) for each in case.given))
    before, after = render(given), render(merged(given, nested(case.path, case.value)))
    assert before.documents != after.documents
    assert case.look(before) == case.before
    assert case.look(after) == case.after


def test_templates_are_all_seen() -> None:
    """Every template makes something for some of the values of these tests; hooks of the uninstall, on a cluster only."""
    seen: set[str] = set()
    for given in ((), POLICIES, CERT_MANAGER, EXISTING, (*MONITORS, *RULES), DASHBOARD):
        seen |= render(merged(*(nested(*each) for each in given))).sources
    written = {
        str(path.relative_to(CHART)) for path in (CHART / "templates").rglob("*") if path.suffix == ".yaml"
    }
    assert seen == written - {"templates/webhook/uninstall.yaml"}


def schemas(
    schema: Mapping[str, Any], values: Any, path: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Schema of every value, by path; fails for a value that has none."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    yield path, schema
    if isinstance(values, dict) and "properties" in schema:
        assert set(values) <= set(schema["properties"]), path
        for key, value in values.items():
            yield from schemas(schema["properties"][key], value, f"{path}.{key}" if path else key)


@pytest.mark.parametrize("path", [path for path, schema in schemas(SCHEMA, VALUES) if "properties" in schema])
def test_a_value_that_does_not_exist_is_refused(path: str) -> None:
    """At every level: a typo is an error, not a default."""
    with pytest.raises(HelmRefused, match="'typo' not allowed"):
        render(nested(f"{path}.typo" if path else "typo", 1))


@pytest.mark.parametrize("path", sorted(leaves(VALUES)))
def test_a_value_of_a_wrong_type_is_refused(path: str) -> None:
    """A list of lists is right nowhere."""
    with pytest.raises(HelmRefused, match="values don't meet the specifications"):
        render(nested(path, [[1.5]]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("webhook.replicas", 0),
        ("webhook.failurePolicy", "fail"),
        ("webhook.exemptNamespaces", ["Upper"]),
        ("webhook.podDisruptionBudget.maxUnavailable", 0),
        ("watchNamespaces", ["team-*"]),
        ("watchNamespaces", ["team-a", "team-a"]),
        ("test.namespace", "team_a"),
        ("webhook.tolerations", [{"effects": "NoSchedule"}]),
        ("image.digest", "sha256:abc"),
        ("image.repository", "registry.example/operator:tag"),
        ("certificates.mode", "certmanager"),
        ("certificates.certManager.issuerRef", {"kind": "Issuer"}),
        ("certificates.existing.webhookCa", "/etc/ca.crt"),
        ("networkPolicies.apiServerPorts", []),
        ("monitoring.interval", "30"),
        ("monitoring.rules.runbooks", "https://wiki.example/"),
        ("defaultPolicy", {"bits": 5}),
        ("defaultPolicy", {"bits": 8, "encoding": "q8"}),
        ("defaultPolicy", {"intervalSeconds": 0}),
        ("defaultPolicy", {"intervalSeconds": 0, "everySteps": 0}),
        ("defaultPolicy", {"store": {"url": "file:///tmp"}}),
        ("defaultPolicy", {"store": {"secretName": "without-url"}}),
        ("defaultPolicy", {"intervalSecond": 5}),
        ("defaultPolicy", {"interval": {"goal": "soon"}}),
        ("defaultPolicy", {"interval": {"goal": "overhead=60%"}}),
        ("defaultPolicy", {"interval": {"mode": "apply"}}),
        ("defaultPolicy", {"precision": {"leastBits": 5}}),
        ("defaultPolicy", {"precision": {"tables": {"emb=x": "q8"}}}),
        ("defaultPolicy", {"precision": {"tables": {"emb": "q7"}}}),
        ("defaultPolicy", {"deciding": {"enabled": False}}),
        ("defaultPolicy", {"reclaiming": {"enabled": True}}),
        ("defaultPolicy", {"reclaimPolicy": "Recycle"}),
        ("defaultPolicy", {"reclaimAfterSeconds": -1}),
        ("defaultPolicy", {"reclaimServiceAccount": "A B"}),
        ("defaultPolicy", {"sidecar": {"env": [{"name": "DELTASHARD_URL", "value": "x"}]}}),
        ("defaultPolicy", {"sidecar": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}),
        ("defaultPolicy", {"sidecar": {"env": [{"name": "http_proxy", "value": "x"}]}}),
        ("defaultPolicy", {"sidecar": {"volumes": [{"name": "v"}]}}),
        ("defaultPolicy", {"sidecar": {"volumes": [{"name": "deltashard-x", "configMap": {"name": "c"}}]}}),
        ("defaultPolicy", {"network": {"httpsProxy": "http://user:pw@proxy:1"}}),
        ("defaultPolicy", {"network": {"caBundle": {"key": "ca.crt"}}}),
        ("webhook.port", 443),
        ("runAsUser", 0),
    ],
)
def test_nonsense_is_refused(path: str, value: Any) -> None:
    """Before anything reaches a cluster."""
    with pytest.raises(HelmRefused, match="values don't meet the specifications"):
        render(nested(path, value))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"store": {"url": "gs://bkt", "region": "eu"}}, "store.region is a word of s3:// alone"),
        (
            {"store": {"url": "az://ctr", "encryption": {"kind": "SSE-S3"}}},
            "encryption is a word of s3:// alone",
        ),
        ({"store": {"url": "s3://bkt", "account": "acc1"}}, "account is a word of az:// alone"),
        ({"store": {"url": "gs://bkt", "webIdentity": {}}}, "webIdentity is nothing for gs://"),
        ({"store": {"url": "az://ctr", "webIdentity": {"clientId": "c"}}}, "needs clientId and tenantId"),
        (
            {"store": {"url": "s3://bkt", "webIdentity": {"clientId": "c"}}},
            "clientId is a word of az:// alone",
        ),
        (
            {"store": {"url": "s3://bkt", "encryption": {"kind": "SSE-S3", "keyId": "k"}}},
            "keyId belongs to kind SSE-KMS",
        ),
        ({"reclaimPolicy": "Delete"}, "removes nothing without reclaim.enabled"),
        ({"network": {"noProxy": "a"}}, "noProxy is nothing without"),
        ({"sidecar": {"volumeMounts": [{"name": "v", "mountPath": "/a"}]}}, "v names none of"),
        (
            {
                "sidecar": {
                    "volumes": [{"name": "v", "configMap": {"name": "c"}}],
                    "volumeMounts": [{"name": "v", "mountPath": "/etc"}],
                }
            },
            "/etc is in or above /etc/deltashard",
        ),
    ],
)
def test_words_that_do_not_go_together_are_refused(values: dict[str, Any], says: str) -> None:
    """With a sentence, at the installation: the webhook would refuse every annotated Job by it."""
    with pytest.raises(HelmRefused, match=re.escape(says)):
        render({"defaultPolicy": values})


def test_one_port_does_not_serve_two() -> None:
    with pytest.raises(HelmRefused, match="both 9090"):
        render({"webhook": {"port": 9090}})


@pytest.mark.parametrize(("replicas", "away"), [(2, 2), (3, 5), (2, "51%"), (3, "99%")])
def test_a_budget_under_which_all_replicas_may_go_is_refused(replicas: int, away: int | str) -> None:
    """A drain would then stop every annotated Job; the sentence says how to get on."""
    webhook = {"replicas": replicas, "podDisruptionBudget": {"maxUnavailable": away}}
    with pytest.raises(
        HelmRefused, match=rf"maxUnavailable \({away}\) lets all {replicas} replicas.* must leave one"
    ):
        render({"webhook": webhook})
    webhook["podDisruptionBudget"] = {"maxUnavailable": away, "enabled": False}
    assert not render({"webhook": webhook}).all("PodDisruptionBudget")


@pytest.mark.parametrize(("replicas", "away"), [(1, 1), (2, "50%"), (3, 2), (3, "66%"), (100, "99%")])
def test_a_budget_that_leaves_a_replica_is_taken(replicas: int, away: int | str) -> None:
    """A single replica has nothing to leave: whoever wants only one has said so."""
    rendering = render({"webhook": {"replicas": replicas, "podDisruptionBudget": {"maxUnavailable": away}}})
    assert rendering.find("PodDisruptionBudget")["spec"]["maxUnavailable"] == away


@pytest.mark.parametrize("left", ["kube-system", "deltashard-system", "legacy"])
def test_a_namespace_that_is_watched_and_left_alone_is_refused(left: str) -> None:
    """The sentence names it, and both lists."""
    values = {"watchNamespaces": ["team-a", left], "webhook": {"exemptNamespaces": ["legacy"]}}
    with pytest.raises(HelmRefused, match=f"watchNamespaces has {left}, which is left alone"):
        render(values)


def test_a_value_can_be_left_to_the_cluster() -> None:
    """OpenShift gives each namespace its own range of users."""
    rendering = render({"runAsUser": None})
    assert users(rendering) == {None}
    assert {spec["securityContext"]["runAsNonRoot"] for spec in pod_specs(rendering)} == {True}


@pytest.mark.parametrize(
    ("stated", "goal"),
    [
        ({}, "auto"),
        ({"bits": 4}, "auto"),
        ({"interval": {"mostSeconds": 600}}, "auto"),
        ({"interval": {"goal": "lost-work=5m"}}, "lost-work=5m"),
        ({"intervalSeconds": 60}, "fixed"),
        ({"everySteps": 100}, "fixed"),
        ({"intervalSeconds": 60, "interval": {"goal": "auto"}}, "auto"),
    ],
)
def test_the_default_policy_chooses_its_interval_unless_it_states_one(
    stated: dict[str, Any], goal: str
) -> None:
    """As the webhook and the controller read what the chart gives them."""
    found = policy(render({"defaultPolicy": {"store": {"url": "s3://bucket/x"}, **stated}}))
    assert workload_policy.read("default", found).goal == goal


def test_the_schema_of_the_default_policy_is_the_resource_s() -> None:
    """What a CheckpointPolicy takes, the value takes, and nothing else."""
    text = (CHART / "templates" / "crds" / "checkpointpolicies.yaml").read_text(encoding="utf-8")
    versions = yaml.safe_load(text)["spec"]["versions"]
    resource = versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert fields(SCHEMA["properties"]["defaultPolicy"]) == fields(resource)


def fields(schema: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Paths of a schema's fields, with what both kinds of schema say in the same words."""
    found = {}
    for key, value in schema.get("properties", {}).items():
        quantity = "x-kubernetes-int-or-string" in value or value.get("$ref") == "#/definitions/quantity"
        said = (
            ()
            if quantity
            else tuple(repr(value.get(word)) for word in ("pattern", "enum", "minimum", "maximum"))
        )
        found[f"{path}.{key}"] = ("quantity",) if quantity else said
        found |= fields(value, f"{path}.{key}")
    return found
