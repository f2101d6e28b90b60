"""LIST results of `log/` (slots and folded states), and the content of `log/HINT`. Pure.

A log is dense: a missing slot below an existing one is a gap, never the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deltashard_checkpoint.format.canonical_json import canonical, content_digest
from deltashard_checkpoint.log.entry import FoldName, seq_of
from deltashard_checkpoint.log.folded_state import fold_of

_HINT = re.compile(
    rb'\{"fold":(-1|\d{1,15}),"hash":"([0-9a-f]{32})","seq":(-1|\d{1,15}),"whole":(true|false)\}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """The content of `log/HINT`; -1: unknown."""

    fold: int = -1
    """Slot of the newest folded state."""
    seq: int = -1
    """A slot that exists."""
    whole: bool = True
    """False: a copy or a removal is in progress, and the objects must not be taken for a run."""

    @classmethod
    def of(cls, data: bytes) -> Hint:
        """Parse HINT. Bytes without a matching hash yield an empty hint: corruption must not make up a slot."""
        match = _HINT.fullmatch(data[:200])
        if match is None:
            return cls()
        found = cls(fold=int(match[1]), seq=int(match[3]), whole=match[4] == b"true")
        return found if found.data == data else cls()

    @property
    def data(self) -> bytes:
        fields = {"fold": self.fold, "seq": self.seq, "whole": self.whole}
        digest = content_digest(canonical(fields))
        return canonical({**fields, "hash": digest})


REMOVAL = Hint(seq=10**14, whole=False)
"""HINT of a run under removal: its slot is beyond the end of any log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Slots from `first` on, and all folded states."""

    first: int
    """Start of the listing: lower slots are unknown."""
    seqs: tuple[int, ...]
    """Slots, ascending."""
    folds: tuple[FoldName, ...]
    """Newest first."""

    @property
    def tip(self) -> int:
        """The highest slot; `first - 1` when there is none."""
        return self.seqs[-1] if self.seqs else self.first - 1

    def missing_slot(self, after: int) -> int | None:
        """Return the highest missing slot above `after` and below the tip, or None."""
        expected = self.tip
        for seq in reversed(self.seqs):
            if expected <= after:
                return None
            if seq != expected:
                return expected
            expected -= 1
        return expected if expected > after else None


def listing(keys: Iterable[str], first: int) -> Listing:
    """Parse keys, relative to the run's root and in the store's order, into the slots from `first` and the folds."""
    seqs, folds = [], []
    for key in keys:
        if (seq := seq_of(key)) is not None:
            if seq >= first:
                seqs.append(seq)
        elif (name := fold_of(key)) is not None:
            folds.append(name)
    return Listing(first=first, seqs=tuple(seqs), folds=tuple(sorted(folds, reverse=True)))
