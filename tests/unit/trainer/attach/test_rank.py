"""A process that is one of several ranks is refused until a process group exists, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import deltashard
import pytest
import torch
from deltashard.attach.rank import Rank, check_unchanged, multi_rank_variable, rank_of_this_process
from deltashard.errors import UserError
from torch import distributed


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ("WORLD_SIZE=2 RANK=0", True),
        ("OMPI_COMM_WORLD_SIZE=4", True),
        ("PMI_SIZE=4", True),
        ("MV2_COMM_WORLD_SIZE=4", True),
        ("SLURM_NTASKS=4 SLURM_PROCID=1", True),
        ("SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=1 SLURM_PROCID=1", True),
        ("", False),
        ("WORLD_SIZE=1 RANK=0", False),
        ("WORLD_SIZE=", False),
        ("PMI_SIZE=1", False),
        ("SLURM_NTASKS=8", False),  # the shell of an allocation
        ("SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", False),  # srun -n1 within a larger one
    ],
)
def test_rank_without_a_process_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: str, refused: bool
) -> None:
    """Each rank would save a separate run. The message names the launcher's variable and the remedy."""
    if not refused:
        assert multi_rank_variable(dict(each.split("=") for each in environment.split())) is None
        return
    for each in environment.split():
        monkeypatch.setenv(*each.split("="))
    with pytest.raises(UserError, match="one of several ranks") as caught:
        deltashard.Checkpointer(torch.nn.Linear(2, 1), url=tmp_path / "store", run="run")
    assert any(each in caught.value.what for each in environment.split())
    assert "init_process_group() before Checkpointer()" in caught.value.remedy
    assert not (tmp_path / "store").exists()


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """Create a process group of two ranks. This process is one of them; the backend does not need the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_two")
def test_rank_is_read_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher's variables all ranks are on one machine. A late process group is refused."""
    assert multi_rank_variable({}) == "torch.distributed's process group of 2 ranks"
    assert rank_of_this_process("here") == Rank(number=0, local=0, world_size=2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("GROUP_RANK", "1")
    assert rank_of_this_process("here") == Rank(number=0, local=3, world_size=2, node=1)
    monkeypatch.setenv("LOCAL_RANK", "64")
    with pytest.raises(UserError, match="at most 64 ranks"):
        rank_of_this_process("here")
    with pytest.raises(UserError, match="there are 2 ranks now, and there was 1"):
        check_unchanged(Rank(), "restore()")
