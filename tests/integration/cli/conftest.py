"""What tests of commands have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Cli, running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the entry point; (exit code, stdout and stderr)."""
    return running(capsys)


@pytest.fixture(params=["file", "minio"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store, empty."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    found = request.getfixturevalue("minio_url")
    assert isinstance(found, str)
    return found


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"
