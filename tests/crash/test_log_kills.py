"""SIGKILL of a process with a file store at every commit point of the log.

After each kill: the newest committed checkpoint restores exactly, every live object is whole, and the next save succeeds.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.log.chain import live_prefixes
from deltashard_checkpoint.maintenance import garbage_collection, retention
from deltashard_checkpoint.write import attempt

from tests.crash import log_victim
from tests.crash.kill import killed
from tests.crash.log_victim import ROWS, log_of, save, values
from tests.support.checkpoint.snapshot import read_checkpoint

POINTS = [
    ("pack.before_put", "save", 4), ("pack.during_put", "save", 4), ("pack.after_put", "save", 4),
    ("index.before_put", "save", 4), ("index.after_put", "save", 4), ("commit.after_list", "save", 4),
    ("commit.before_log_put", "save", 4), ("commit.after_log_put", "save", 5),
    ("attempt.before_open", "open", 4), ("attempt.after_open", "open", 4), ("layout.before_put", "ranks", 4),
    ("layout.after_put", "ranks", 4), ("manifest.before_put", "ranks", 4), ("manifest.after_put", "ranks", 4),
    ("retire.before_put", "retire", 4), ("retire.after_put", "retire", 4),
    ("retire.before_put", "retire these", 4), ("retire.after_put", "retire these", 4),
    ("pin.before_put", "pin", 4), ("pin.after_put", "pin", 4), ("rewind.before_put", "rewind", 4),
    ("rewind.after_put", "rewind", 3), ("gc.during_delete", "gc", 4), ("gc.after_delete", "gc", 4),
    ("gc.before_reclaim", "gc", 4), ("gc.after_reclaim", "gc", 4), ("compact.after_packs", "compact", 4),
    ("compact.after_index", "compact", 4), ("compact.before_log_put", "compact", 4),
    ("compact.after_log_put", "compact", 4),
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    log_victim.prepare(directory)
    return directory


def expected(step: int) -> np.ndarray:
    """Return the rows of step 3, with the first eight of step 4 and the next eight of step 5."""
    rows = np.arange(ROWS)
    whole = values(min(step, 3), rows)
    for delta, changed in ((4, rows[:8]), (5, rows[8:16])):
        if step >= delta:
            whole[changed] = values(delta, changed)
    return whole


def restored(directory: Path, which: str = "latest") -> tuple[int, np.ndarray]:
    snapshot = read_checkpoint(log_of(directory).store, "job", which)
    return snapshot.entry.step, snapshot.tables["items"].weights


@pytest.mark.parametrize(
    ("point", "action", "step"), POINTS, ids=[f"{action}-{point}" for point, action, _ in POINTS]
)
def test_log_recovers_from_kill(prepared, tmp_path, point, action, step):
    directory = tmp_path / "run"
    shutil.copytree(prepared, directory)
    killed("log_victim", directory, action, point)
    assert restored(directory)[0] == step
    np.testing.assert_array_equal(restored(directory)[1], expected(step))

    log = log_of(directory)
    state = log.refresh()
    assert state.stopped is None
    for seq, entry in state.checkpoints.items():
        found, weights = restored(directory, f"seq:{seq}")
        assert found == entry.step
        np.testing.assert_array_equal(weights, expected(entry.step))

    opened = attempt.open_attempt(log, owner="me")
    assert opened.resume is not None
    assert opened.resume.step == step
    seq = save(directory, log, opened.attempt, 1, 6, np.arange(4), opened.resume.seq)
    whole = expected(step)
    whole[:4] = values(6, np.arange(4))
    assert log.refresh().newest().seq == seq
    np.testing.assert_array_equal(restored(directory)[1], whole)

    retention.append_retirement(
        log,
        retention.Retention(keep_last=1),
        orphaned_prefixes=garbage_collection.orphaned_prefixes(log, log.refresh()),
    )
    garbage_collection.collect(log, grace_s=0.0)
    np.testing.assert_array_equal(restored(directory)[1], whole)
    left = {prefix for prefix, _ in garbage_collection.data_objects(log)}
    assert left <= live_prefixes(log.refresh()) | set(
        garbage_collection.collect(log, grace_s=1e9).waiting
    ) | {prefix for prefix in left if "compact" in prefix}
