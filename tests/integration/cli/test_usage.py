"""Usage errors: text for users, and with --json the document that every other error has."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import click
import pytest
from deltashard_cli import main as command_line
from deltashard_cli.main import EXTRAS, main

from tests.support.command_line import Cli

WRONG = [
    (("cp", "a"), "MissingParameter", "TO", "deltashard cp"),
    (("ls",), "MissingParameter", "URL", "deltashard ls"),
    (("ls", "a", "--no-such"), "NoSuchOption", "--no-such", "deltashard ls"),
    (("no-such-command", "a"), "NoSuchCommand", "no-such-command", "deltashard"),
    (("ls", "a", "b"), "UsageError", "unexpected extra argument", "deltashard ls"),
    (("gc", "a", "--keep-last", "0"), "BadParameter", "--keep-last", "deltashard gc"),
    (("gc", "a", "-v"), "UsageError", "use --dry-run, too", "deltashard gc"),
]


@pytest.mark.parametrize(("arguments", "kind", "message", "command"), WRONG)
def test_usage_error_is_json_document_under_json(
    arguments: tuple[str, ...], kind: str, message: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert ended.value.code == 2
    error = json.loads(shown.out)["error"]
    assert set(error) == {"kind", "what", "where", "remedy", "exit"}
    assert (error["kind"], error["where"], error["exit"]) == (kind, command, 2)
    assert message in error["what"]
    assert error["remedy"] == f"see `{command} --help`"
    assert message in shown.err
    with pytest.raises(SystemExit):
        main([*arguments])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err


def test_extra_commands_are_found_by_entry_points(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points of other packages add commands.

    A command with missing packages names them, and other commands work.
    """
    known = [
        each for each in command_line.entry_points(group=EXTRAS) if each.value.startswith("deltashard_cli")
    ]
    assert {each.name for each in known} == {"plan", "export", "import"}
    found = EntryPoints(
        [
            *known,
            EntryPoint(name="more", value="deltashard_cli.planning.plan_command:plan", group=EXTRAS),
            EntryPoint(name="absent", value="no_such_package.command:absent", group=EXTRAS),
        ]
    )
    monkeypatch.setattr(command_line, "entry_points", found.select)
    code, text = cli("--help")
    assert code == 0
    for name in ("ls", "plan", "export", "import", "more"):
        assert f"  {name} " in text
    assert "`deltashard absent` needs" in text
    assert cli("more", "--bytes", "1GiB")[0] == 0
    code, text = cli("absent", "s3://bucket", "--whatever", "--json")
    assert code == 2
    error = json.loads(text[: text.rindex("}") + 1])["error"]
    assert error["what"] == "`deltashard absent` needs no_such_package, which is not installed"
    assert error["remedy"] == "install it in deltashard's environment"


def test_every_command_is_on_reference_page() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/command-line.md").read_text()
    listed = page.partition("```")[2].partition("```")[0]
    names = {line.split()[1] for line in listed.splitlines() if line.startswith("deltashard ")}
    assert names == set(command_line.cli.list_commands(click.Context(command_line.cli)))
