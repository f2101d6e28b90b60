"""Every value of values.yaml changes what is rendered, where its comment says; a value without a case fails here."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.charts.helm import CERTIFICATE, CHART, Rendering, render
from tests.integration.charts.value import (
    VALUES,
    at,
    chart_test_pod,
    default,
    leaves,
    merged,
    nested,
    pod_specs,
    policy,
)


def holds(shown: Any, value: Any) -> bool:
    """Whether the value is there; of a map each entry, of a list each item among what else there may be."""
    if isinstance(value, dict) and isinstance(shown, dict):
        return all(holds(shown.get(key), each) for key, each in value.items())
    if isinstance(value, list) and isinstance(shown, list):
        return all(each in shown for each in value)
    if isinstance(value, list) and isinstance(shown, str):
        return shown == ",".join(value)
    return bool(shown == value)


MONITORS = (("monitoring.podMonitor.enabled", True), ("monitoring.serviceMonitor.enabled", True))
RULES = (("monitoring.rules.enabled", True),)
POLICIES = (("networkPolicies.enabled", True),)
CERT_MANAGER = (("certificates.mode", "cert-manager"), ("certificates.certManager.renewBefore", "240h"))
EXISTING = (
    ("certificates.mode", "existing"),
    ("certificates.existing.webhookCa", CERTIFICATE),
    ("certificates.existing.fleetCa", CERTIFICATE),
)
DASHBOARD = (("monitoring.dashboard.enabled", True),)
NEEDED = {
    "monitoring.": (*MONITORS, *RULES, *DASHBOARD),
    "networkPolicies.": POLICIES,
    "certificates.certManager.": CERT_MANAGER,
    "certificates.existing.": EXISTING,
}
"""Other values without which those that begin so show nowhere."""
TEAM = {"team": "training"}
SMALL = {"requests": {"cpu": "1m"}, "limits": {"cpu": 1}}
TOLERATION = [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
AFFINITY = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
DROPPED = [{"action": "drop", "regex": "go_.*", "sourceLabels": ["__name__"]}]
WEBHOOKS = "MutatingWebhookConfiguration/deltashard-webhook webhooks.0"
DASHBOARD_AT = "ConfigMap/deltashard-dashboard metadata"


def of_both(component: str) -> dict[str, tuple[Any, str]]:
    """What webhook and controller have alike."""
    spread = "spec.topologySpreadConstraints"
    deployment = f"Deployment/deltashard-{component}"
    here = {
        "replicas": (3, f"{deployment} spec.replicas"),
        "resources": (SMALL, "container.resources"),
        "podDisruptionBudget.maxUnavailable": (
            "50%",
            f"PodDisruptionBudget/deltashard-{component} spec.maxUnavailable",
        ),
        "topologySpread": ("DoNotSchedule", f"{spread}.0.whenUnsatisfiable"),
        "priorityClassName": ("system-node-critical", "spec.priorityClassName"),
        "nodeSelector": ({"pool": "system"}, "spec.nodeSelector"),
        "tolerations": (TOLERATION, "spec.tolerations"),
        "affinity": (AFFINITY, "spec.affinity"),
        "podLabels": (TEAM, "metadata.labels"),
        "podAnnotations": (TEAM, "metadata.annotations"),
        "serviceAccount.annotations": (TEAM, f"ServiceAccount/deltashard-{component} metadata.annotations"),
        "extraArgs": (["--kubeconfig=/k"], "container.args"),
        "extraEnv": ([{"name": "A", "value": "b"}], "container.env"),
        "extraVolumes": ([{"name": "v", "emptyDir": {}}], "spec.volumes"),
        "extraVolumeMounts": ([{"name": "v", "mountPath": "/v"}], "container.volumeMounts"),
    }
    return {
        f"{component}.{path}": (value, place if "/" in place else f"{component} {place}")
        for path, (value, place) in here.items()
    }


SHOWN: dict[str, tuple[Any, str]] = {
    "global.imagePullSecrets": (["shared"], "pods imagePullSecrets.*.name"),
    "global.nodeSelector": ({"pool": "system"}, "pods nodeSelector"),
    "global.tolerations": (TOLERATION, "pods tolerations"),
    "imagePullSecrets": (["pull"], "pods imagePullSecrets.*.name"),
    "runAsUser": (1000, "pods securityContext.runAsUser"),
    "podSecurityContext": ({"fsGroupChangePolicy": "OnRootMismatch"}, "pods securityContext"),
    "securityContext": ({"privileged": False}, "pods containers.0.securityContext"),
    "service.ipFamilyPolicy": ("RequireDualStack", "Service/* spec.ipFamilyPolicy"),
    "service.ipFamilies": (["IPv6"], "Service/* spec.ipFamilies"),
    "service.annotations": (TEAM, "Service/* metadata.annotations"),
    "logLevel": ("debug", "Deployment/* spec.template.spec.containers.0.args.--log-level"),
    "image.pullPolicy": ("Always", "pods containers.0.imagePullPolicy"),
    **of_both("webhook"),
    **of_both("controller"),
    "webhook.failurePolicy": ("Ignore", f"{WEBHOOKS}.failurePolicy"),
    "webhook.timeoutSeconds": (10, f"{WEBHOOKS}.timeoutSeconds"),
    "webhook.annotations": (TEAM, "MutatingWebhookConfiguration/* metadata.annotations"),
    "webhook.strategy": ({"type": "Recreate"}, "Deployment/deltashard-webhook spec.strategy"),
    "controller.disruptionTaints": (["a/b"], "controller container.args.--disruption-taints"),
    "controller.keepFinishedDays": (0.5, "controller container.args.--keep-finished-days"),
    "certificates.certManager.duration": ("720h", "Certificate/deltashard-fleet spec.duration"),
    "certificates.existing.webhookSecret": ("mine", "webhook spec.volumes.tls.secret.secretName"),
    "certificates.existing.fleetSecret": ("mine", "controller spec.volumes.tls.secret.secretName"),
    "networkPolicies.apiServerPorts": ([16443], "NetworkPolicy/* spec.egress.1.ports.*.port"),
    "monitoring.podMonitor.namespace": ("prometheus", "PodMonitor/* metadata.namespace"),
    "monitoring.podMonitor.labels": (TEAM, "PodMonitor/* metadata.labels"),
    "monitoring.podMonitor.metricRelabelings": (
        DROPPED,
        "PodMonitor/* spec.podMetricsEndpoints.0.metricRelabelings",
    ),
    "monitoring.podMonitor.sampleLimit": (500, "PodMonitor/* spec.sampleLimit"),
    "monitoring.podMonitor.podTargetLabels": (["team"], "PodMonitor/* spec.podTargetLabels"),
    "monitoring.serviceMonitor.namespace": ("prometheus", "ServiceMonitor/* metadata.namespace"),
    "monitoring.serviceMonitor.labels": (TEAM, "ServiceMonitor/* metadata.labels"),
    "monitoring.serviceMonitor.metricRelabelings": (
        DROPPED,
        "ServiceMonitor/* spec.endpoints.0.metricRelabelings",
    ),
    "monitoring.rules.namespace": ("prometheus", "PrometheusRule/* metadata.namespace"),
    "monitoring.rules.labels": (TEAM, "PrometheusRule/* metadata.labels"),
    "monitoring.rules.alertLabels": (TEAM, "PrometheusRule/* spec.groups.1.rules.0.labels"),
    "monitoring.dashboard.labels": ({"grafana": "yes"}, f"{DASHBOARD_AT}.labels"),
    "monitoring.dashboard.annotations": ({"folder": "Training"}, f"{DASHBOARD_AT}.annotations"),
}
"""Values that show as they are: another value, and where it stands."""
SWITCHED = {
    "crds.enabled": "CustomResourceDefinition",
    "webhook.podDisruptionBudget.enabled": "PodDisruptionBudget/deltashard-webhook",
    "controller.podDisruptionBudget.enabled": "PodDisruptionBudget/deltashard-controller",
    "webhook.serviceAccount.create": "ServiceAccount/deltashard-webhook",
    "controller.serviceAccount.create": "ServiceAccount/deltashard-controller",
    "networkPolicies.enabled": "NetworkPolicy",
    "monitoring.podMonitor.enabled": "PodMonitor",
    "monitoring.serviceMonitor.enabled": "ServiceMonitor",
    "monitoring.rules.enabled": "PrometheusRule",
    "monitoring.dashboard.enabled": "ConfigMap/deltashard-dashboard",
}
"""Values that say whether there are objects of a kind, or one of a name."""


# What shows in another form.


def container(component: str, key: str) -> Callable[[Rendering], Any]:
    """A field of a component's container."""
    return lambda rendering: at(f"{component} container.{key}")(rendering)[0]


