"""Helm as a user runs it: the chart rendered to documents, and releases on a real API server.

`timeout_s` is for an idle machine: the actual limit may be longer.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.machine import limit_s
from tests.support.server.minio_server import ROOT
from tests.support.tool import require_tool

CHART = ROOT / "charts" / "deltashard"
NAMESPACE = "deltashard-system"
RELEASE = "deltashard"
VERSION = "1.34.4"
"""The Kubernetes version of a rendering without a cluster."""
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
"""A placeholder that the chart accepts as a certificate."""
SOURCE = re.compile(r"^# Source: deltashard/(\S+)$", re.MULTILINE)

Document = dict[str, Any]


class HelmError(Exception):
    """Helm ended with an error; its text is what the user reads."""


def run(*arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 180) -> str:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(require_tool("helm")), *map(str, arguments)],
            check=False,
            capture_output=True,
            text=True,
            timeout=limit_s(timeout_s),
            env={**os.environ, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home, "HELM_DATA_HOME": home}
            | dict(env or {}),
        )
    if done.returncode:
        raise HelmError(done.stderr.strip())
    return done.stdout


@dataclass(frozen=True)
class Rendering:
    """The chart's objects for some values."""

    documents: tuple[Document, ...]
    sources: frozenset[str]
    """Templates with output."""

    def find(self, kind: str, name: str | None = None, *, hook: bool = False) -> Document:
        """Return the object of a kind and name; hooks are included only on request."""
        found = self.all(kind, name, hook=hook)
        assert len(found) == 1, (kind, name, [(d["kind"], d["metadata"]["name"]) for d in self.documents])
        return found[0]

    def all(self, kind: str, name: str | None = None, *, hook: bool = False) -> list[Document]:
        return [
            document
            for document in self.documents
            if document["kind"] == kind
            and name in {None, document["metadata"]["name"]}
            and hook == is_hook(document)
        ]


def is_hook(document: Document) -> bool:
    """Return whether Helm handles an object outside of the release."""
    return "helm.sh/hook" in document["metadata"].get("annotations", {})


def render(
    values: Mapping[str, Any] | None = None, *, namespace: str = NAMESPACE, version: str = VERSION
) -> Rendering:
    """Run `helm template` with these values over the chart's; return mutable objects, or raise `HelmError`."""
    return copy.deepcopy(_render(json.dumps(values or {}, sort_keys=True), namespace, version))


@cache
def _render(values: str, namespace: str, version: str) -> Rendering:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        text = run(
            *("template", RELEASE, CHART, "--namespace", namespace, "--kube-version", version),
            *("--values", file.name),
        )
    documents = tuple(document for document in yaml.safe_load_all(text) if document)
    return Rendering(documents, frozenset(SOURCE.findall(text)))


@dataclass
class Release:
    """A release on a real API server, by a kubeconfig."""

    kubeconfig: Path
    directory: Path
    name: str = RELEASE
    namespace: str = NAMESPACE
    _written: int = field(default=0, init=False)

    def __call__(self, *arguments: str | Path) -> str:
        return run(*arguments, "--kubeconfig", self.kubeconfig, "--namespace", self.namespace)

    def _values(self, values: Mapping[str, Any] | None) -> Path:
        self._written += 1
        path = self.directory / f"values-{self._written}.yaml"
        path.write_text(json.dumps(values or {}))
        return path

    def install(self, values: Mapping[str, Any] | None = None, *flags: str) -> str:
        return self(
            *("install", self.name, CHART, "--create-namespace", "--values", self._values(values)), *flags
        )

    def upgrade(self, values: Mapping[str, Any] | None = None, *flags: str) -> str:
        return self("upgrade", self.name, CHART, "--reset-values", "--values", self._values(values), *flags)

    def uninstall(self, *flags: str) -> str:
        return self("uninstall", self.name, *flags)
