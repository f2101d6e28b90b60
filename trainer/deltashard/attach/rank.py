"""The rank of this process. The ranks of one training are the processes of its torch.distributed process group.

Ranks that each save separately would become independent runs that diverge, or would fence each other forever. A process
that was started as one of several (by torchrun, Kubeflow, mpirun of Open MPI, MPICH or MVAPICH, or srun) is therefore
rejected until it has created the process group through which the ranks find each other.
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
    """Rank within this pod or machine."""
    world_size: int = 1
    node: int = 0
    """Index of the torchrun agent that started the process; a machine may have several."""

    @property
    def alone(self) -> bool:
        return self.world_size == 1


def multi_rank_variable(environment: Mapping[str, str]) -> str | None:
    """Return the setting that shows that this process is one of several ranks, as `NAME=4`, if there is one."""
    names = list(_SIZES)
    if "SLURM_STEP_NUM_TASKS" in environment:
        names.append("SLURM_STEP_NUM_TASKS")
    elif "SLURM_PROCID" in environment:  # otherwise this is the shell of the allocation, which trains alone
        names.append("SLURM_NTASKS")
    for name in names:
        value = environment.get(name, "").strip()
        if value.isdecimal() and int(value) > 1:
            return f"{name}={value}"
    size = world_size()
    return f"torch.distributed's process group of {size} ranks" if size > 1 else None


def rank_of_this_process(where: str) -> Rank:
    """Return the rank of this process.

    Raises:
        UserError: The process was started as one of several and has no process group yet.
    """
    if world_size() > 1:
        number = int(torch.distributed.get_rank())
        local = next((int(v) for name in _LOCAL if (v := os.environ.get(name, "")).isdecimal()), number)
        if local >= LINES:
            raise UserError(
                f"local rank {local}: a sidecar serves at most {LINES} ranks",
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
    if (setting := multi_rank_variable(os.environ)) is not None:
        raise UserError(
            f"this process is one of several ranks ({setting}), and there is no process group through which they can "
            "agree: each rank would save a separate run that contains only its share of the training",
            where=where,
            remedy="call torch.distributed.init_process_group() before Checkpointer(). If this process does train "
            f"alone, start it without the launcher, or unset {setting.partition('=')[0]}",
        )
    return Rank()


def check_unchanged(rank: Rank, where: str) -> None:
    """Raise `UserError` if the size of the group has changed since the Checkpointer was built."""
    size = world_size()
    if size != rank.world_size:
        raise UserError(
            f"there are {size} ranks now, and there {'was' if rank.alone else 'were'} {rank.world_size} when the "
            "Checkpointer was built",
            where=where,
            remedy="call torch.distributed.init_process_group() before Checkpointer(), and keep the group",
        )
