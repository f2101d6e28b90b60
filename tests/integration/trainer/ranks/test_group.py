"""Several ranks under DistributedDataParallel: one run, one checkpoint at a time, and exact restores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.url import open_store

from tests.support.trainer.rank_zygote import RankZygote

RunRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(rank_zygote: RankZygote) -> RunRanks:
    """Return the results of all ranks of a scenario of `group`."""
    return partial(rank_zygote.run, "tests.integration.trainer.ranks.group")


def commits(workdir: Path) -> dict[int, int]:
    return {seq: entry.step for seq, entry in checkpoints(workdir).items()}


def checkpoints(workdir: Path) -> Mapping[int, Checkpoint]:
    with open_store((workdir / "store").as_uri()) as store:
        return RunLog(store, "group").refresh().checkpoints


def test_killed_group_matches_uninterrupted_one(
    run: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run that starts from its checkpoint also matches bit for bit. No sample is read twice.

    The state covers tables, optimizer, scheduler, and each rank's random numbers and share of the data.
    """
    whole = run(tmp_path / "plain", 2, "plain", until=50)
    assert run(tmp_path / "ckpt", 2, "killed", save_at=17, kill_at=23) == [None, None]
    assert commits(tmp_path / "ckpt") == {2: 17}
    with monkeypatch.context() as patch:
        patch.setenv("DELTASHARD_RESTORE_FROM", "group")
        other = run(tmp_path / "ckpt", 2, "resumed", until=50, run="other")
    back = run(tmp_path / "ckpt", 2, "resumed", until=50)
    for rank in range(2):
        assert {**other[rank], "committed": None} == {**back[rank], "committed": None}
        assert back[rank]["restored"] == {"step": 17, "exact": True, "notes": []}
        assert back[rank]["state"] == whole[rank]["state"]
        assert back[rank]["seen"] == whole[rank]["seen"][17 * 4 :]
        assert back[rank]["committed"][1] == 50
    newest = max(checkpoints(tmp_path / "ckpt").items())[1]
    assert newest.directive.startswith("close;"), "the last save is a closing save"
    assert whole[0]["state"]["torch"] != whole[1]["state"]["torch"]


def test_sigterm_saves_one_step_of_all_ranks(run: RunRanks, tmp_path: Path) -> None:
    assert run(tmp_path, 2, "terminated") == [None, None]
    codes = json.loads((tmp_path / "codes").read_text())
    assert codes == [-15, -15]
    found = commits(tmp_path)
    reached = [int((tmp_path / f"step-{rank}").read_text()) for rank in range(2)]
    assert len(set(reached)) == 1  # each rank ended within the step() after this one
    assert max(found.values()) == reached[0] + 1


def test_replicated_state_survives_its_saving_rank(run: RunRanks, tmp_path: Path) -> None:
    """Under DDP partial recovery loses random numbers only. Tables, dense part, optimizer and data position remain."""
    plain = run(tmp_path / "plain", 3, "plain", until=12)
    run(tmp_path, 3, "survived", until=20, save_at=4, kill_at=9)
    back = run(tmp_path, 3, "survived", until=12)
    held = json.loads((tmp_path / "sums-1.json").read_text())
    for rank in range(3):
        assert (back[rank]["mode"], back[rank]["step"], back[rank]["pls"]) == ("partial", 9, 0.0)
        assert back[rank]["begun"] == held
        assert back[rank]["seen"] == plain[rank]["seen"][9 * 4 :]  # no sample is repeated or skipped
        assert (back[rank]["scheduler"], back[rank]["committed"]) == (12, 12)