def webhooks(rendering: Rendering, key: str) -> list[Any]:
    return [w[key] for w in rendering.find("MutatingWebhookConfiguration")["webhooks"]]


def creates_jobs(rendering: Rendering) -> bool:
    """Whether the controller may."""
    rules = rendering.find("ClusterRole", "deltashard-controller")["rules"]
    return any("jobs" in rule["resources"] and "create" in rule["verbs"] for rule in rules)


def count(kind: str) -> Callable[[Rendering], int]:
    return lambda rendering: len(rendering.all(kind))


def certificates(rendering: Rendering, key: str) -> list[Any]:
    return [rendering.find("Certificate", f"deltashard-{name}")["spec"][key] for name in ("webhook", "fleet")]


def alert(name: str, key: str = "expr") -> Callable[[Rendering], Any]:

    def look(rendering: Rendering) -> Any:
        groups = rendering.find("PrometheusRule")["spec"]["groups"]
        return next(rule for group in groups for rule in group["rules"] if rule.get("alert") == name)[key]

    return look


def selectors(rendering: Rendering) -> list[Any]:
    """Of namespaces, by webhook and policies."""
    policies = [p["spec"]["matchConstraints"] for p in rendering.all("ValidatingAdmissionPolicy")]
    return [*webhooks(rendering, "namespaceSelector"), *(each["namespaceSelector"] for each in policies)]


