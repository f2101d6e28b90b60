"""`cp -c` that was cut short, called again when the source has moved: it goes on with what was begun, or says what to call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.restore.checkpoint_reader import read_checkpoint
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.written_run import WrittenRun
from tests.support.command_line import Cli

RUN = "run-1"


class Cut(Exception):
    """The process ended here."""


@pytest.fixture
def written(file_url: str, tmp_path: Path) -> WrittenRun:
    """Slots 2 and 3; 3 is pinned best."""
    made = WrittenRun(open_store(file_url), RUN, tmp_path)
    first = made.save(step=100, directive="steps")
    made.save(made.train(), step=200, covers=first, directive="steps", pins=("best",))
    return made


def cut_short(cli: Cli, monkeypatch: pytest.MonkeyPatch, url: str, *which: str, entries: int) -> None:
    """A copy to `new` of which only so many log entries are put."""
    create, left = FileStore.put_if_absent, [entries]

    def put(self: FileStore, key: str, data: bytes) -> None:
        if key.startswith("new/log/"):
            if not left[0]:
                raise Cut
            left[0] -= 1
        create(self, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put_if_absent", put)
        assert cli("cp", f"{url}/{RUN}", url, "--to-run", "new", *which)[0] == 4


def answer(cli: Cli, url: str, *which: str, code: int = 0) -> Any:
    found, text = cli("cp", f"{url}/{RUN}", url, "--to-run", "new", *which, "--json")
    assert found == code, text
    return json.JSONDecoder().raw_decode(text)[0]


@pytest.mark.parametrize("entries", [1, 2, 3])
@pytest.mark.parametrize("which", ["latest", "pin:best"])
@pytest.mark.parametrize("compacted", [False, True])
def test_the_second_call_finishes_what_was_begun(
    cli: Cli,
    file_url: str,
    written: WrittenRun,
    monkeypatch: pytest.MonkeyPatch,
    entries: int,
    which: str,
    compacted: bool,
) -> None:
    if compacted:
        assert cli("compact", f"{file_url}/{RUN}", "-c", "3")[0] == 0
    cut_short(cli, monkeypatch, file_url, "-c", which, entries=entries)
    written.save(step=300, directive="steps", pins=("best",))
    newest = written.save(written.train(), step=400, covers=3, directive="steps", pins=("best",))
    done = answer(cli, file_url, "-c", which)
    assert (done["copied"]["source_seq"], done["copied"]["step"]) == (3, 200)
    assert (done["newer_at_source"], done["verified"]) == (1, True)
    found, wanted = read_checkpoint(written.store, "new"), read_checkpoint(written.store, RUN, "seq:3")
    assert all(
        table.weights.tobytes() == wanted.tables[name].weights.tobytes()
        for name, table in found.tables.items()
    )
    # It is finished, and said to be of an older checkpoint; what was named is copied under another name.
    assert answer(cli, file_url, "-c", which, code=1)["copied"]["entries"] == 0
    code, text = cli("cp", f"{file_url}/{RUN}", file_url, "--to-run", "new", "-c", which)
    assert code == 1
    assert f"of checkpoint 3, and {which} is {newest} (step 400) by now" in text


def test_another_call_than_the_one_that_was_cut_short_is_told_what_to_call(
    cli: Cli, file_url: str, written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(cli, monkeypatch, file_url, "-c", "3", entries=2)
    error = answer(cli, file_url, "-c", "2", code=2)["error"]
    assert "a copy of checkpoint 3 was begun" in error["what"]
    assert "-c 3 goes on with it" in error["remedy"]
    assert "`deltashard rm`" in error["remedy"]
    error = answer(cli, file_url, code=2)["error"]
    assert "cut short" in error["what"]
    assert "as before" in error["remedy"]
    # The source let it go: nobody can go on with it.
    written.save(step=300, directive="steps")
    written.save(step=400, directive="steps")
    assert cli("unpin", f"{file_url}/{RUN}", "best")[0] == 0
    assert cli("retire", f"{file_url}/{RUN}", "-c", "2", "-c", "3")[0] == 0
    error = answer(cli, file_url, "-c", "latest", code=2)["error"]
    assert "cut short" in error["what"]
    assert "`deltashard rm`" in error["remedy"]
    assert cli("rm", f"{file_url}/new", "--yes")[0] == 0
    assert answer(cli, file_url, "-c", "latest")["copied"]["step"] == 400


def test_a_whole_copy_that_was_cut_short_is_no_copy_of_one_checkpoint(
    cli: Cli, file_url: str, written: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(cli, monkeypatch, file_url, entries=2)
    error = answer(cli, file_url, "-c", "latest", code=2)["error"]
    assert "cut short" in error["what"]
    assert "as before" in error["remedy"]
    assert answer(cli, file_url)["copied"]["step"] == 200