@pytest.mark.parametrize("data", ["dealt", "sampled", "shared"])
def test_epoch_continues_with_other_world_size(run: RunRanks, tmp_path: Path, data: str) -> None:
    """4 ranks are killed, then 2 run, then 3.

    Each of the epoch's 240 samples is seen once, and the next epoch is complete.
    """
    begun = run(tmp_path / "plain", 4, "plain", until=5, data=data)
    assert run(tmp_path, 4, "killed", save_at=5, kill_at=8, data=data) == [None] * 4
    by_two = run(tmp_path, 2, "resumed", until=10, data=data)
    by_three = run(tmp_path, 3, "resumed", until=22, data=data)
    left = [180 if data == "shared" else 160, 120]
    for ranks, before, number, rest in ((by_two, 4, 2, left[0]), (by_three, 2, 3, left[1])):
        note = (
            f"loader 'loader' resumes at batch {20 - rest // 12}, as on {before} ranks"
            if data == "shared"
            else f"loader 'loader' was within epoch 0 when {before} ranks saved: the {rest} remaining samples are "
            f"shared among {number}; its last batch is not compared"
        )
        assert all(note in rank["restored"]["notes"] for rank in ranks)
    # Rank 2 has rank 0's position, and separate random numbers from its first batch on.
    assert len({rank["state"]["torch"] for rank in by_three}) == 3
    steps = 10  # of the three ranks that end the epoch
    epoch = [rank["seen"] for rank in (*begun, *by_two)] + [rank["seen"][: 4 * steps] for rank in by_three]
    assert sorted(number for seen in epoch for number in seen) == list(range(240))
    after = [number for rank in by_three for number in rank["seen"][4 * steps :]]
    assert len(after) == len(set(after)) == 2 * 3 * 4


def test_epoch_with_unknown_rest_restarts_or_is_refused(run: RunRanks, tmp_path: Path) -> None:
    """Each rank draws its own order, so the used samples are unknown."""
    run(tmp_path, 2, "resumed", until=8, data="own")
    for result in run(tmp_path, 3, "resumed", until=10, loaders="refuse", data="own"):
        assert result["error"] in ("CheckpointMismatch", "RestoreFailed")
        assert "when 2 ranks saved, but there are 3 now" in result["what"]
        assert 'restore(loaders="restart")' in result["remedy"]
    zero, _, two = run(tmp_path, 3, "resumed", until=10, data="own")
    assert zero["restored"]["step"] == two["restored"]["step"] == 8
    again = "loader 'loader' cannot resume within epoch"
    (note,) = zero["restored"]["notes"]
    assert note.startswith(again)
    notes = "; ".join(two["restored"]["notes"])
    assert again in notes
    assert "rank 2 was not in the group that saved: it has rank 0's state['scheduler']" in notes
    assert "its random numbers are reseeded" in notes


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("run", "has fact otherwise than rank 0: run: 'group' on rank 0, 'another' on rank 1"),
        ("model", "has table otherwise than rank 0"),
        ("encoding", "encoding"),
        ("replicas", "differs from rank 0's"),
        ("call", "restore(which=)"),
    ],
)
def test_mismatched_ranks_are_reported(run: RunRanks, tmp_path: Path, what: str, sentence: str) -> None:
    for result in run(tmp_path, 2, "disagreeing", what=what):
        assert result["error"] == "RanksDiffer"
        assert sentence in result["what"]
        assert result["remedy"]
    if (tmp_path / "store").exists():
        assert commits(tmp_path) == {}


def test_ranks_ending_at_different_steps_are_reported(run: RunRanks, tmp_path: Path) -> None:
    """Rank 0 has nothing left to save and closes. Rank 1 reports that no checkpoint has its last step."""
    zero, one = run(tmp_path, 2, "uneven")
    assert zero is None
    assert one["error"] == "SaveFailed"
    assert "step 5 is not durable: rank 0: it has closed" in one["what"]
    assert list(commits(tmp_path).values()) == [4]


def test_diverged_replicas_are_reported(run: RunRanks, tmp_path: Path) -> None:
    zero, one = run(tmp_path, 2, "replicas")
    assert "top.bias on rank 1" in zero["events"][0][1]
    assert zero["commits"] == one["commits"] == 1
    assert zero["error"]
    assert one["error"]
