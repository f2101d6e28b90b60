"""Killed while packs and indexes are put: the newest committed checkpoint restores exactly, and the next save works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.stores.url import open_store

from tests.crash.part_child import model_at
from tests.support.checkpoint.sample import RUN
from tests.support.checkpoint.snapshot import read_checkpoint


def _child(directory: Path, first: int, saves: int, crash_at: str = "") -> tuple[int, list[int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.part_child", str(directory), str(first), str(saves)],
        env={**os.environ, "DELTASHARD_CRASH_AT": crash_at}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.returncode, [int(line) for line in done.stdout.split()]


def _assert_newest(directory: Path, step: int) -> None:
    with open_store(f"file://{directory}/store") as store:
        snapshot = read_checkpoint(store, RUN)
    model = model_at(step)
    assert snapshot.entry.step == step
    table = snapshot.tables[model.table.fqn]
    np.testing.assert_array_equal(table.weights, model.weights)
    for name, values in model.fields.items():
        np.testing.assert_array_equal(table.fields[name], values)
    assert snapshot.blobs["rng"] == bytes([step]) * 5000


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("pack.before_put", 1),  # nothing is committed yet
        ("pack.before_put", 10),  # the baseline has seven packs: these are in a later cut
        ("pack.during_put", 10),
        ("pack.after_put", 10),
        ("index.before_put", 3),
        ("index.after_put", 3),
    ],
)
def test_a_kill_while_a_part_is_put_leaves_the_last_commit_whole(
    tmp_path: Path, point: str, nth: int
) -> None:
    """In the first cut nothing is committed yet; in a later one the cut before it is. A new process saves on."""
    code, committed = _child(tmp_path, 0, 4, f"{point}:{nth}")
    assert code == -signal.SIGKILL, "the crash point was never passed"
    assert len(committed) < 4
    assert bool(committed) is (nth > 1)
    if committed:
        _assert_newest(tmp_path, committed[-1])
    code, later = _child(tmp_path, 10, 2)
    assert (code, later) == (0, [10, 11])
    _assert_newest(tmp_path, 11)
