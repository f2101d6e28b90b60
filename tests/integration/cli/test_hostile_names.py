"""Commands never print text from a store raw to a terminal: runs with hostile names, healthy and damaged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from deltashard_checkpoint.stores.url import open_store
from deltashard_cli import main

from tests.support.checkpoint import written_run
from tests.support.checkpoint.written_run import WrittenRun
from tests.support.command_line import Cli

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b\r\b\x7f[red]x[/red]:smile:\nerror: FORGED\ud800"
"""A terminal title, a cleared screen, C1, bidi, erased characters, rich's markup, a forged line, invalid UTF-8."""
ENCODABLE = EVIL[:-1]

ARGUMENTS = {
    "ls": ["{url}/team/run"],
    "inspect": ["{url}", "--all"],
    "log": ["{url}", "-n", "0"],
    "plan": ["{url}", "--mtbf", "1h"],
    "verify": ["{url}", "--deep"],
    "diff": ["{url}", "2", "3"],
    "scan": ["{url}"],
    "repair": ["{url}/team/run", "--dry-run"],
    "restore": ["{url}", "{out}/restored"],
    "export": ["{url}", "{out}/file.safetensors"],
    "import": ["{url}", "{out}", "--run", "other"],
    "pin": ["{url}", "good", "-c", "2"],
    "unpin": ["{url}", ENCODABLE],
    "retire": ["{url}/team/run", "-c", "2"],
    "rewind": ["{url}/team/run", "-c", f"pin:{ENCODABLE}", "--ended"],
    "cp": ["{url}", "file://{out}/copy"],
    "rm": ["{url}/team/run", "--yes", "--ended"],
    "reclaim": ["{url}", "--run", "team/run", "--workload", ENCODABLE],
    "gc": ["{url}", "--dry-run", "-v", "--keep-last", "1"],
    "compact": ["{url}", "-c", "2"],
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the stores `sound` and `damaged` with the run team/run, in which every name is hostile."""
    stores = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(written_run, "ITEMS", replace(written_run.ITEMS, fqn=ENCODABLE))
        patch.setattr(written_run, "HALF", replace(written_run.HALF, fqn=f"{ENCODABLE}.half"))
        store = open_store(f"file://{stores}/sound")
        made = WrittenRun(store, "team/run", stores, owner=ENCODABLE, workload=ENCODABLE)
        made.more_blobs = {f"dense/{ENCODABLE}": made.blobs(0)["meta"]}
        hostile = {"pins": (ENCODABLE,), "metadata": {ENCODABLE: ENCODABLE}}
        first = made.save(step=1, **hostile, directive=ENCODABLE)
        made.save(made.train(), step=2, covers=first, **hostile)
        made.close()
    shutil.copytree(stores / "sound", stores / "damaged")
    for pack in (stores / "damaged" / "team" / "run" / "data").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[-80] ^= 1
        pack.write_bytes(data)
    return stores


@pytest.fixture(params=["sound", "damaged"])
def url(request: pytest.FixtureRequest, stores: Path, tmp_path: Path) -> str:
    shutil.copytree(stores / request.param, tmp_path / "store")
    return f"file://{tmp_path}/store"


def test_every_command_is_covered() -> None:
    assert set(ARGUMENTS) == set(main.cli.list_commands(click.Context(main.cli)))


@pytest.mark.parametrize("command", sorted(ARGUMENTS))
def test_control_characters_are_escaped(cli: Cli, command: str, url: str, tmp_path: Path) -> None:
    arguments = [each.format(url=url, out=tmp_path) for each in ARGUMENTS[command]]
    code, text = cli(command, *arguments)
    assert code != main.INTERNAL, text
    assert text.replace("\n", "").isprintable(), repr(text)
    assert not any(line.startswith("error: FORGED") for line in text.splitlines())
    if command in {"ls", "inspect"}:
        assert "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\u202eevil" in text
        assert "[red]x[/red]:smile:\\nerror: FORGED" in text


def test_json_keeps_raw_names(cli: Cli, url: str) -> None:
    _, text = cli("inspect", url, "--json")
    assert text.isascii()
    document, _ = json.JSONDecoder().raw_decode(text)
    assert document["summary"]["pins"] == [ENCODABLE]
