"""Fixtures for tests of the controller: the API as an administrator, and a separate namespace for each test."""

from __future__ import annotations

import pytest

from tests.support.operator.controller_process import NamespaceObjects
from tests.support.server.apiserver import Rest


@pytest.fixture
def cluster(http: Rest) -> NamespaceObjects:
    return NamespaceObjects.make(http)