def accounts(component: str) -> Callable[[Rendering], Any]:
    """Names that a component's account goes by."""

    def look(rendering: Rendering) -> set[str]:
        subjects = [
            each["name"]
            for kind in ("ClusterRoleBinding", "RoleBinding")
            for binding in rendering.all(kind, f"deltashard-{component}")
            for each in binding["subjects"]
        ]
        made = rendering.all("ServiceAccount")
        own = [each["metadata"]["name"] for each in made if component in str(each["metadata"]["labels"])]
        return {*subjects, *own, *at(f"{component} spec.serviceAccountName")(rendering)}

    return look


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


DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = "-----BEGIN CERTIFICATE-----\nMIIC\n-----END CERTIFICATE-----\n"
STORE = {"store": {"url": "s3://bucket/prefix"}, "interval": {"every": "60s"}}
OPERATOR = "ghcr.io/deltashard/deltashard-operator"
SIDECAR = "ghcr.io/deltashard/deltashard-sidecar"
OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}


def images(rendering: Rendering) -> set[str]:
    return {spec["containers"][0]["image"] for spec in pod_specs(rendering)}


def sidecar(rendering: Rendering) -> str:
    return str(policy(rendering)["sidecar"]["image"])


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
        "tested": chart_test_pod(rendering)["spec"]["containers"][0]["args"],
    }


