"""What a LIST of `log/` shows: slots and folded states; and what `log/HINT` says. Pure.

A log is dense: a slot that is missing below one that is there is a gap, and never the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deltashard_checkpoint.log.entry import FoldName, seq_of
from deltashard_checkpoint.log.folded_state import fold_of

_HINT = re.compile(rb'\{"fold":(-1|\d{1,15}),"seq":(\d{1,15})\}')

REMOVAL_SLOT = 10**14
"""The slot that HINT of a run under removal names: 15 digits, and beyond any log."""


def hinted(data: bytes) -> tuple[int, int]:
    """(slot of a folded state, a slot that exists), as HINT's bytes have it; -1 for what they do not say."""
    match = _HINT.fullmatch(data[:100])
    return (-1, -1) if match is None else (int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Slots from `first` on, and all folded states."""

    first: int
    """The listing began here: of slots below it nothing is known."""
    seqs: tuple[int, ...]
    """Slots, ascending."""
    folds: tuple[FoldName, ...]
    """Newest first."""

    @property
    def tip(self) -> int:
        """The highest slot; `first - 1` when there is none."""
        return self.seqs[-1] if self.seqs else self.first - 1

    def hole(self, after: int) -> int | None:
        """The highest slot from `after` + 1 on that is missing below the tip; None when they are all there."""
        expected = self.tip
        for seq in reversed(self.seqs):
            if expected <= after:
                return None
            if seq != expected:
                return expected
            expected -= 1
        return expected if expected > after else None


def listing(keys: Iterable[str], first: int) -> Listing:
    """What these keys, relative to the run's root and in the store's order, say from slot `first` on."""
    seqs, folds = [], []
    for key in keys:
        if (seq := seq_of(key)) is not None:
            if seq >= first:
                seqs.append(seq)
        elif (name := fold_of(key)) is not None:
            folds.append(name)
    return Listing(first=first, seqs=tuple(seqs), folds=tuple(sorted(folds, reverse=True)))
