"""A real API server that knows the chart's custom resources."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.support.eventually import eventually
from tests.support.server.apiserver import ApiServer
from tests.support.server.minio_server import ROOT

GROUP = "apiextensions.k8s.io/v1"


DEFINITIONS = sorted((ROOT / "charts/deltashard/templates/crds").glob("*.yaml"))
"""The chart's own custom resources."""


def install_definitions(server: ApiServer) -> None:
    """Make the custom resources and wait until they are served."""
    with server.http() as http:
        for path in DEFINITIONS:
            made = http("POST", f"/apis/{GROUP}/customresourcedefinitions", yaml.safe_load(path.read_text()))
            assert made.status == 201, made.document
            spec = made.document["spec"]
            place = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            eventually(lambda place=place: http("GET", place).status == 200, what=place)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """A real API server that knows our resources."""
    server = ApiServer(folder)
    server.start()
    try:
        install_definitions(server)
        yield server
    finally:
        server.stop()