EVERYWHERE = ["mutatingwebhookconfigurations", "nodes", "tokenreviews"]
FOLLOWED = [
    "checkpointpolicies",
    "checkpointpolicies/status",
    "checkpointruns",
    "checkpointruns/status",
    "clustercheckpointpolicies",
    "clustercheckpointpolicies/status",
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
        path="watchNamespaces",
        value=["team-a", "team-b"],
        look=watched,
        before={
            "sent": [1] * 4,
            "told": [[], []],
            "roles": [],
            "everywhere": sorted([*EVERYWHERE, *FOLLOWED]),
            "webhook's": 1,
            "scraped": {"any": True},
            "tested": ["--namespace=default"],
        },
        after={
            "sent": [2] * 4,
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
        before={"store": None, "interval": {"goal": {"type": "Auto"}}},
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
        path="reclaim.jobLabels",
        value={"kueue.x-k8s.io/queue-name": "chores"},
        look=lambda r: policy(r)["reclaiming"].get("labels"),
        before=None,
        after={"kueue.x-k8s.io/queue-name": "chores"},
        given=(("reclaim.enabled", True),),
    ),
    Case(
        path="webhook.hostNetwork",
        value=True,
        look=lambda r: (
            *at("webhook spec.hostNetwork")(r),
            *at("webhook spec.dnsPolicy")(r),
            r.find("Deployment", "deltashard-webhook")["spec"]["strategy"]["rollingUpdate"],
        ),
        before=(None, None, {"maxUnavailable": 0, "maxSurge": 1}),
        after=(True, "ClusterFirstWithHostNet", {"maxUnavailable": 1, "maxSurge": 0}),
    ),
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
    Case(
        path="test.namespace",
        value="team-a",
        look=lambda r: (
            {
                r.find(kind, "deltashard-test", hook=True)["metadata"]["namespace"]
                for kind in ("Role", "RoleBinding")
            },
            chart_test_pod(r)["spec"]["containers"][0]["args"],
        ),
        before=({"default"}, ["--namespace=default"]),
        after=({"team-a"}, ["--namespace=team-a"]),
    ),
    *(
        Case(path=f"{path}.{key}", value=value, look=look, before=before, after=after)
        for path, look, name, before in (
            ("image", images, OPERATOR, {f"{OPERATOR}:0.1.0"}),
            ("sidecarImage", sidecar, SIDECAR, f"{SIDECAR}:0.1.0"),
        )
        for key, value, made in (
            ("repository", "registry.example/other", "registry.example/other:0.1.0"),
            ("tag", "1.2.3", f"{name}:1.2.3"),
            ("digest", DIGEST, f"{name}@{DIGEST}"),
        )
        for after in [{made} if path == "image" else made]
    ),
    Case(
        path="global.imageRegistry",
        value="registry.example:5000",
        look=lambda r: (images(r), sidecar(r)),
        before=({f"{OPERATOR}:0.1.0"}, f"{SIDECAR}:0.1.0"),
        after=(
            {"registry.example:5000/deltashard/deltashard-operator:0.1.0"},
            "registry.example:5000/deltashard/deltashard-sidecar:0.1.0",
        ),
    ),
    Case(
        path="extraObjects",
        value=[OBJECT, json.dumps(OBJECT).replace("more", "text")],
        look=lambda r: [len(r.all("ConfigMap", f"deltashard-{name}")) for name in ("more", "text")],
        before=[0, 0],
        after=[1, 1],
    ),
    *(
        Case(
            path=f"{component}.serviceAccount.name",
            value="mine",
            look=accounts(component),
            before={f"deltashard-{component}"},
            after={"mine"},
        )
        for component in ("webhook", "controller")
    ),
    Case(
        path="webhook.exemptNamespaces",
        value=["legacy"],
        look=lambda r: {json.dumps(each["matchExpressions"][0]["values"]) for each in selectors(r)},
        before={'["kube-system", "deltashard-system"]'},
        after={'["kube-system", "deltashard-system", "legacy"]'},
    ),
    Case(
        path="webhook.namespaceSelector",
        value={"matchLabels": TEAM, "matchExpressions": [{"key": "a", "operator": "Exists"}]},
        look=lambda r: {json.dumps(each["matchExpressions"][1:]) for each in selectors(r)},
        before={"[]"},
        after={
            json.dumps(
                [
                    {"key": "a", "operator": "Exists"},
                    {"key": "team", "operator": "In", "values": ["training"]},
                ]
            )
        },
    ),
    Case(
        path="webhook.drainSeconds",
        value=60,
        look=lambda r: (
            container("webhook", "args.--drain-s")(r),
            at("webhook spec.terminationGracePeriodSeconds")(r),
        ),
        before=(10, [25]),
        after=(60, [75]),
    ),
    *(
        Case(
            path=f"webhook.{path}",
            value=10250,
            look=lambda r, name=name, flag=flag: (
                container("webhook", f"ports.{name}.containerPort")(r),
                container("webhook", f"args.{flag}")(r),
            ),
            before=(before, before),
            after=(10250, 10250),
        )
        for path, name, flag, before in (
            ("port", "webhook", "--port", 9443),
            ("metricsPort", "metrics", "--metrics-port", 9090),
        )
    ),
    Case(
        path="certificates.certManager.renewBefore",
        value="480h",
        look=lambda r: certificates(r, "renewBefore"),
        before=["720h"] * 2,
        after=["480h"] * 2,
    ),
    Case(
        path="networkPolicies.metricsFrom",
        value=PEERS,
        look=at("NetworkPolicy/deltashard-webhook spec.ingress.1.from"),
        before=[[{"namespaceSelector": {}}]],
        after=[PEERS],
    ),
    Case(
        path="monitoring.interval",
        value="15s",
        look=lambda r: (
            at("PodMonitor/* spec.podMetricsEndpoints.0.interval")(r)
            + at("ServiceMonitor/* spec.endpoints.0.interval")(r)
        ),
        before=["30s", "30s"],
        after=["15s", "15s"],
    ),
    Case(
        path="monitoring.labels",
        value=TEAM,
        look=lambda r: [
            at(f"{kind}/* metadata.labels.team")(r)
            for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")
        ],
        before=[[None]] * 3,
        after=[["training"]] * 3,
    ),
    Case(
        path="monitoring.rules.runbooks",
        value="https://wiki.example/deltashard",
        look=lambda r: alert("DeltashardSavesFailing", "annotations")(r)["runbook_url"],
        before=VALUES["monitoring"]["rules"]["runbooks"] + "/SavesFailing.md",
        after="https://wiki.example/deltashard/SavesFailing.md",
    ),
    Case(
        path="monitoring.rules.alerts",
        value={"DeltashardSavesFailing": {"for": "30m", "severity": "page"}},
        look=lambda r: (
            alert("DeltashardSavesFailing", "for")(r),
            alert("DeltashardSavesFailing", "labels")(r),
            alert("DeltashardControllerDown", "for")(r),
        ),
        before=("10m", {"severity": "critical"}, "10m"),
        after=("30m", {"severity": "page"}, "10m"),
    ),
    *(
        Case(
            path=f"monitoring.rules.{path}",
            value=7,
            look=lambda r, name=name, text=text: text in alert(name)(r),
            before=False,
            after=True,
        )
        for path, name, text in (
            ("staleIntervals", "DeltashardCheckpointStale", "> 7 * deltashard_run_interval_seconds"),
            ("certificateDays", "DeltashardCertificateNearExpiry", "< 7 * 86400"),
        )
    ),
    Case(
        path="test.resources",
        value=SMALL,
        look=lambda r: chart_test_pod(r)["spec"]["containers"][0]["resources"],
        before=VALUES["test"]["resources"],
        after=merged(VALUES["test"]["resources"], SMALL),
    ),
]


