"""A real API server with the chart's custom resources."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.support.eventually import eventually
from tests.support.server.apiserver import ApiServer, Rest
from tests.support.server.minio_server import ROOT

GROUP = "apiextensions.k8s.io/v1"


DEFINITIONS = sorted((ROOT / "charts/deltashard/templates/crds").glob("*.yaml"))
"""The chart's own custom resources."""


def install_definitions(server: ApiServer) -> None:
    """Create the custom resources and wait until they are served."""
    with server.http() as http:
        for path in DEFINITIONS:
            made = http("POST", f"/apis/{GROUP}/customresourcedefinitions", yaml.safe_load(path.read_text()))
            assert made.status == 201, made.document
            spec = made.document["spec"]
            place = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            eventually(lambda place=place: http("GET", place).status == 200, what=place)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder)
    server.start()
    try:
        install_definitions(server)
        yield server
    finally:
        server.stop()


def define(rest: Rest, group: str, version: str, kind: str) -> None:
    """Create a custom resource of any shape."""
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    document = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    assert rest("POST", path, document).status == 201
    place = f"/apis/{group}/{version}/namespaces/default/{plural}"
    eventually(lambda: rest("GET", place).status == 200, what=f"{kind} is served")
