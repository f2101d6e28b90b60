"""The kernels of `_native.c`, called through ctypes, which releases the GIL for the duration of each call.

Functions, arguments and results are those of `numpy_kernel`, which documents them. Importing this module raises
`ImportError` if the extension was not built, or has another ABI; `kernel_choice` then falls back to numpy.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]

ABI = 3
AS_IS, AS_HALF, AS_BFLOAT = 0, 1, 2
_AS_DOUBLE = 3
LEVELS = ("default", "avx2", "avx512")


def _load() -> ctypes.CDLL:
    path = Path(__file__).with_name("_native.abi3.so")
    try:
        library = ctypes.CDLL(str(path))
        abi = library.ds_abi()
    except (OSError, AttributeError) as e:
        raise ImportError(f"no native kernels at {path}: {e}") from e
    if abi != ABI:
        raise ImportError(f"{path} has kernels of ABI {abi}, this version needs {ABI}: build it again")
    return library


_library = _load()
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


def _declare(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_library, name)
    function.restype = result
    function.argtypes = arguments
    return function


_isa = _declare("ds_isa", _I, _I)
_encode = _declare("ds_encode", _L, _P, _L, _L, _I, _F, _I, _P, _P, _P, _P, _P)
_ranges = _declare("ds_ranges", None, _P, _L, _L, _P, _P)
_greedy = _declare("ds_greedy", _I, _P, _L, _L, _I, _I, _I, _P, _P)
_refit = _declare("ds_refit", _I, _P, _L, _L, _I, _P, _I, _I, _P, _P)
_decode = _declare("ds_decode", None, _P, _L, _P, _P, _I, _F, _L, _P, _L, _L, _I, _P, _P, _L)
_hash = _declare("ds_hash", None, _P, _L, _P, _P, _L, _P)
_check_rows = _declare("ds_check_rows", _L, _P, _P, _L, _L)
_copy = _declare("ds_copy", None, _P, _L, _P, _L, _L, _P, _P, _L)
_gather = _declare("ds_gather", None, _P, _L, _L, _P, _L, _P, _P)
_find = _declare("ds_find", _L, _P, _L, _I, _P)
_move_flags = _declare("ds_move_flags", None, _P, _L, _I, _I)
_delta_bytes = _declare("ds_delta_bytes", _L, _P, _L)
_write_deltas = _declare("ds_write_deltas", None, _P, _L, _P)
_read_deltas = _declare("ds_read_deltas", _I, _P, _L, _L, _L, _P, _L)
_write_bitmap = _declare("ds_write_bitmap", None, _P, _L, _L, _P)
_read_bitmap = _declare("ds_read_bitmap", _L, _P, _L, _L, _P, _L)


def choose_level(most: int = 2) -> int:
    """Select the widest available instruction set, at most `most` (index into LEVELS). Returns the selected index."""
    return int(_isa(most))


choose_level()


def _at(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _or_null(array: Array) -> int | None:
    return _at(array) if len(array) else None


def encode(  # noqa: PLR0913
    x: Array,
    bits: int,
    unit: float,
    given: bool,
    lo: Array,
    hi: Array,
    scales: Array,
    biases: Array,
    codes: Array,
) -> int:
    n, d = x.shape
    return int(
        _encode(_at(x), n, d, bits, unit, given, _at(lo), _at(hi), _at(scales), _at(biases), _at(codes))
    )


def row_ranges(x: Array, lo: Array, hi: Array) -> None:
    _ranges(_at(x), *x.shape, _at(lo), _at(hi))


def greedy(x: Array, bits: int, bins: int, steps: int, lo: Array, hi: Array) -> None:
    if _greedy(_at(x), *x.shape, bits, bins, steps, _at(lo), _at(hi)):
        raise MemoryError


def refit(x: Array, bits: int, trims: Array, passes: int, lo: Array, hi: Array) -> None:
    if _refit(_at(x), *x.shape, bits, _at(trims), len(trims), passes, _at(lo), _at(hi)):
        raise MemoryError


def decode(  # noqa: PLR0913
    codes: Array,
    scales: Array,
    biases: Array,
    bits: int,
    unit: float,
    first: int,
    out: Array,
    store: int,
    rows: Array,
    take: Array,
) -> None:
    n, width = codes.shape
    kind = _AS_DOUBLE if out.itemsize == 8 else store
    _decode(
        _at(codes), width, _at(scales), _at(biases), bits, unit, first,
        _at(out), out.strides[0], out.shape[1], kind, _at(rows), _or_null(take), n,
    )  # fmt: skip


def check_rows(rows: Array, take: Array, limit: int) -> int:
    return int(_check_rows(_at(rows), _or_null(take), len(rows), limit))


def copy_scatter(values: Array, out: Array, rows: Array, take: Array) -> None:
    n, width = values.shape
    _copy(_at(values), values.strides[0], _at(out), out.strides[0], width, _at(rows), _or_null(take), n)


def gather(values: Array, rows: Array, out: Array, places: Array) -> None:
    _gather(_at(values), values.strides[0], values.shape[1], _at(rows), len(rows), _at(out), _or_null(places))


def count_flags(flags: Array, mask: int) -> int:
    return int(_find(_at(flags), len(flags), mask, None))


def find_flags(flags: Array, mask: int, rows: Array) -> int:
    return int(_find(_at(flags), len(flags), mask, _at(rows)))


def move_flags(flags: Array, bits: int, left: bool) -> None:
    _move_flags(_at(flags), len(flags), bits, left)


def hash_rows(words: Array, weights: Array, out: Array) -> None:
    _hash(_at(words), words.shape[1], _at(weights), None, len(words), _at(out))


def hash_some_rows(words: Array, weights: Array, rows: Array, out: Array) -> None:
    _hash(_at(words), words.shape[1], _at(weights), _at(rows), len(rows), _at(out))


def delta_bytes(ids: Array) -> int:
    return int(_delta_bytes(_at(ids), len(ids)))


def write_deltas(ids: Array, out: Array) -> None:
    _write_deltas(_at(ids), len(ids), _at(out))


def read_deltas(data: Array, low: int, high: int, ids: Array) -> int:
    return int(_read_deltas(_at(data), len(data), low, high, _at(ids), len(ids)))


def write_bitmap(ids: Array, first: int, out: Array) -> None:
    _write_bitmap(_at(ids), len(ids), first, _at(out))


def read_bitmap(data: Array, first: int, ids: Array) -> int:
    return int(_read_bitmap(_at(data), len(data), first, _at(ids), len(ids)))
