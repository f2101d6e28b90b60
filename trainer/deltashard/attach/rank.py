"""Which rank this process is. Ranks of one training are the processes of its torch.distributed process group.

Several ranks that each save for themselves would become independent runs that drift apart, or fence each other for
ever. So a process that was started as one of several (by torchrun and Kubeflow, mpirun of Open MPI, of MPICH and of
MVAPICH, srun) is refused until it has made the process group, over which the ranks find one another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from deltashard_proto.arena_layout import LINES

from deltashard.errors import UserError
from deltashard.state.discovery import world_size

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a group."""

    number: int = 0
    local: int = 0
    """Among the ranks of this pod or machine."""
    world_size: int = 1
    node: int = 0
    """Which of torchrun's agents started it: there may be several on one machine."""

    @property
    def alone(self) -> bool:
        return self.world_size == 1


def multi_rank_variable(environment: Mapping[str, str]) -> str | None:
    """What says that this process is one of several ranks, as `NAME=4`; None when nothing does."""
    names = list(_SIZES)
    if "SLURM_STEP_NUM_TASKS" in environment:
        names.append("SLURM_STEP_NUM_TASKS")
    elif "SLURM_PROCID" in environment:  # without it this is the allocation's shell, which trains alone
        names.append("SLURM_NTASKS")
    for name in names:
        value = environment.get(name, "").strip()
        if value.isdecimal() and int(value) > 1:
            return f"{name}={value}"
    size = world_size()
    return f"torch.distributed's process group of {size} ranks" if size > 1 else None


def rank_of_this_process(where: str) -> Rank:
    """The rank that this process is, of one or of several.

    Raises:
        UserError: it was started as one of several, and there is no process group yet.
    """
    if world_size() > 1:
        number = int(torch.distributed.get_rank())
        local = next((int(v) for name in _LOCAL if (v := os.environ.get(name, "")).isdecimal()), number)
        if local >= LINES:
            raise UserError(
                f"local rank {local}: a sidecar serves {LINES} ranks at most",
                where=where,
                remedy="set LOCAL_RANK to the rank's number within its pod or machine, as torchrun does",
            )
        node = os.environ.get("GROUP_RANK", "")
        return Rank(
            number=number,
            local=local,
            world_size=world_size(),
            node=int(node) if node.isdecimal() else 0,
        )
    if (said := multi_rank_variable(os.environ)) is not None:
        raise UserError(
            f"this process is one of several ranks ({said}), and there is no process group over which they could "
            "agree: each would save a run of its own that holds only its share of the training",
            where=where,
            remedy="call torch.distributed.init_process_group() before Checkpointer(). If this process does train "
            f"alone, start it without the launcher, or unset {said.partition('=')[0]}",
        )
    return Rank()


def check_unchanged(rank: Rank, where: str) -> None:
    """Raises `UserError` when the group is another than when the Checkpointer was made."""
    size = world_size()
    if size != rank.world_size:
        raise UserError(
            f"there are {size} ranks now, and there {'was' if rank.alone else 'were'} {rank.world_size} when the "
            "Checkpointer was made",
            where=where,
            remedy="call torch.distributed.init_process_group() before Checkpointer(), and keep the group",
        )
