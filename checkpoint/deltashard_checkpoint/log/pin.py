"""Owners of pinned names, from the commits that requested them and later user entries. Pure.

A checkpoint has the names it was committed under. A `pin` entry takes a name from all earlier checkpoints and gives it
to one checkpoint or to none; later commits under the name take it as usual. The newest entry or commit wins: retention
keeps the last checkpoint that has the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from deltashard_checkpoint.log.entry import Checkpoint


class UserEntry(NamedTuple):
    """The latest `pin` entry of a name."""

    slot: int
    """Slot of the `pin` entry."""
    checkpoint: int | None
    """A live checkpoint; None: no checkpoint."""


def pinned_as(
    checkpoints: Mapping[int, Checkpoint], user_entries: Mapping[str, UserEntry], name: str
) -> tuple[int, ...]:
    """Return the live checkpoints that have `name`; the last one is the effective one."""
    latest = user_entries.get(name)
    after = -1 if latest is None else latest.slot
    newer = tuple(seq for seq, entry in checkpoints.items() if seq > after and name in entry.pins)
    return newer if latest is None or latest.checkpoint is None else (latest.checkpoint, *newer)


def names(checkpoints: Iterable[Checkpoint], user_entries: Mapping[str, UserEntry]) -> frozenset[str]:
    """Return every name that some live checkpoint has or had."""
    return frozenset(name for entry in checkpoints for name in entry.pins) | user_entries.keys()


def live_user_entries(
    checkpoints: Mapping[int, Checkpoint], user_entries: Mapping[str, UserEntry]
) -> dict[str, UserEntry]:
    """Return the user entries that still affect these live checkpoints.

    A name of a retired checkpoint has no owner. An entry that takes a name away is dropped with the last checkpoint it
    was taken from.
    """
    found = {}
    for name, (slot, seq) in user_entries.items():
        left = seq if seq in checkpoints else None
        if left is not None or any(at < slot and name in c.pins for at, c in checkpoints.items()):
            found[name] = UserEntry(slot, left)
    return found
