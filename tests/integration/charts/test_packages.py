"""The chart as others get it: a package in a registry, and a Kustomize base; both are the chart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.charts.helm import CHART, NAMESPACE, RELEASE, VERSION, render, run
from tests.support.eventually import eventually
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.registry_server import RegistryServer
from tests.support.tool import ROOT, built
from tools import kustomize

BASE = ROOT / "kustomize" / "base"
PAGE = (ROOT / "docs" / "kubernetes" / "kustomize.md").read_text(encoding="utf-8")
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/deltashard-webhook"
Document = dict[str, Any]


def kubectl(*words: str | Path) -> str:
    done = subprocess.run(
        [str(built("kubectl")), *map(str, words)], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def named(documents: list[Document]) -> dict[tuple[str, str, str], Document]:
    """Objects by kind, namespace and name."""
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each
        for each in documents
    }


def built_by_kustomize(folder: Path) -> list[Document]:
    return [each for each in yaml.safe_load_all(kubectl("kustomize", folder)) if each]


def test_a_registry_hands_out_the_chart_that_was_pushed(tmp_path: Path) -> None:
    """By its name and version, as `helm install oci://...` asks for it."""
    run("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    assert package.name == f"deltashard-{version}.tgz"
    with RegistryServer() as registry:
        place = f"oci://{registry.address}/charts"
        run("push", package, place, "--plain-http")
        text = run(
            *("template", RELEASE, f"{place}/deltashard", "--version", version, "--plain-http"),
            *("--namespace", NAMESPACE, "--kube-version", VERSION),
        )
    pulled = [each for each in yaml.safe_load_all(text) if each]
    assert named(pulled) == named(list(render().documents))


def test_the_kustomize_base_is_fresh() -> None:
    """`tools/kustomize.py` makes it; here it only compares."""
    command = [sys.executable, str(ROOT / "tools" / "kustomize.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_base_would_be_seen() -> None:
    """One changed field is another file."""
    documents = list(render(version=f"{kustomize.KUBERNETES}").documents)
    made = kustomize.files(documents)
    assert set(made) == {path.name for path in BASE.iterdir()}
    documents[0] = {**documents[0], "spec": {"changed": True}}
    assert kustomize.files(documents) != made


def test_the_base_has_what_the_chart_makes_and_nothing_of_helm_s() -> None:
    """Every object but the hooks, and a namespace for them."""
    found = named(built_by_kustomize(BASE))
    chart = [
        each
        for each in render(version=kustomize.KUBERNETES).documents
        if "helm.sh/hook" not in each["metadata"].get("annotations", {})
    ]
    assert set(found) == {*named(chart), ("Namespace", "", NAMESPACE)}
    assert "helm" not in "".join(path.read_text().lower() for path in BASE.iterdir())
    for key, document in named(chart).items():
        assert found[key] == kustomize.bare(document), key


def test_the_page_s_overlay(tmp_path: Path) -> None:
    """Images and policy are the overlay's, all else is the base's."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    folder = tmp_path / "overlays" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "kustomize").symlink_to(ROOT / "kustomize")
    (folder / "kustomization.yaml").write_text(text)
    found, base = named(built_by_kustomize(folder)), named(built_by_kustomize(BASE))
    assert set(found) == set(base)
    changed = {key for key in base if found[key] != base[key]}
    names = ("deltashard-webhook", "deltashard-controller")
    deployments = {("Deployment", NAMESPACE, name) for name in names}
    policy = ("ConfigMap", NAMESPACE, "deltashard-default-policy")
    assert changed == {*deployments, policy}
    for key in deployments:
        (container,) = found[key]["spec"]["template"]["spec"]["containers"]
        assert container["image"].startswith("registry.example/deltashard-operator:")
    said = yaml.safe_load(found[policy]["data"]["policy.yaml"])
    theirs = yaml.safe_load(base[policy]["data"]["policy.yaml"])
    assert set(theirs) <= set(said), "what the base's policy has, the overlay's has too"
    assert said["fleet"] == theirs["fleet"]


@pytest.mark.timeout(600)
def test_applied_twice_on_a_real_cluster(apiserver: ApiServer, http: Rest) -> None:
    """What the controller wrote in between stays."""
    config = f"--kubeconfig={apiserver.kubeconfig}"
    kubectl("apply", "-k", BASE, config)
    webhooks = [
        {"name": each["name"], "clientConfig": {"caBundle": "YQ=="}}
        for each in http("GET", CONFIGURATION).document["webhooks"]
    ]
    strategic = "application/strategic-merge-patch+json"
    assert http("PATCH", CONFIGURATION, {"webhooks": webhooks}, content=strategic).status == 200
    said = kubectl("apply", "-k", BASE, config)
    assert "created" not in said
    assert {each["clientConfig"]["caBundle"] for each in http("GET", CONFIGURATION).document["webhooks"]} == {
        "YQ=="
    }
    runs = "/apis/deltashard.io/v1alpha1/checkpointruns"
    eventually(lambda: http("GET", runs).status == 200, what="the definitions")
