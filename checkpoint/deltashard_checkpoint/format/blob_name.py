"""Names of the blobs of several ranks: `rank/{r}/{name}` is rank r's alone, every other name is for all.

Rank 0 writes plain names, as a single process does, so a checkpoint of one rank and the common half of one of many
look the same to whoever reads them. A restore by rank r reads the plain names, those under `rank/{r}/`, and of some
ranks that are gone where their loaders stood; who reads a run as a whole reads the plain ones. In a world of another
size a rank may find none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
_OPTIMIZER = re.compile(r"optim/(0|[1-9][0-9]*)(?:/(0|[1-9][0-9]*))?", re.ASCII)
_POSITIONS = "loader"
_OWN = re.compile(r"rank/(0|[1-9][0-9]{0,4})/(.+)", re.ASCII | re.DOTALL)


def blob_name(rank: int, name: str) -> str:
    """The stored name of what is this rank's own: `rng` of rank 0, `rank/3/rng` of rank 3."""
    return name if rank == 0 else f"rank/{rank}/{name}"


def parse_blob_name(stored: str) -> tuple[int | None, str]:
    """(rank, its name for it) of a blob that is one rank's own, (None, `stored`) of one for all."""
    found = _OWN.fullmatch(stored)
    return (None, stored) if found is None else (int(found[1]), found[2])


def optimizer_name(index: int, rank: int) -> str:
    """The stored name of what `rank` says of optimizer `index`, for all: of one that is spread over ranks, many do."""
    return f"optim/{index}" if rank == 0 else f"optim/{index}/{rank}"


def optimizer_parts(blobs: Mapping[str, T]) -> dict[int, list[T]]:
    """What is stored of each optimizer, by its index: rank 0's word, then those of others that hold parts of it."""
    found = sorted(
        (int(said[1]), int(said[2] or 0), name)
        for name in blobs
        if (said := _OPTIMIZER.fullmatch(name)) is not None
    )
    parts: dict[int, list[T]] = {}
    for index, _, name in found:
        parts.setdefault(index, []).append(blobs[name])
    return parts


def ranks_read_by(rank: int, world_size: int | None, saved: int) -> range:
    """The ranks of `saved` of whom this one, of `world_size`, reads something: itself, and some that are gone.

    `world_size` None: as many as saved.
    """
    return range(rank, saved, world_size or saved)


def is_read_by(rank: int | None, world_size: int | None, stored: str) -> bool:
    """Whether a restore by this rank of `world_size` (None: as many as saved) reads the blob; rank None: for no rank.

    Of a rank that is gone it reads the positions of loaders, so that all ranks together see those of all.
    """
    owner, name = parse_blob_name(stored)
    if owner is None or rank is None or owner == rank:
        return owner is None or owner == rank
    return (
        name == _POSITIONS and world_size is not None and owner in ranks_read_by(rank, world_size, owner + 1)
    )


def common_blobs(blobs: Mapping[str, T]) -> dict[str, T]:
    """Those for all ranks. They are rank 0's or, of dense tensors, some one rank's."""
    return {name: blob for name, blob in blobs.items() if parse_blob_name(name)[0] is None}


def own_blobs(rank: int, blobs: Mapping[str, T]) -> dict[str, T]:
    """What this rank wrote as its own, by its names for it: of rank 0 the common ones, of a new rank none."""
    if rank == 0:
        return common_blobs(blobs)
    named = {parse_blob_name(name): blob for name, blob in blobs.items()}
    return {name: blob for (owner, name), blob in named.items() if owner == rank}
