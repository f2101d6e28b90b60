"""What is called wrongly: to people as ever, and with --json the same document as of every other error."""

from __future__ import annotations

import json

import pytest
from deltashard_cli.main import main

WRONG = [
    (("cp", "a"), "MissingParameter", "TO", "deltashard cp"),
    (("ls",), "MissingParameter", "URL", "deltashard ls"),
    (("ls", "a", "--no-such"), "NoSuchOption", "--no-such", "deltashard ls"),
    (("no-such-command", "a"), "NoSuchCommand", "no-such-command", "deltashard"),
    (("ls", "a", "b"), "UsageError", "unexpected extra argument", "deltashard ls"),
    (("gc", "a", "--keep-last", "0"), "BadParameter", "--keep-last", "deltashard gc"),
    (("gc", "a", "-v"), "UsageError", "say --dry-run, too", "deltashard gc"),
]


@pytest.mark.parametrize(("arguments", "kind", "said", "command"), WRONG)
def test_a_usage_error_is_the_error_document_under_json(
    arguments: tuple[str, ...], kind: str, said: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert ended.value.code == 2
    error = json.loads(shown.out)["error"]
    assert set(error) == {"kind", "what", "where", "remedy", "exit"}
    assert (error["kind"], error["where"], error["exit"]) == (kind, command, 2)
    assert said in error["what"]
    assert error["remedy"] == f"see `{command} --help`"
    assert said in shown.err
    with pytest.raises(SystemExit):
        main([*arguments])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
