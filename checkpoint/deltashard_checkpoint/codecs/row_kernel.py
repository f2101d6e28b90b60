"""Kernels over table rows: count and shift flags, gather rows, hash rows.

*Flags* are one byte per row. Each call is one pass over the bytes without allocation, while training is paused.

*Gathering* copies selected rows to a contiguous buffer. It prefetches rows, because they are scattered in memory, and
writes large results with non-temporal stores, because another process reads them next.

*Hashes* are one 64-bit multilinear hash per row: h = sum_j w_j * x_j mod 2**64 over the row's 32-bit words. They detect
changed rows if nothing else can (optimizers that may change rows that were not looked up). The weights w_j are random
odd 64-bit numbers drawn from a seed. Several sections (weights, optimizer state) are hashed as one long row, with
continuous word numbers. A row whose size is not a multiple of 4 bytes is zero-padded. The hash uses plain wrapping
multiply-adds, so it is equal in numpy, C and torch (CUDA), and additive, so sections are hashed in place.

Collisions: a change of a single word is always detected (w_j is odd). A change of several words is missed with
probability at most 2**-(63 - v), over the seed, where 2**v is the largest power of two that divides all their
differences: 2**-63 if the lowest bit of any word changed, and 2**-32 in the worst case, when only the sign bits of two
or more words flipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import kernel_choice
from deltashard_checkpoint.codecs.encoding import EncodingError

Flags = npt.NDArray[np.uint8]
"""Contiguous uint8 [n]."""


def count_rows(flags: Flags, mask: int) -> int:
    """Count the rows that have a bit of `mask`."""
    return int(kernel_choice.active().count_flags(flags, mask)) if len(flags) else 0


def find_rows(flags: Flags, mask: int) -> npt.NDArray[np.int64]:
    """Return the rows that have a bit of `mask`, ascending."""
    rows = np.empty(count_rows(flags, mask), np.int64)
    if len(rows):
        kernel_choice.active().find_flags(flags, mask, rows)
    return rows


def move_flags(flags: Flags, bits: int, *, left: bool) -> None:
    """Shift `bits` of every row one bit up (`left`) or down, in place; target bits that are already set stay set."""
    if len(flags):
        kernel_choice.active().move_flags(flags, bits, left)


Bytes = npt.NDArray[np.uint8]


def gather_rows(values: Bytes, rows: npt.NDArray[np.int64], out: Bytes) -> None:
    """Set out[i] = values[rows[i]].

    Args:
        values: uint8 [R, w], each row contiguous, any stride between rows.
        rows: contiguous int64 [n], in any order, repeats allowed.
        out: C-contiguous uint8 [n, w].

    Raises:
        EncodingError: shapes that do not match, or a position outside of `values`.
    """
    if (
        values.ndim != 2
        or values.strides[1] != 1
        or rows.dtype != np.int64
        or not rows.flags.c_contiguous
        or out.shape != (len(rows), values.shape[1])
        or not out.flags.c_contiguous
    ):
        raise EncodingError(
            f"rows {list(rows.shape)} of {list(values.shape)} into {list(out.shape)}",
            remedy="uint8 [R, w], int64 [n] and uint8 [n, w], contiguous",
        )
    if not len(rows):
        return
    k = kernel_choice.active()
    bad = int(k.check_rows(rows, _ALL, len(values)))
    if bad >= 0:
        raise EncodingError(f"row {int(rows[bad])} of a table of {len(values)}")
    k.gather(values, rows, out, _IN_ORDER)


_ALL = np.empty(0, np.bool_)
_IN_ORDER = np.empty(0, np.int64)


def replace_rows(
    values: Bytes, rows: npt.NDArray[np.int64], out: Bytes, places: npt.NDArray[np.int64]
) -> None:
    """Set out[places[i]] = values[rows[i]].

    Args:
        values: uint8 [R, w], as in `gather_rows`.
        rows: int64 [n], likewise.
        out: C-contiguous uint8 [N, w].
        places: contiguous int64 [n], without repeats.

    Raises:
        EncodingError: shapes that do not match, or a position outside of `values` or `out`.
    """
    if (
        values.ndim != 2
        or values.strides[1] != 1
        or any(p.dtype != np.int64 or not p.flags.c_contiguous for p in (rows, places))
        or len(rows) != len(places)
        or out.shape[1:] != values.shape[1:]
        or not out.flags.c_contiguous
    ):
        raise EncodingError(
            f"rows {list(rows.shape)} of {list(values.shape)} into {list(places.shape)} of {list(out.shape)}",
            remedy="uint8 [R, w], int64 [n], uint8 [N, w] and int64 [n], contiguous",
        )
    if not len(rows):
        return
    k = kernel_choice.active()
    for positions, limit in ((rows, len(values)), (places, len(out))):
        bad = int(k.check_rows(positions, _ALL, limit))
        if bad >= 0:
            raise EncodingError(f"row {int(positions[bad])} of a table of {limit}")
    k.gather(values, rows, out, places)


Hashes = npt.NDArray[np.uint64]


def row_words(section: npt.NDArray[np.generic]) -> int:
    """Return the number of 32-bit words of one row of `section` [n] or [n, D]."""
    per_row = section.itemsize * (section.shape[1] if section.ndim == 2 else 1)
    return -(-per_row // 4)


@lru_cache(maxsize=256)
def hash_weights(seed: int, words: int) -> Hashes:
    """Return the odd weights w_0..w_{words-1}: splitmix64 of the seed, lowest bit set. uint64 [words], read-only."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed % (1 << 64)) + np.arange(1, words + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        weights = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    weights.flags.writeable = False
    return weights


