"""Older builds of this repository on runs of this one, and the other way.

One is from before log entries named folded states, one from before format 2, one from before format 3.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.log.commit_log import LogGap, RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.maintenance import word
from deltashard_checkpoint.maintenance.holder import RunHeld
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.whole_run import run_copy
from deltashard_checkpoint.write.commit import commit_parts

from tests.crash import log_versions
from tests.support.checkpoint.run_builder import TABLE, Run, rows

BEFORE = "174d0ef"
BEFORE_MANY_RANKS = "f8c2522"
BEFORE_WORDS = "f889672"
ROOT = Path(__file__).parents[2]


def build_of(commit: str, tree: Path):
    """A build's packages, from this clone's own history: what runs `log_versions` with them."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "checkpoint", "proto"], capture_output=True, check=False
    )
    assert archive.returncode == 0, (
        f"this test needs commit {commit} of the repository's history (a full clone: `git fetch --unshallow`): "
        f"{archive.stderr.decode()}"
    )
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)

    def run(directory: Path, first_step: int, count: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.crash.log_versions",
                *map(str, (directory, tree, first_step, count)),
            ],
            env={**os.environ, "PYTHONPATH": f"{tree / 'checkpoint'}{os.pathsep}{tree / 'proto'}"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The older build."""
    run = build_of(BEFORE, tmp_path_factory.mktemp("older"))

    def write(directory: Path, first_step: int, count: int) -> dict:
        done = run(directory, first_step, count)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return write


@pytest.mark.parametrize("newer_first", [True, False])
def test_two_builds_take_turns_on_a_run(older, tmp_path, newer_first):
    """Each resumes from the other's newest commit and loses nothing; folded states and what one voids are in the log."""
    first, second = (log_versions.write, older) if newer_first else (older, log_versions.write)
    found = first(tmp_path, 100, 12)
    assert found["steps"] == list(range(100, 112))
    found = second(tmp_path, 200, 12)
    assert (found["resumed"], found["voided"], found["stopped"]) == (111, None, None)
    found = first(tmp_path, 300, 3)
    assert (found["resumed"], found["voided"], found["stopped"]) == (211, None, None)
    expected = [*range(100, 112), *range(200, 212), *range(300, 303)]
    assert found["steps"] == expected
    # The newest entry rots: whoever comes next makes it void, and the other one follows.
    (tmp_path / "job" / entry_key(found["tip"])).write_bytes(b"rotten")
    found = first(tmp_path, 400, 2)
    assert (found["resumed"], found["voided"][0]) == (301, found["tip"] - 3)
    found = second(tmp_path, 500, 2)
    assert (found["resumed"], found["voided"], found["stopped"]) == (401, None, None)
    assert found["steps"] == [*expected[:-1], 400, 401, 500, 501]
    assert list(RunLog(FileStore(tmp_path), "job").refresh().checkpoints)[-1] == found["tip"]


@pytest.mark.parametrize("commit", [BEFORE_MANY_RANKS, BEFORE])
@pytest.mark.parametrize("ending", ["attempt", "checkpoint"])
def test_a_build_from_before_format_2_refuses_a_run_of_many_ranks_and_changes_nothing(
    tmp_path, commit, ending
):
    """It asks for an upgrade, opens no attempt and makes nothing void, whichever entry it comes to first."""
    log_versions.write(tmp_path / "store", 100, 2)
    run = Run(FileStore(tmp_path / "store"))
    halves = [rows(0, 4), rows(4, 8)]
    layout = Layout.of(
        2, {TABLE.fqn: (TABLE.rows, TABLE.columns)}, dict(enumerate([half] for half in halves))
    )
    attempt = run.open(world_size=2, layout=layout.data).attempt
    if ending == "checkpoint":
        commit_parts(
            run.log, attempt=attempt, cut=1, step=200, world_size=2, layout=layout.digest, deadline_s=60.0,
            reports=[run.report(attempt, 1, rank=rank, boxes=[half]) for rank, half in enumerate(halves)],
        )  # fmt: skip
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    (tmp_path / "tree").mkdir()
    done = build_of(commit, tmp_path / "tree")(tmp_path / "store", 300, 1)
    assert done.returncode != 0
    assert "LogStopped" in done.stderr
    assert "upgrade deltashard" in done.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert after == before
    assert run.reader().refresh().stopped is None


@pytest.mark.parametrize("commit", [BEFORE_WORDS, BEFORE_MANY_RANKS, BEFORE])
@pytest.mark.parametrize("said", ["pin", "rewind"])
def test_a_build_from_before_format_3_refuses_what_a_person_said_and_changes_nothing(tmp_path, commit, said):
    """One that passed over a pin would retire what it keeps, and over a rewind restore what was left behind."""
    log_versions.write(tmp_path / "store", 100, 3)
    log = RunLog(FileStore(tmp_path / "store"), "job")
    if said == "pin":
        word.pin(log, "paper", "step:100")
    else:
        word.rewind(log, "step:100", ended=True)
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    (tmp_path / "tree").mkdir()
    done = build_of(commit, tmp_path / "tree")(tmp_path / "store", 300, 1)
    assert done.returncode != 0
    assert "LogStopped" in done.stderr
    assert "upgrade deltashard" in done.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert after == before
    found = log_versions.write(tmp_path / "store", 300, 1)
    assert found["resumed"] == (102 if said == "pin" else 100)


def test_beside_a_trainer_of_an_older_build_nothing_is_said_that_it_could_not_read(tmp_path):
    """It would save no more, and could be told only by a restart. Once a newer one has the run, or it ended, it may be."""
    (tmp_path / "tree").mkdir()
    older = build_of(BEFORE_WORDS, tmp_path / "tree")
    assert older(tmp_path / "store", 100, 2).returncode == 0
    log = RunLog(FileStore(tmp_path / "store"), "job")
    before = log.refresh()
    newest = before.newest()
    # Its commits do not say what asked for them, so nothing tells that it has ended.
    with pytest.raises(RunHeld, match="older version"):
        word.pin(log, "paper", f"seq:{newest.seq}")
    assert RunLog(log.store, "job").refresh() == before
    assert older(tmp_path / "store", 200, 2).returncode == 0
    log_versions.write(tmp_path / "store", 300, 1)
    assert word.pin(log, "paper", f"seq:{newest.seq}") is not None


class Dying(FileStore):
    """Takes so many entries of a log, and nothing after that."""

    def __init__(self, directory: Path, entries: int) -> None:
        super().__init__(directory)
        self.left = entries
        self.lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> None:
        if "/log/" in key:
            with self.lock:
                if not self.left:
                    raise ConnectionError(key)
                self.left -= 1
        super().put_if_absent(key, data)


@pytest.mark.parametrize("commit", [BEFORE_WORDS, BEFORE_MANY_RANKS, BEFORE])
def test_an_older_build_takes_no_half_made_copy_for_a_run(tmp_path, commit):
    """The oldest believe a listing, whatever HINT says: from the second entry on a copy's log has a hole."""
    source = RunLog(FileStore(ROOT / "tests/golden/v1"), "run")
    entries = source.refresh().tip + 1
    (tmp_path / "tree").mkdir()
    older = build_of(commit, tmp_path / "tree")
    for put in (2, 3, entries - 1):
        there = tmp_path / f"{put}"
        with pytest.raises(ConnectionError):
            run_copy.copied(source, RunLog(Dying(there, put), "job"), None, run_copy.copy)
        before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
        done = older(there, 300, 1)
        assert done.returncode != 0
        assert "LogGap" in done.stderr
        assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before
        with pytest.raises(LogGap, match="cp"):
            RunLog(FileStore(there), "job").refresh(deadline_s=0.0)
        copied = run_copy.copied(source, RunLog(FileStore(there), "job"), None, run_copy.copy)
        assert copied.entries == entries - put
        assert RunLog(FileStore(there), "job").refresh().checkpoints.keys() == source.state.checkpoints.keys()
