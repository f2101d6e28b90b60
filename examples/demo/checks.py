"""Compares the content of a restored state with the state at the snapshot.

The training process copies its live tensors at each snapshot and again right after a restore (`evidence.py`);
neither copy passes through deltashard. A restored state is *exact* when

* every optimizer state and every dense parameter has the same bits, and
* every table row is `decode(encode(row))` of the row in the snapshot, bit for bit.
  A row that has not been trained since an earlier restore is already a decoded row; it must be restored unchanged.

This module repeats the encoding from the copy, so a row lost, swapped, torn or left over from another step shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from deltashard_checkpoint.codecs.decoder import decode_rows
from deltashard_checkpoint.codecs.encoding import section_bytes
from deltashard_checkpoint.codecs.quantizer import Search, encode_rows
from deltashard_checkpoint.vocabulary import ENCODINGS

_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyComparison:
    """The outcome of comparing one restored state with its snapshot."""

    rows: int
    wrong_rows: int
    """Rows that equal neither the snapshot's row nor its encoded and decoded value."""
    wrong_names: tuple[str, ...]
    """Optimizer states and dense parameters that differ in any bit, or are missing."""
    worst: float
    """Largest difference of a restored weight from the snapshot's weight: the encoding's own error."""

    @property
    def exact(self) -> bool:
        return not self.wrong_rows and not self.wrong_names


def compare(
    snapshot: Path, restored: dict[str, np.ndarray], *, encoding: str, search: Search | None = None
) -> CopyComparison:
    """Compare `restored` (by the names of the copies) with the copy in folder `snapshot`."""
    names = sorted(path.name.removesuffix(".npy") for path in snapshot.glob("*.npy"))
    wrong = [name for name in restored if name not in names]
    rows = wrong_rows = 0
    worst = 0.0
    for name in names:
        was = np.load(snapshot / f"{name}.npy", mmap_mode="r")
        now = restored.get(name)
        if now is None or now.shape != was.shape or now.dtype != was.dtype:
            wrong.append(name)
        elif _is_table(name, was):
            rows += len(was)
            count, error = _compare_rows(was, now, encoding, search)
            wrong_rows += count
            worst = max(worst, error)
        elif was.tobytes() != now.tobytes():
            wrong.append(name)
    return CopyComparison(rows=rows, wrong_rows=wrong_rows, wrong_names=tuple(wrong), worst=worst)


def load_copy(folder: Path) -> dict[str, np.ndarray]:
    return {path.name.removesuffix(".npy"): np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}


def _is_table(name: str, array: np.ndarray) -> bool:
    return (
        ":" not in name
        and array.ndim == 2
        and name.split(".", maxsplit=1)[0] in {"items", "candidates", "pairs"}
    )


def _compare_rows(
    was: np.ndarray, now: np.ndarray, encoding: str, search: Search | None
) -> tuple[int, float]:
    wrong, worst = 0, 0.0
    for start in range(0, len(was), _CHUNK_ROWS):
        before = np.ascontiguousarray(was[start : start + _CHUNK_ROWS])
        after = np.ascontiguousarray(now[start : start + _CHUNK_ROWS])
        fine = _same_bits(before, after) | _same_bits(_round_trip(before, encoding, search), after)
        wrong += int((~fine).sum())
        worst = max(worst, float(np.abs(before - after).max()))
    return wrong, worst


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.view(np.uint32) == b.view(np.uint32)).all(axis=1)


def _round_trip(rows: np.ndarray, encoding: str, search: Search | None) -> np.ndarray:
    scales, biases, codes = (bytearray(size) for size in section_bytes(ENCODINGS[encoding], *rows.shape))
    encoded = encode_rows(ENCODINGS[encoding], rows, scales, biases, codes, search=search)
    return decode_rows(
        ENCODINGS[encoding],
        scales,
        biases,
        codes,
        encoded.exponent,
        rows=rows.shape[0],
        columns=rows.shape[1],
        exceptions=encoded.exceptions,
    )
