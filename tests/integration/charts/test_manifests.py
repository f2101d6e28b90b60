"""A real API server accepts every object of the chart without unknown fields and under PodSecurity `restricted`.

Third-party custom resources have their own definitions, see `crds/README.md`.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from deltashard_operator import chart_test, controller_main, main
from deltashard_operator.main import options_of

from tests.support.eventually import eventually
from tests.support.helm import CERTIFICATE, NAMESPACE, Document, render
from tests.support.server.apiserver import Reply, Rest, collection
from tests.support.server.minio_server import ROOT

MONITOR = {
    "labels": {"team": "a"},
    "metricRelabelings": [{"action": "drop", "regex": "go_.*", "sourceLabels": ["__name__"]}],
}
MONITORING = {
    "podMonitor": {"enabled": True, **MONITOR, "sampleLimit": 500, "podTargetLabels": ["team"]},
    "serviceMonitor": {"enabled": True, **MONITOR},
    "rules": {
        "enabled": True,
        "alertLabels": {"team": "a"},
        "alerts": {"DeltashardSavesFailing": {"for": "1h"}},
    },
    "dashboard": {"enabled": True, "annotations": {"folder": "Training"}},
}
TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
TERM = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}
PLACED = {
    "nodeSelector": {"pool": "system"},
    "tolerations": [TOLERATION],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}},
    "priorityClassName": "system-cluster-critical",
    "podLabels": {"team": "training"},
    "podAnnotations": {"team": "training"},
    "serviceAccount": {"annotations": {"team": "training"}},
    "extraArgs": ["--log-level=debug"],
    "extraEnv": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "commonLabels": {"team": "training"},
        "imagePullSecrets": ["pull"],
        "defaultPolicy": {"store": {"url": "s3://bucket/prefix", "secretRef": {"name": "store"}}},
        "webhook": {
            **PLACED,
            "timeoutSeconds": 10,
            "namespaceSelector": {
                "matchLabels": {"team": "a"},
                "matchExpressions": [{"key": "b", "operator": "Exists"}],
            },
            "strategy": {"type": "Recreate"},
        },
        "controller": {**PLACED, "replicas": 2},
        "global": {"imageRegistry": "registry.example:5000", "imagePullSecrets": ["more"]},
        "podSecurityContext": {"fsGroupChangePolicy": "OnRootMismatch"},
        "securityContext": {"privileged": False},
        "service": {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv4"]},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "default"}}
        ],
        "networkPolicies": {"enabled": True, "metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]},
        "monitoring": MONITORING,
    },
    "cert-manager": {"certificates": {"mode": "cert-manager"}},
    "an issuer of yours": {
        "certificates": {
            "mode": "cert-manager",
            "certManager": {"issuerRef": {"name": "company", "kind": "ClusterIssuer"}},
        }
    },
    "certificates of yours": {
        "certificates": {"mode": "existing", "existing": {"webhookCa": CERTIFICATE, "fleetCa": CERTIFICATE}}
    },
    "no user": {"runAsUser": None},
    "on the nodes' network": {"webhook": {"hostNetwork": True, "port": 10250, "metricsPort": 10300}},
    "some namespaces": {"watchNamespaces": ["default", "kube-public"], "monitoring": MONITORING},
}


@pytest.fixture(scope="module")
def prepared(http: Rest) -> Rest:
    """The API server has the third-party definitions and the release's namespace, which enforces `restricted`."""
    root = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    folder = Path(__file__).parent / "crds"
    for path in sorted(folder.glob("*.json")):
        definition = json.loads(path.read_text(encoding="utf-8"))
        assert http("POST", root, definition).status == 201, path
        spec = definition["spec"]
        place = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        eventually(lambda place=place: http("GET", place).status == 200, what=place)
    http.namespace(NAMESPACE, {"pod-security.kubernetes.io/enforce": "restricted"})
    rendering = render()
    for account in [*rendering.all("ServiceAccount"), *rendering.all("ServiceAccount", hook=True)]:
        assert dry_run_create(http, account, dry_run=False).status == 201
    return http


