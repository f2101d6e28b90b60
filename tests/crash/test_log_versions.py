"""The build of this repository from before log entries named folded states, on runs of this one, and the other way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key
from deltashard_checkpoint.stores.file import FileStore

from tests.crash import log_versions

BEFORE = "174d0ef"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The older build's packages, from this clone's own history."""
    tree = tmp_path_factory.mktemp("older")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", BEFORE, "checkpoint", "proto"], capture_output=True, check=False
    )
    assert archive.returncode == 0, (
        f"this test needs commit {BEFORE} of the repository's history (a full clone: `git fetch --unshallow`): "
        f"{archive.stderr.decode()}"
    )
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)

    def write(directory: Path, first_step: int, count: int) -> dict:
        done = subprocess.run(
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