def needed(path: str) -> dict[str, Any]:
    """Values without which the one shows nowhere; what says whether there is something needs none of the kind."""
    given = next((values for begins, values in NEEDED.items() if path.startswith(begins)), ())
    return merged(*(nested(*each) for each in given if each[0] != path))


def test_every_value_has_a_case() -> None:
    """And no case is for a value that is gone."""
    assert sorted([*(case.path for case in CASES), *SHOWN, *SWITCHED]) == sorted(leaves(VALUES))


@pytest.mark.parametrize("path", SHOWN)
def test_a_value_shows(path: str) -> None:
    """At its place, and the default there is the documented one."""
    value, place = SHOWN[path]
    given, look, begun = needed(path), at(place), default(path)
    before, after = look(render(given)), look(render(merged(given, nested(path, value))))
    assert not any(holds(shown, value) for shown in before)
    assert begun in ("", 0, [], {}) or all(holds(shown, begun) for shown in before)
    wanted = merged(begun, value) if isinstance(value, dict) else value
    assert after
    assert all(holds(shown, wanted) for shown in after), (after, wanted)


@pytest.mark.parametrize("path", SWITCHED)
def test_a_switch_takes_away_what_it_names(path: str) -> None:
    """Or brings it; nothing else of the kind is there without."""
    kind, _, name = SWITCHED[path].partition("/")
    named = {path.replace("create", "name"): "mine"} if path.endswith("create") else {}
    given = merged(needed(path), *(nested(*each) for each in named.items()))
    there = [len(render(merged(given, nested(path, on))).all(kind, name or None)) for on in (False, True)]
    if named:
        there[1] = len(render(needed(path)).all(kind, name))
    assert there[0] == 0
    assert there[1] > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_a_value_shows_in_its_own_way(case: Case) -> None:
    """Where its comment says, and the default there is the documented one."""
    given = merged(needed(case.path), *(nested(*each) for each in case.given))
    before, after = render(given), render(merged(given, nested(case.path, case.value)))
    assert before.documents != after.documents
    assert case.look(before) == case.before
    assert case.look(after) == case.after


@pytest.mark.parametrize(("replicas", "strategy"), [(1, "Recreate"), (2, "RollingUpdate")])
def test_an_upgrade_waits_for_a_lone_controller(replicas: int, strategy: str) -> None:
    """Helm counts what may be unavailable as ready, and one of one would be all."""
    rendering = render({"controller": {"replicas": replicas}})
    assert at("Deployment/deltashard-controller spec.strategy.type")(rendering) == [strategy]


def test_templates_are_all_seen() -> None:
    """Every template makes something for some of the values of these tests; hooks of the uninstall, on a cluster only."""
    seen: set[str] = set()
    more = (("extraObjects", [OBJECT]),)
    for given in (more, POLICIES, CERT_MANAGER, EXISTING, (*MONITORS, *RULES), DASHBOARD):
        seen |= render(merged(*(nested(*each) for each in given))).sources
    written = {
        str(path.relative_to(CHART)) for path in (CHART / "templates").rglob("*") if path.suffix == ".yaml"
    }
    assert seen == written - {"templates/webhook/uninstall.yaml"}