def dry_run_create(http: Rest, document: Document, *, dry_run: bool = True) -> Reply:
    path = collection(document, document["metadata"].get("namespace", ""))
    return http("POST", f"{path}?fieldValidation=Strict", document, dry_run=dry_run)


@pytest.mark.parametrize("name", VALUES)
def test_api_server_accepts_manifests(prepared: Rest, name: str) -> None:
    rendering = render(VALUES[name])
    for document in rendering.documents:
        if document["kind"] == "ServiceAccount":
            metadata = {
                **document["metadata"],
                "name": "another",
            }  # pods need the objects that exist in the cluster
            document = {**document, "metadata": metadata}  # noqa: PLW2901
        reply = dry_run_create(prepared, document)
        assert reply.status == 201, (document["kind"], document["metadata"]["name"], reply.document)
        spec = document.get("spec", {}).get("template", {}).get("spec", {})
        if spec.get("hostNetwork"):  # NOTES.txt requires that the namespace allows this
            assert "host namespaces (hostNetwork=true)" in reply.warnings.pop()
        assert reply.warnings == [], (document["kind"], document["metadata"]["name"])


@pytest.mark.parametrize("name", ["defaults", "everything", "certificates of yours"])
def test_pods_are_restricted(prepared: Rest, name: str) -> None:
    for deployment in render(VALUES[name]).all("Deployment"):
        template = deployment["spec"]["template"]
        template["spec"].pop("priorityClassName", None)  # names a class that only some clusters have
        metadata = {**template["metadata"], "name": "pod", "namespace": NAMESPACE}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        reply = dry_run_create(prepared, document)
        assert reply.status == 201, reply.document
        container = reply.document["spec"]["containers"][0]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_selectors_match_their_deployment_only() -> None:
    """Services, budgets, spread and policies select the pods of their own Deployment only."""
    rendering = render(VALUES["everything"])
    labels = {
        deployment["metadata"]["name"]: deployment["spec"]["template"]["metadata"]["labels"]
        for deployment in rendering.all("Deployment")
    }

    def selected(selector: dict[str, str]) -> list[str]:
        return [name for name, has in labels.items() if selector.items() <= has.items()]

    webhook, controller = ["deltashard-webhook"], ["deltashard-controller"]
    assert selected(rendering.find("Service", "deltashard-webhook")["spec"]["selector"]) == webhook
    assert selected(rendering.find("Service", "deltashard-fleet")["spec"]["selector"]) == controller
    budgets = rendering.all("PodDisruptionBudget")
    assert [selected(each["spec"]["selector"]["matchLabels"]) for each in budgets] == [webhook, controller]
    for name, owners in (("webhook", webhook), ("controller", controller), ("test", [])):
        policy = rendering.find("NetworkPolicy", f"deltashard-{name}")
        assert selected(policy["spec"]["podSelector"]["matchLabels"]) == owners
    for deployment in rendering.all("Deployment"):
        name = deployment["metadata"]["name"]
        assert selected(deployment["spec"]["selector"]["matchLabels"]) == [name]
        for each in deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert selected(each["labelSelector"]["matchLabels"]) == [name]


@pytest.mark.parametrize("name", VALUES)
def test_flags_exist_in_programs(name: str) -> None:
    """Programs accept the flags that the chart passes. Paths are in mounted volumes, and scripts are in the package."""
    rendering = render(VALUES[name])
    specs = [each["spec"]["template"]["spec"] for each in rendering.all("Deployment")]
    specs.append(rendering.find("Pod", "deltashard-test", hook=True)["spec"])
    kinds = {each.PROGRAM: each.Options for each in (main, controller_main, chart_test)}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    seen = set()
    for spec in specs:
        (container,) = spec["containers"]
        (program,) = container["command"]
        assert program in scripts
        options: Any = options_of(kinds[program], program, container["args"])
        seen.add(program)
        mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == {
            volume["name"] for volume in spec.get("volumes", [])
        }
        for field in ("certificate_dir", "default_policy", "fleet_ca"):
            path = getattr(options, field, None)
            if path is None or getattr(options, "certificates", "") == "builtin":
                continue
            assert str(path) in mounts or str(path.parent) in mounts, (program, field)
    assert seen == set(kinds)
