"""Some ranks are killed: under `recovery="partial"` the others keep their rows, or all roll back with a log entry."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltashard.attach.launcher import normal_url, staged_dir
from deltashard_checkpoint.format.frame import frame_length, parse_frame
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.url import open_store

from tests.support.trainer.rank_zygote import RankZygote

RunRanks = Callable[..., list[Any]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS_OF_RANK = {0: 25 + 15 + 1 + 11, 1: 25 + 15 + 1 + 11, 2: 25 + 15 + 1 + 11}
"""Rows of each rank from the tables of 97, 60, 3 and 41 rows, split by rows."""
ALL_ROWS = 97 + 60 + 3 + 41


@pytest.fixture(scope="module")
def run(rank_zygote: RankZygote) -> RunRanks:
    """Return the results of all ranks of a scenario of `partial_group`."""
    return partial(rank_zygote.run, "tests.integration.trainer.ranks.partial_group")


def newest(workdir: Path) -> Checkpoint:
    with open_store((workdir / "store").as_uri()) as store:
        entry = RunLog(store, "partial").refresh().newest()
    assert entry is not None
    return entry


def arrays(workdir: Path, what: str, rank: int) -> dict[str, np.ndarray]:
    return dict(np.load(workdir / f"{what}-{rank}.npz"))


def check_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], prefix: str = "") -> None:
    names = [name for name in wanted if name.startswith(prefix)] if prefix else list(wanted)
    assert names
    for name in names:
        np.testing.assert_array_equal(found[name], wanted[name], name)


def check_rows(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, values in wanted.items():
        if not name.startswith("dense|"):
            np.testing.assert_array_equal(found[name], values, name)


def staged(workdir: Path) -> Path:
    return staged_dir(normal_url(workdir / "store"), "partial")


def test_survivors_keep_rows_and_lost_rank_rolls_back(run: RunRanks, tmp_path: Path) -> None:
    """Two crashes precede the next commit. Each rank has the rows of its last step or of the checkpoint."""
    first = run(tmp_path, 4, "train", until=20, save_at=3, kill_at=6, kill="2")
    assert first[2] is None
    assert sorted(path.name for path in staged(tmp_path).iterdir()) == [f"rank-{r}.part" for r in (0, 1, 3)]
    kept = {rank: arrays(tmp_path, "held", rank) for rank in range(4)}
    saved = arrays(tmp_path, "saved", 2)

    second = run(tmp_path, 4, "train", until=20, kill_at=9, kill="1")
    check_restored(tmp_path, kept, lost={2: saved})
    later = {rank: arrays(tmp_path, "held", rank) for rank in range(4)}

    third = run(tmp_path, 4, "train", until=11)
    check_restored(tmp_path, later, lost={1: arrays(tmp_path, "saved", 1)})
    assert len(list(staged(tmp_path).iterdir())) == 0
    pls = 3 / 1000 * ROWS_OF_RANK[2] / ALL_ROWS
    sums = pls + 6 / 1000 * ROWS_OF_RANK[1] / ALL_ROWS
    for rank in range(4):
        messages = third[rank]
        assert (messages["mode"], messages["exact"], messages["step"], messages["seq"]) == (
            "partial",
            False,
            9,
            2,
        )
        assert messages["rank_steps"] == [9, 3, 9, 9]
        assert messages["pls"] == pytest.approx(sums)
        assert messages["loader"] == [1, 2]  # epochs of 7
        if rank != 1:
            assert messages["state"] == second[rank]["held"]
    assert third[1]["state"] == second[0]["held"]
    notes = "; ".join(third[1]["notes"])
    assert "rank 1 was lost: its rows and its random numbers are those of step 3" in notes
    assert "rank 1 has the state= of rank 0" in notes
    entry = newest(tmp_path)
    assert entry.step == 11
    assert float(entry.metadata["deltashard/pls"]) == pytest.approx(sums)
    assert entry.metadata["deltashard/partial-recoveries"] == "2"
    # From that commit on the state is exact, and the sum is constant.
    ended = {rank: arrays(tmp_path, "ended", rank) for rank in range(4)}
    fourth = run(tmp_path, 4, "train", until=12)
    for rank in range(4):
        assert (fourth[rank]["mode"], fourth[rank]["step"]) == ("full", 11)
        assert fourth[rank]["pls"] == pytest.approx(sums)
        check_same(arrays(tmp_path, "begun", rank), ended[rank])


def check_restored(workdir: Path, kept: dict[int, dict[str, np.ndarray]], lost: dict[int, Any]) -> None:
    """Check a restore: survivors have their rows, lost ranks the saved ones, and the dense part is rank 0's."""
    for rank, held in kept.items():
        begun = arrays(workdir, "begun", rank)
        check_rows(begun, lost.get(rank, held))
        check_same(begun, kept[0], "dense|")


