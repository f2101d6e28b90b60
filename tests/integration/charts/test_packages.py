"""The chart as a registry package and as a Kustomize base."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.eventually import eventually
from tests.support.helm import CHART, NAMESPACE, RELEASE, VERSION, is_hook, render, run
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.tool import ROOT, require_tool

PAGE = (ROOT / "docs" / "kubernetes" / "kustomize.md").read_text(encoding="utf-8")
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/deltashard-webhook"
Document = dict[str, Any]


def kubectl(*arguments: str | Path) -> str:
    done = subprocess.run(
        [str(require_tool("kubectl")), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_name(documents: list[Document]) -> dict[tuple[str, str, str], Document]:
    return {
        (each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each
        for each in documents
    }


def built_by_kustomize(folder: Path) -> list[Document]:
    return [each for each in yaml.safe_load_all(kubectl("kustomize", folder)) if each]


def test_package_contains_whole_chart(tmp_path: Path) -> None:
    run("package", CHART, "--destination", tmp_path)
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    package = tmp_path / f"deltashard-{version}.tgz"
    text = run("template", RELEASE, package, "--namespace", NAMESPACE, "--kube-version", VERSION)
    assert by_name([each for each in yaml.safe_load_all(text) if each]) == by_name(list(render().documents))
    with tarfile.open(package) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "values.schema.json", "dashboards/deltashard.json"} <= names


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the first command's rendering and the kustomization of the page's folder."""
    folder = tmp_path_factory.mktemp("kustomize")
    ((*command, name),) = [
        line.replace(" > ", " ").split() for line in PAGE.splitlines() if line.startswith("helm template")
    ]
    at = command.index("charts/deltashard")
    (folder / name).write_text(run(*command[1:at], CHART, *command[at + 1 :]))
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "kustomization.yaml").write_text(text)
    return folder


def test_documented_kustomization_renders_chart(page: Path) -> None:
    """The result has every object except the hooks. The kustomization changes only images and the policy."""
    (version,) = re.findall(r"--kube-version (\S+)", PAGE)
    chart = by_name([each for each in render(version=version).documents if not is_hook(each)])
    found = by_name(built_by_kustomize(page))
    assert set(found) == set(chart)
    changed = {key for key in chart if found[key] != chart[key]}
    names = ("deltashard-webhook", "deltashard-controller")
    deployments = {("Deployment", NAMESPACE, name) for name in names}
    policy = ("ConfigMap", NAMESPACE, "deltashard-default-policy")
    assert changed == {*deployments, policy}
    for key in deployments:
        (container,) = found[key]["spec"]["template"]["spec"]["containers"]
        assert container["image"].startswith("registry.example/deltashard-operator:")
    patched = yaml.safe_load(found[policy]["data"]["policy.yaml"])
    default = yaml.safe_load(chart[policy]["data"]["policy.yaml"])
    assert set(default) <= set(patched), "the patch has every setting of the chart's policy"
    assert patched["fleet"] == default["fleet"]


@pytest.mark.timeout(600)
def test_reapply_keeps_controller_fields(page: Path, apiserver: ApiServer, http: Rest) -> None:
    config = f"--kubeconfig={apiserver.kubeconfig}"
    kubectl("create", "namespace", NAMESPACE, config)
    kubectl("apply", "-k", page, config)
    webhooks = [
        {"name": each["name"], "clientConfig": {"caBundle": "YQ=="}}
        for each in http("GET", CONFIGURATION).document["webhooks"]
    ]
    strategic = "application/strategic-merge-patch+json"
    assert http("PATCH", CONFIGURATION, {"webhooks": webhooks}, content=strategic).status == 200
    again = kubectl("apply", "-k", page, config)
    assert "created" not in again
    assert {each["clientConfig"]["caBundle"] for each in http("GET", CONFIGURATION).document["webhooks"]} == {
        "YQ=="
    }
    runs = "/apis/deltashard.io/v1alpha1/checkpointruns"
    eventually(lambda: http("GET", runs).status == 200, what="the API serves CheckpointRuns")
