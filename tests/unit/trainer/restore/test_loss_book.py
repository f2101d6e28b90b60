"""Losses that outlive the trainer, and their comparison when steps are trained again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deltashard.restore.loss_book import KEPT, LossBook
from deltashard_proto.v1 import trainer_pb2 as pb


def life(
    directory: Path, losses: dict[int, float], *, attempt: int, run: str = "r", rank: int = 0
) -> pb.LossCheck | None:
    """One process that trains these steps; what it found in the end."""
    book = LossBook()
    for step, loss in losses.items():
        book.note(loss, step=step, attempt=attempt, arena=str(directory / "arena"), run=run, rank=rank)
    found = book.check()
    book.close()
    return found


def test_steps_trained_again_are_compared_with_the_first_time(tmp_path: Path) -> None:
    """Steps 6 to 10 were lost: each is .1 worse the second time."""
    assert life(tmp_path, {n: n / 10 for n in range(1, 11)}, attempt=1) is None
    found = life(tmp_path, {n: n / 10 + 0.1 for n in range(6, 13)}, attempt=2)
    assert found is not None
    assert found.steps == 5
    assert found.mean == pytest.approx(0.1)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert found.first == pytest.approx(0.8)


def test_nothing_is_told_before_every_known_step_was_trained_again(tmp_path: Path) -> None:
    """A part of them would weigh the first steps after the restore too much."""
    life(tmp_path, dict.fromkeys(range(1, 11), 1.0), attempt=1)
    assert life(tmp_path, {6: 1.0, 7: 1.0}, attempt=2) is None


def test_a_third_life_compares_with_the_second(tmp_path: Path) -> None:
    """The newest time of a step is the one before this."""
    life(tmp_path, dict.fromkeys(range(1, 6), 1.0), attempt=1)
    life(tmp_path, dict.fromkeys(range(3, 8), 2.0), attempt=2)
    found = life(tmp_path, dict.fromkeys(range(5, 9), 2.5), attempt=3)
    assert found is not None
    assert (found.steps, found.mean, found.first) == (3, 0.5, 2.0)


@pytest.mark.parametrize("other", [{"run": "other"}, {"rank": 1}])
def test_another_run_or_rank_compares_nothing(tmp_path: Path, other: dict[str, str | int]) -> None:
    """The file is of one run and rank; another run begins it anew."""
    life(tmp_path, dict.fromkeys(range(1, 11), 1.0), attempt=1)
    assert life(tmp_path, dict.fromkeys(range(6, 11), 2.0), attempt=1, **other) is None  # type: ignore[arg-type]


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    """A run of any length has a file of one size."""
    life(tmp_path, dict.fromkeys(range(1, KEPT + 11), 1.0), attempt=1)
    found = life(tmp_path, dict.fromkeys(range(KEPT, KEPT + 11), 1.0), attempt=2)
    assert found is not None
    assert found.steps == 11
    assert (tmp_path / "losses-0").stat().st_size == 32 + KEPT * 16


def test_what_is_no_number_is_passed_over(tmp_path: Path) -> None:
    """A NaN is the trainer's trouble, and says nothing of a restore."""
    life(tmp_path, {1: 1.0, 2: float("nan"), 3: 1.0}, attempt=1)
    found = life(tmp_path, {1: 1.0, 2: 1.0, 3: float("inf")}, attempt=2)
    assert found is None or found.steps == 1


def test_a_directory_that_cannot_be_written_costs_the_comparison_alone(tmp_path: Path) -> None:
    """Training goes on."""
    assert life(tmp_path / "nothing" / "here", {1: 1.0}, attempt=1) is None
    book = LossBook()
    book.note(1.0, step=1, attempt=1, arena=None, run="r", rank=0)
    assert book.check() is None


@pytest.mark.parametrize("loss", ["high", torch.ones(3), object()])
def test_what_is_no_loss_is_said_once_and_training_goes_on(
    tmp_path: Path, loss: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no reason for a step to fail."""
    book = LossBook()
    for step in (1, 2):
        book.note(loss, step=step, attempt=1, arena=str(tmp_path / "arena"), run="r", rank=0)
    assert [each.message for each in caplog.records if "takes a number" in each.message] != []
    assert len(caplog.records) == 1
    book.note(torch.tensor([0.5]), step=3, attempt=1, arena=str(tmp_path / "arena"), run="r", rank=0)
    book.close()
