"""Who bears a pinned name: the commits that said it, and what a person said since. Pure.

A checkpoint bears the names it was committed under. A word (a `pin` entry) about a name takes it from all checkpoints
before it, and gives it to one or to none; checkpoints committed later under the name bear it as ever. The newest word
or commit counts: the last of a name's bearers is the one that retention keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from deltashard_checkpoint.log.entry import Checkpoint


class UserEntry(NamedTuple):
    """What a person said last of a name."""

    slot: int
    """Of the entry that says so."""
    checkpoint: int | None
    """A live checkpoint; None: nobody."""


def pinned_as(
    checkpoints: Mapping[int, Checkpoint], user_entries: Mapping[str, UserEntry], name: str
) -> tuple[int, ...]:
    """The live checkpoints that bear `name`, the one that counts last."""
    word = user_entries.get(name)
    after = -1 if word is None else word.slot
    newer = tuple(seq for seq, entry in checkpoints.items() if seq > after and name in entry.pins)
    return newer if word is None or word.checkpoint is None else (word.checkpoint, *newer)


def names(checkpoints: Iterable[Checkpoint], user_entries: Mapping[str, UserEntry]) -> frozenset[str]:
    """Every name that some live checkpoint bears or bore."""
    return frozenset(name for entry in checkpoints for name in entry.pins) | user_entries.keys()


def live_user_entries(
    checkpoints: Mapping[int, Checkpoint], user_entries: Mapping[str, UserEntry]
) -> dict[str, UserEntry]:
    """The words that still say something of these live checkpoints.

    Of a checkpoint that is no more the name is nobody's; and a word that takes a name away is forgotten with the last
    checkpoint that it was taken from.
    """
    found = {}
    for name, (slot, seq) in user_entries.items():
        left = seq if seq in checkpoints else None
        if left is not None or any(at < slot and name in c.pins for at, c in checkpoints.items()):
            found[name] = UserEntry(slot, left)
    return found
