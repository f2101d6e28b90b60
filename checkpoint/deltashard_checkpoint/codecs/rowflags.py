"""One byte of flags per row: count the rows that have one of some flags, list them, move flags one place up or down.

Each is one pass over the bytes without memory of its own; a trainer does all of it while training stands still.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import kernels

Flags = npt.NDArray[np.uint8]
"""Contiguous uint8 [n]."""


def count_rows(flags: Flags, mask: int) -> int:
    """How many rows have one of the bits of `mask`."""
    return int(kernels.active().count_flags(flags, mask)) if len(flags) else 0


def find_rows(flags: Flags, mask: int) -> npt.NDArray[np.int64]:
    """The rows that have one of the bits of `mask`, ascending."""
    rows = np.empty(count_rows(flags, mask), np.int64)
    if len(rows):
        kernels.active().find_flags(flags, mask, rows)
    return rows


def move_flags(flags: Flags, bits: int, *, left: bool) -> None:
    """Move `bits` of every row one place up (`left`) or down, in place; what is at the target stays set."""
    if len(flags):
        kernels.active().move_flags(flags, bits, left)
