"""Fixtures that several folders of integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["file", "minio"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/store"
    found = request.getfixturevalue("minio_url")
    assert isinstance(found, str)
    return found