@pytest.fixture(scope="module")
def crashed(run: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run, killed on rank 2 at step 6, with a checkpoint of step 3, and copies of store and staged parts."""
    workdir = tmp_path_factory.mktemp("crashed")
    run(workdir, 4, "train", until=20, save_at=3, kill_at=6, kill="2")
    shutil.copytree(workdir / "store", workdir / "store-then")
    shutil.copytree(staged(workdir), workdir / "staged-then")
    return workdir


def _torn(home: Path) -> None:
    path = home / "rank-1.part"
    path.write_bytes(path.read_bytes()[:-100])


def _corrupt(home: Path) -> None:
    path = home / "rank-1.part"
    data = bytearray(path.read_bytes())
    data[64] ^= 1  # right behind the header of its first frame
    path.write_bytes(data)


def _shorter(home: Path) -> None:
    path = home / "rank-1.part"
    data = path.read_bytes()
    first = parse_frame(data[: frame_length(memoryview(data))])
    path.write_bytes(data[first.info.stored_bytes :])


def _foreign(home: Path) -> None:
    shutil.copy(home / "rank-0.part", home / "rank-2.part")


@pytest.mark.parametrize(
    ("tamper", "options", "why"),
    [
        (_torn, {}, "rank 1's staged part: it does not end with the magic of a staged part"),
        (_corrupt, {}, "rank 1's staged part: a frame's bytes do not match its hash"),
        (_shorter, {}, "rank 1's staged part: its frames are incomplete"),
        (_foreign, {}, "rank 2's staged part: it belongs to rank 0"),
        (None, {"pls_target": 1e-4}, "above its target of 0.0001"),
        (None, {"which": "'step:3'"}, "restore(which='step:3') was called"),
        (None, {"recovery": "'full'", "pls_target": None, "planned_steps": None}, ""),
    ],
    ids=["torn", "corrupt", "shorter", "foreign", "target", "which", "full"],
)
def test_invalid_staged_parts_roll_back_all_ranks(
    run: RunRanks, crashed: Path, tamper: Callable[[Path], None] | None, options: dict[str, Any], why: str
) -> None:
    copy_crash_state(crashed)
    if tamper is not None:
        tamper(staged(crashed))
    check_full(run(crashed, 4, "train", until=4, **options), crashed, why)


def copy_crash_state(workdir: Path) -> None:
    for now, then in ((workdir / "store", "store-then"), (staged(workdir), "staged-then")):
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(workdir / then, now)


def check_full(messages: list[Any], workdir: Path, why: str) -> None:
    """Check that all ranks rolled back to the checkpoint bit for bit, and that rank 0 logged the reason."""
    for rank, each in enumerate(messages):
        assert (each["mode"], each["step"], each["pls"], each["rank_steps"]) == ("full", 3, 0.0, [])
        check_same(arrays(workdir, "begun", rank), arrays(workdir, "saved", rank))
    log = (workdir / "log-0").read_text().rpartition("training starts")[2]
    assert why in log.replace("recovery is full, all ranks return to the checkpoint: ", "")
    assert "PARTIAL" not in log
