"""What tests of the controller have in common: the API as an administrator, and a namespace of a test's own in it."""

from __future__ import annotations

import pytest

from tests.support.operator.controller_process import NamespaceObjects
from tests.support.server.apiserver import Rest


@pytest.fixture
def cluster(http: Rest) -> NamespaceObjects:
    return NamespaceObjects.make(http)