def row_hashes(
    sections: Sequence[npt.NDArray[np.generic]],
    seed: int,
    *,
    rows: npt.NDArray[np.int64] | None = None,
    out: Hashes | None = None,
) -> Hashes:
    """Return hashes of all rows, or of `rows`, over all `sections` together: uint64 [n] or [len(rows)].

    Args:
        sections: C-contiguous arrays [n] or [n, D] of any dtypes, all of the same n.
        seed: determines the weights; hashes are comparable only for the same seed and section layout.
        rows: int64 positions to hash, in any order, repeats allowed.
        out: optional uint64 result buffer.

    Raises:
        EncodingError: no section, a section that is not C-contiguous or differs in length, or an invalid position.
    """
    if not sections:
        raise EncodingError("no section to hash")
    n = len(sections[0])
    for s in sections:
        if s.ndim not in (1, 2) or len(s) != n or not s.flags.c_contiguous:
            raise EncodingError(
                f"a section of shape {list(s.shape)}, strides {list(s.strides)}",
                remedy=f"C-contiguous [{n}] or [{n}, D]",
            )
    k = kernel_choice.active()
    if rows is not None:
        if rows.ndim != 1 or rows.dtype != np.int64 or not rows.flags.c_contiguous:
            raise EncodingError(f"rows of {rows.dtype}{list(rows.shape)}", remedy="contiguous int64 [m]")
        bad = int(k.check_rows(rows, np.empty(0, np.bool_), n))
        if bad >= 0:
            raise EncodingError(f"row {int(rows[bad])} of a section of {n}")
    m = n if rows is None else len(rows)
    if out is None:
        out = np.zeros(m, np.uint64)
    elif out.shape != (m,) or out.dtype != np.uint64 or not out.flags.c_contiguous:
        raise EncodingError(f"hashes into {out.dtype}{list(out.shape)}", remedy=f"contiguous uint64 [{m}]")
    else:
        out[:] = 0
    weights = hash_weights(seed, sum(row_words(s) for s in sections))
    at = 0
    for s in sections:
        words = row_words(s)
        if n and words:
            w = weights[at : at + words]
            flat, chosen = _as_words(s, words, rows)
            if chosen is None:
                k.hash_rows(flat, w, out)
            else:
                k.hash_some_rows(flat, w, chosen, out)
        at += words
    return out


def _as_words(
    section: npt.NDArray[np.generic], words: int, rows: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64] | None]:
    """View the section as uint32 [n, words], copied only if rows need padding; also return the rows still to select."""
    n = len(section)
    raw = section.reshape(n, -1).view(np.uint8)
    if raw.shape[1] == 4 * words:
        return raw.view(np.uint32) if raw.ctypes.data % 4 == 0 else raw.copy().view(np.uint32), rows
    if rows is not None:
        raw = raw[rows]
    padded = np.zeros((len(raw), 4 * words), np.uint8)
    padded[:, : raw.shape[1]] = raw
    return padded.view(np.uint32), None
