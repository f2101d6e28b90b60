"""Blob names of several ranks: `rank/{r}/{name}` belongs to rank r only, every other name is common to all ranks.

Rank 0 writes plain names, like a single process, so readers need not distinguish a checkpoint of one rank from the
common blobs of many. A restore by rank r reads the plain names, those under `rank/{r}/`, and the loader positions of
some ranks that no longer exist; a reader of the whole run reads the plain names. If the world size changed, a rank may
find no blobs under its own prefix.
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
    """Return the stored name of a rank's own blob: `rng` for rank 0, `rank/3/rng` for rank 3."""
    return name if rank == 0 else f"rank/{rank}/{name}"


def parse_blob_name(stored: str) -> tuple[int | None, str]:
    """Return (rank, local name) of a rank's own blob, or (None, `stored`) of a common blob."""
    found = _OWN.fullmatch(stored)
    return (None, stored) if found is None else (int(found[1]), found[2])


def optimizer_name(index: int, rank: int) -> str:
    """Return the stored name of `rank`'s part of optimizer `index`, a common blob; sharded optimizers have several."""
    return f"optim/{index}" if rank == 0 else f"optim/{index}/{rank}"


def optimizer_parts(blobs: Mapping[str, T]) -> dict[int, list[T]]:
    """Return the stored parts of each optimizer, by its index: rank 0's first, then those of other ranks."""
    found = sorted(
        (int(match[1]), int(match[2] or 0), name)
        for name in blobs
        if (match := _OPTIMIZER.fullmatch(name)) is not None
    )
    parts: dict[int, list[T]] = {}
    for index, _, name in found:
        parts.setdefault(index, []).append(blobs[name])
    return parts


def ranks_read_by(rank: int, world_size: int | None, saved: int) -> range:
    """Return the ranks, of `saved`, whose blobs this rank of `world_size` reads: itself and some that are gone.

    `world_size` None: equal to `saved`.
    """
    return range(rank, saved, world_size or saved)


def is_read_by(rank: int | None, world_size: int | None, stored: str) -> bool:
    """Whether a restore by `rank` of `world_size` (None: as saved) reads the blob; rank None: common blobs only.

    A restore also reads the loader positions of removed ranks, so that all ranks together restore all positions.
    """
    owner, name = parse_blob_name(stored)
    if owner is None or rank is None or owner == rank:
        return owner is None or owner == rank
    return (
        name == _POSITIONS and world_size is not None and owner in ranks_read_by(rank, world_size, owner + 1)
    )


def common_blobs(blobs: Mapping[str, T]) -> dict[str, T]:
    """Return the blobs common to all ranks: written by rank 0 or, for dense tensors, by any one rank."""
    return {name: blob for name, blob in blobs.items() if parse_blob_name(name)[0] is None}


def own_blobs(rank: int, blobs: Mapping[str, T]) -> dict[str, T]:
    """Return this rank's own blobs by local name: the common ones for rank 0, none for a new rank."""
    if rank == 0:
        return common_blobs(blobs)
    named = {parse_blob_name(name): blob for name, blob in blobs.items()}
    return {name: blob for (owner, name), blob in named.items() if owner == rank}
