"""Writes kustomize/base from the chart, for who installs without Helm; `--check` fails when it is stale.

What is Helm's own goes: its labels, its hooks (the chart's test, and the order of an uninstall). One file a kind of
thing, so that a reader finds his way and an overlay its target.

    .venv/bin/python tools/kustomize.py [--check]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "deltashard"
BASE = ROOT / "kustomize" / "base"
NAMESPACE = "deltashard-system"
KUBERNETES = "1.30.0"
"""The oldest with all that the chart has: 1.29 has no ValidatingAdmissionPolicies."""
HEAD = "# Written by tools/kustomize.py from charts/deltashard; do not edit.\n"
HELMS = ("helm.sh/", "app.kubernetes.io/managed-by")
FILES = {
    "CustomResourceDefinition": "definitions.yaml",
    "ValidatingAdmissionPolicy": "admission.yaml",
    "ValidatingAdmissionPolicyBinding": "admission.yaml",
    "MutatingWebhookConfiguration": "admission.yaml",
    "ServiceAccount": "rights.yaml",
    "ClusterRole": "rights.yaml",
    "ClusterRoleBinding": "rights.yaml",
    "Role": "rights.yaml",
    "RoleBinding": "rights.yaml",
}
REST = "workloads.yaml"
Document = dict[str, Any]


def bare(document: Document) -> Document:
    """The object without what is Helm's own."""
    metadata = dict(document["metadata"])
    for field in ("labels", "annotations"):
        kept = {key: value for key, value in metadata.get(field, {}).items() if not key.startswith(HELMS)}
        metadata.pop(field, None)
        if kept:
            metadata[field] = kept
    found = {**document, "metadata": metadata}
    template = (document.get("spec") or {}).get("template")
    if template:
        found["spec"] = {**document["spec"], "template": bare(template)}
    return found


def files(documents: Iterable[Document]) -> dict[str, str]:
    """The base's files, by name."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    by_file: dict[str, list[Document]] = {"namespace.yaml": [namespace]}
    for document in documents:
        if "helm.sh/hook" not in document["metadata"].get("annotations", {}):
            by_file.setdefault(FILES.get(document["kind"], REST), []).append(bare(document))
    found = {
        name: HEAD + yaml.safe_dump_all(each, sort_keys=False, width=120) for name, each in by_file.items()
    }
    resources = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(by_file),
    }
    return found | {"kustomization.yaml": HEAD + yaml.safe_dump(resources, sort_keys=False)}


def rendered() -> list[Document]:
    """The chart's objects, as `helm template` gives them."""
    helm = subprocess.run(
        [str(ROOT / "tools" / "build"), "helm"], check=True, capture_output=True, text=True
    ).stdout.strip()
    words = ("template", "deltashard", str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES)
    text = subprocess.run([helm, *words], check=True, capture_output=True, text=True).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    made = files(rendered())
    there = {path.name: path.read_text() for path in BASE.glob("*")} if BASE.is_dir() else {}
    if "--check" in argv:
        stale = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))
        if stale:
            sys.stderr.write(f"kustomize/base is stale ({', '.join(stale)}): run tools/kustomize.py\n")
        return int(bool(stale))
    BASE.mkdir(parents=True, exist_ok=True)
    for name in there.keys() - made.keys():
        (BASE / name).unlink()
    for name, text in made.items():
        (BASE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
