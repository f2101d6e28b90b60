"""What tests of commands have in common."""

from __future__ import annotations

import pytest

from tests.support.command_line import Cli, running


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the entry point; (exit code, stdout and stderr)."""
    return running(capsys)
