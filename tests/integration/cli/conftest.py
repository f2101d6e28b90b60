"""Fixtures for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Cli, running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs the entry point and returns (exit code, stdout and stderr)."""
    return running(capsys)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"
