"""SIGKILL at every commit point of a copy and of a removal: the rest restores or not at all, and a retry completes."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.log_error import LogGap
from deltashard_checkpoint.whole_run.run_copy import TargetTaken
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_cli.target import Target
from deltashard_cli.verification import verify

from tests.crash import log_victim
from tests.crash.copy_victim import act, target_of
from tests.crash.kill import killed
from tests.crash.log_victim import ROWS, log_of, save, values
from tests.support.checkpoint.snapshot import read_checkpoint

COPY_POINTS = [
    "cp.after_packs", "cp.after_data", "cp.after_hint", "cp.after_first_entry", "cp.before_last_entry",
    "cp.after_last_entry",
]  # fmt: skip
REMOVAL_POINTS = [
    "rm.after_barrier", "rm.during_delete:1", "rm.after_folds", "rm.during_delete:2", "rm.after_log",
    "rm.during_delete:3", "rm.before_hint", "rm.after_hint",
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    log_victim.prepare(directory)
    # A run whose name starts with the other run's name shares its folders.
    other = RunLog(log_of(directory).store, "job/inner")
    open_attempt(other, owner="me")
    return directory


def weights(log: RunLog, which: str = "latest") -> np.ndarray:
    return read_checkpoint(log.store, log.run, which).tables["items"].weights


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("action", "point"),
    [*(("cp", point) for point in COPY_POINTS), *(("cp one", point) for point in COPY_POINTS[1:])],
)
def test_killed_copy_is_not_a_run_and_resumes(prepared, tmp_path, action, point):
    directory = tmp_path / "run"
    shutil.copytree(prepared, directory)
    source = log_of(directory)
    wanted, before = weights(source), files(directory / "store/job")
    killed("copy_victim", directory, action, point)
    assert files(directory / "store/job") == before
    target = target_of(directory, action)
    if point == "cp.after_last_entry":
        np.testing.assert_array_equal(weights(target), wanted)
    elif point in {"cp.after_packs", "cp.after_data"}:
        assert RunLog(target.store, target.run).refresh().tip == -1, "only data objects exist"
    else:
        with pytest.raises(LogGap):
            RunLog(target.store, target.run).refresh(deadline_s=0.05)
        with pytest.raises(DeltashardError):  # a trainer cannot start there either
            open_attempt(RunLog(target.store, target.run), owner="me", closing_wait_s=0.0, deadline_s=0.05)

    done = act(directory, action)
    whole = point == "cp.after_last_entry"
    assert (done.step, done.entries == 0) == (4, whole)
    skipped = whole if action == "cp one" else point != "cp.after_packs"
    assert not skipped or done.objects == 0, "existing objects are not copied again"
    assert target.hint().whole
    log = RunLog(target.store, target.run)
    found = verify(Target(store=log.store, run=log.run), deep=True)
    assert found.problems == ()
    assert len(found.restored) == (1 if action == "cp one" else 3)
    np.testing.assert_array_equal(weights(log), wanted)

    # A trainer continues it, on top of the copied checkpoints.
    opened = open_attempt(log, owner="me")
    assert opened.resume is not None
    assert opened.resume.step == 4
    save(directory, log, opened.attempt, 1, 6, np.arange(4), opened.resume.seq)
    wanted[:4] = values(6, np.arange(4))
    np.testing.assert_array_equal(weights(log), wanted)
    with pytest.raises(TargetTaken):
        act(directory, action)
    assert files(directory / "store/job") == before


@pytest.mark.parametrize("point", REMOVAL_POINTS)
def test_killed_removal_is_unrestorable_and_resumes(prepared, tmp_path, point):
    directory = tmp_path / "run"
    shutil.copytree(prepared, directory)
    inner = files(directory / "store/job/inner")
    killed("copy_victim", directory, "rm", point)
    log = log_of(directory)
    if point == "rm.after_hint":
        assert log.refresh().tip == -1
    else:
        for _ in range(2):  # with HINT, and also without it
            try:
                state = log_of(directory).refresh(deadline_s=0.05)
            except LogGap:
                pass
            else:
                assert state.tip == -1, "a truncated log reads as whole"
            if point in {"rm.after_barrier", "rm.during_delete:1", "rm.after_folds"}:
                break  # only folded states are deleted so far, which a log does not need
            (directory / "store/job/log/HINT").unlink(missing_ok=True)
    act(directory, "rm")
    assert {key for key in files(directory / "store/job") if not key.startswith("inner/")} == set()
    assert files(directory / "store/job/inner") == inner
    opened = open_attempt(log_of(directory), owner="me")
    assert opened.resume is None
    save(directory, log_of(directory), opened.attempt, 1, 1, np.arange(ROWS), None)
    np.testing.assert_array_equal(weights(log_of(directory)), values(1, np.arange(ROWS)))
