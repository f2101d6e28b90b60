"""The command line within the process of a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from deltashard_cli.main import main

Cli = Callable[..., tuple[int, str]]
"""Of arguments: (exit code, stdout and stderr)."""


def running(capsys: pytest.CaptureFixture[str], entry: Callable[[list[str]], object] = main) -> Cli:
    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            entry([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, shown.out + shown.err

    return run
