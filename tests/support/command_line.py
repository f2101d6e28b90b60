"""The command line within the process of a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from typing import Any

import pytest
from deltashard_cli.main import main

Cli = Callable[..., tuple[int, str]]
"""A function of arguments; returns (exit code, stdout and stderr)."""


def running(capsys: pytest.CaptureFixture[str], entry: Callable[[list[str]], object] = main) -> Cli:
    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            entry([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, shown.out + shown.err

    return run


def run_url(url: str, run: str = "team/run-1") -> str:
    base, question, query = url.partition("?")
    return f"{base.rstrip('/')}/{run}{question}{query}"


def json_output(cli: Cli, *arguments: object, codes: Container[int] = (0,)) -> Any:
    """Return the JSON of a command that must exit with this status; a warning may follow it."""
    code, text = cli(*arguments, "--json")
    assert code in codes, text
    return json.JSONDecoder().raw_decode(text)[0]
