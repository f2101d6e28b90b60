"""One process per run, for now: a process that was started as one of several ranks is refused, before anything starts.

Several ranks that each save for themselves become independent runs that drift apart, or fence each other for ever.
Whoever starts them says so: torchrun and Kubeflow, mpirun of Open MPI, of MPICH and of MVAPICH, srun, and a process
group that is initialised already.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from deltashard.errors import UserError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def several(environment: Mapping[str, str]) -> str | None:
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
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return f"torch.distributed's process group of {distributed.get_world_size()} ranks"
    return None


def refuse_several(where: str) -> None:
    """Raises `UserError` when this process is one of several ranks."""
    said = several(os.environ)
    if said is not None:
        raise UserError(
            f"this process is one of several ranks ({said}), and each would save a run of its own that holds only "
            "its share of the training",
            where=where,
            remedy="several ranks come with a later version; run one process per run. If this process does train "
            f"alone, start it without the launcher, or unset {said.partition('=')[0]}"
            if "=" in said
            else "several ranks come with a later version; run one process per run",
        )
