"""An interrupted copy or removal: `ls` shows its state, commands name the remedy, and `rm` removes the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import seq_of
from deltashard_checkpoint.log.listing import Hint
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.written_run import WrittenRun
from tests.support.command_line import Cli, run_url

RUN, COPY = "team/run-1", "team/copy"


class Cut(Exception):
    """The process ends at this point."""


@pytest.fixture
def store(file_url: str, tmp_path: Path) -> Store:
    store = open_store(file_url)
    written = WrittenRun(store, RUN, tmp_path)
    first = written.save(step=100, directive="steps")
    written.save(written.train(), step=200, covers=first, directive="close")
    written.close()
    # Keys that resemble a run's keys without a run.
    for key in ("other/data/x.csv", "other/data/0/y", "other/log/app.log", "more/log/HINTS"):
        store.put(key, b"1")
    return store


def copied_up_to(store: Store, what: str) -> None:
    """Reduce the copy to the state of an interruption after `what`: its data, its HINT, or a part of its log."""
    for info in list(store.list(f"{COPY}/log/")):
        key = info.key[len(COPY) + 1 :]
        if what == "data" or (seq_of(key) is not None and (what == "HINT" or seq_of(key) == 2)):
            store.delete([info.key])
    if what == "log":
        RunLog(store, COPY).put_hint(Hint(seq=2, whole=False))


def listed(cli: Cli, url: str, *, code: int = 1) -> dict[str, Any]:
    found, text = cli("ls", url, "--json")
    assert found == code, text
    document = json.JSONDecoder().raw_decode(text)[0]
    return {"warning": document.get("warning")} | {one["run"]: one["state"] for one in document["runs"]}


NO_LOG = "`deltashard cp` again if a copy to this name was interrupted; `deltashard scan` lists the saves"


@pytest.mark.parametrize(
    ("what", "state", "remedy"),
    [
        ("data", "no log", NO_LOG),
        ("HINT", "no log", NO_LOG),
        ("log", "half copied", "run `deltashard cp` again"),
    ],
)
def test_partial_copy_is_listed_and_resumable(
    cli: Cli, file_url: str, store: Store, what: str, state: str, remedy: str
) -> None:
    assert listed(cli, file_url, code=0) == {"warning": None, RUN: "ok"}
    assert cli("cp", run_url(file_url, RUN), file_url, "-c", "latest", "--as", COPY)[0] == 0
    copied_up_to(store, what)
    found = listed(cli, file_url)
    assert (found[RUN], found[COPY]) == ("ok", state)
    assert set(found) == {"warning", RUN, COPY}
    assert f"{COPY}: {state}" in found["warning"]
    assert remedy in found["warning"]
    assert state in cli("ls", file_url)[1]
    if state == "half copied":
        code, text = cli("repair", run_url(file_url, COPY))
        assert code == 2, text
        assert remedy in " ".join(text.split()), "repair would turn a partial copy into another run"
    if state == "no log":
        for command in (
            ("ls", run_url(file_url, COPY)),
            ("inspect", file_url, "--run", COPY),
            ("verify", run_url(file_url, COPY)),
        ):
            code, text = cli(*command)
            assert code == 2, text
            assert remedy in " ".join(text.split())
    assert cli("cp", run_url(file_url, RUN), file_url, "-c", "latest", "--as", COPY)[0] == 0
    assert listed(cli, file_url, code=0) == {"warning": None, RUN: "ok", COPY: "ok"}
    copied_up_to(store, what)
    if what != "data":  # the log has entries: another process may have opened the run during the copy
        before = {info.key for info in store.list(f"{COPY}/")}
        code, text = cli("rm", run_url(file_url, COPY), "--yes")
        assert code == 2, text
        assert "use --ended" in " ".join(text.split())
        assert {info.key for info in store.list(f"{COPY}/")} == before
    code, text = cli("rm", run_url(file_url, COPY), "--yes", *(["--ended"] if what != "data" else []))
    assert code == 0, text
    assert listed(cli, file_url, code=0) == {"warning": None, RUN: "ok"}
    assert list(store.list(f"{COPY}/")) == []


@pytest.mark.parametrize("folder", ["/log/", "/data/"])
def test_partial_removal_is_listed_and_removable(
    cli: Cli, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    for run in (RUN, "team/run-2"):
        written = WrittenRun(open_store(file_url), run, tmp_path)
        written.save(step=100, directive="close")
        written.close()
    delete = FileStore.delete

    def take_snapshot(self: FileStore, keys: Iterable[str]) -> None:
        keys = list(keys)
        if any(folder in key for key in keys[1:]):
            delete(self, keys[:1])
            raise Cut
        delete(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "delete", take_snapshot)
        assert cli("rm", run_url(file_url, RUN), "--yes")[0] == 4
    found = listed(cli, file_url)
    assert (found[RUN], found["team/run-2"]) == ("being removed", "ok")
    assert f"{RUN}: being removed: run `deltashard rm` again" in found["warning"]
    code, text = cli("inspect", run_url(file_url, RUN))
    assert code in {2, 3}
    assert "again" in text
    code, text = cli("repair", run_url(file_url, RUN))
    assert code == 2, text
    assert "run `deltashard rm` again" in " ".join(text.split())
    assert cli("rm", file_url, "--run", RUN, "--yes")[0] == 0
    assert listed(cli, file_url, code=0) == {"warning": None, "team/run-2": "ok"}


def test_rm_ignores_folder_that_is_no_run(cli: Cli, file_url: str, store: Store) -> None:
    """A folder with the name of a run's folder is no run."""
    for arguments in (
        (file_url, "--run", "other"),
        (run_url(file_url, "other"),),
        (file_url, "--run", "more"),
    ):
        code, text = cli("rm", *arguments, "--yes", "--ended")
        assert code == 2, text
        assert "no run" in text
    assert len(list(store.list("other/"))) + len(list(store.list("more/"))) == 4
