"""Decoding of row sections, optionally fused with the scatter into a model's tensors.

`decode_scatter` writes decoded rows directly to their target positions, in the target's dtype, in one pass. It gives
the same bits as `decode_rows` followed by a scatter. `scatter` does the same for optimizer-state fields. Stored data is
untrusted: section sizes and row positions are checked before the first byte is written.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import kernel_choice
from deltashard_checkpoint.codecs.encoding import DTYPES, EncodingError, dtype_name, section_bytes
from deltashard_checkpoint.codecs.quantizer import MAX_EXPONENT, MIN_EXPONENT, narrowed, widened
from deltashard_checkpoint.codecs.side_list import read_exceptions
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.vocabulary import Encoding

Array = npt.NDArray[np.generic]
Rows = npt.NDArray[np.int64]
Take = npt.NDArray[np.bool_]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_ALL: Take = np.empty(0, np.bool_)
_NONE = np.empty(0, np.uint8)


def decode_rows(  # noqa: PLR0913
    encoding: Encoding,
    scales: Buffer,
    biases: Buffer,
    codes: Buffer,
    exponent: int,
    *,
    rows: int,
    columns: int,
    exceptions: Buffer = b"",
    dtype: str = "float32",
) -> Array:
    """Decode a frame's sections to a new [rows, columns] array of `dtype` (bfloat16 as uint16).

    Raises `EncodingError` for an unknown dtype, `CorruptObject` for sections of the wrong size.
    """
    if dtype not in DTYPES:
        raise EncodingError(f"weight dtype {dtype!r}", remedy=f"one of {', '.join(DTYPES)}")
    section_bytes(encoding, rows, columns)
    out = np.empty((rows, columns), DTYPES[dtype])
    decode_scatter(
        encoding,
        scales,
        biases,
        codes,
        exponent,
        out=out,
        rows=np.arange(rows),
        exceptions=exceptions,
        dtype=dtype,
    )
    return out


def decode_scatter(  # noqa: PLR0913
    encoding: Encoding,
    scales: Buffer,
    biases: Buffer,
    codes: Buffer,
    exponent: int,
    *,
    out: Array,
    rows: Rows,
    take: Take | None = None,
    exceptions: Buffer = b"",
    dtype: str | None = None,
    columns: int | None = None,
    first_column: int = 0,
) -> None:
    """Set out[rows[i], :] to decoded row i, columns [first_column, first_column + C), for every i with take[i].

    Args:
        encoding: encoding of the sections.
        scales: section bytes as written by `encode_rows`, of the exact size; likewise `biases` and `codes`.
        biases: see `scales`.
        codes: see `scales`.
        exponent: exponent of the frame.
        out: target [R, C]: float32, float16, float64, or uint16 holding bfloat16 with `dtype="bfloat16"`. Each row
            must be contiguous; rows may be strided (a column range of a wider tensor).
        rows: int64 [n], position in `out` of each of the frame's n rows.
        take: bool [n]; other rows are not written, and their positions may have any value. None: all.
        exceptions: the frame's side list.
        dtype: name of `out`'s dtype if the array does not determine it.
        columns: columns of the frame if it is wider than `out`; None: C.
        first_column: the frame's column to write to out[:, 0].

    Raises:
        EncodingError: unknown dtype, or arguments of the wrong shape, dtype or layout.
        CorruptObject: sections of the wrong size, or a row position outside `out`; then nothing was written.
    """
    name = dtype_name(out, dtype)
    chosen = _check_target(out, rows, take)
    n, wide = len(rows), out.shape[1] if columns is None else columns
    if first_column < 0 or first_column + out.shape[1] > wide:
        raise EncodingError(f"columns [{first_column}, {first_column + out.shape[1]}) of a frame of {wide}")
    sections = [
        _section(b, size, what)
        for b, size, what in zip(
            (scales, biases, codes),
            section_bytes(encoding, n, wide),
            ("scales", "biases", "codes"),
            strict=True,
        )
    ]
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT or (exponent and encoding.scale_bytes != 2):
        raise CorruptObject(f"exponent {exponent} of a {encoding.name} frame")
    positions, values = read_exceptions(
        np.frombuffer(exceptions, np.uint8) if len(exceptions) else _NONE, n, wide
    )
    if n == 0 or out.shape[1] == 0:
        return
    stop = first_column + out.shape[1]
    if encoding.quantized:
        _dequantize(encoding, sections, exponent, first_column, out, name, rows, chosen)
    else:
        _uncast(encoding, sections[2].reshape(n, -1), first_column, out, name, rows, chosen)
    if len(positions):
        if take is not None:
            kept = take[positions]
            positions, values = positions[kept], values[kept]
        out[rows[positions]] = narrowed(values[:, first_column:stop], name)


def scatter(
    values: Array,
    *,
    out: Array,
    rows: Rows,
    take: Take | None = None,
    values_dtype: str | None = None,
    dtype: str | None = None,
) -> None:
    """Set out[rows[i]] = values[i] for every i with take[i]: optimizer state, row-wise [n] or point-wise [n, C].

    Equal dtypes are copied as bytes. Different float dtypes are converted; bfloat16 is passed as uint16 with
    `values_dtype="bfloat16"` (and `dtype="bfloat16"` for `out`). Raises like `decode_scatter`.
    """
    if values.ndim != out.ndim or values.ndim not in (1, 2) or values.shape[1:] != out.shape[1:]:
        raise EncodingError(f"values {list(values.shape)} into {list(out.shape)}")
    source = (
        values.reshape(len(values), -1)
        if len(values)
        else values.reshape(0, 1 if values.ndim == 1 else values.shape[1])
    )
    target = out[:, None] if out.ndim == 1 else out
    chosen = _check_target(target, rows, take)
    if len(rows) != len(values):
        raise EncodingError(f"{len(values)} values for {len(rows)} rows")
    if not source.flags.c_contiguous:
        raise EncodingError(f"values of strides {list(values.strides)}", remedy="a C-contiguous array")
    from_name = values_dtype or str(values.dtype)
    to_name = dtype or str(out.dtype)
    if from_name != to_name:
        source = narrowed(widened(source, dtype_name(source, values_dtype)), dtype_name(target, dtype))
    if source.dtype != target.dtype:
        raise EncodingError(f"values of {source.dtype} into {target.dtype}, both named {to_name}")
    if source.size:
        _copy(np.ascontiguousarray(source), target, rows, chosen)


def _check_target(out: Array, rows: Rows, take: Take | None) -> Take:
    if (
        out.ndim != 2
        or not out.flags.writeable
        or (out.size and out.shape[1] > 1 and out.strides[1] != out.itemsize)
    ):
        raise EncodingError(
            f"a target of shape {list(out.shape)}, strides {list(out.strides)}",
            remedy="writable [R, C], rows contiguous",
        )
    if rows.ndim != 1 or rows.dtype != np.int64 or not rows.flags.c_contiguous:
        raise EncodingError(f"row positions of {rows.dtype}{list(rows.shape)}", remedy="contiguous int64 [n]")
    chosen = _ALL
    if take is not None:
        if take.shape != rows.shape or take.dtype != np.bool_ or not take.flags.c_contiguous:
            raise EncodingError(
                f"take of {take.dtype}{list(take.shape)}", remedy=f"contiguous bool [{len(rows)}]"
            )
        if len(take):
            chosen = take
    bad = int(kernel_choice.active().check_rows(rows, chosen, out.shape[0]))
    if bad >= 0:
        raise CorruptObject(f"row position {int(rows[bad])} in a target of {out.shape[0]} rows")
    return chosen


def _section(buffer: Buffer, size: int, what: str) -> npt.NDArray[np.uint8]:
    array = np.frombuffer(buffer, np.uint8) if size or len(buffer) else np.empty(0, np.uint8)
    if len(array) != size:
        raise CorruptObject(f"{what} of {len(array)} bytes, {size} expected")
    return array


def _dequantize(
    e: Encoding,
    sections: list[npt.NDArray[np.uint8]],
    exponent: int,
    first: int,
    out: Array,
    name: str,
    rows: Rows,
    take: Take,
) -> None:
    k = kernel_choice.active()
    word = np.float32 if e.scale_bytes == 4 else np.uint16
    scales, biases = sections[0].view(word), sections[1].view(word)
    store = {"float16": k.AS_HALF, "bfloat16": k.AS_BFLOAT}.get(name, k.AS_IS)
    target = out.view(np.uint16) if name == "float16" else out
    codes = sections[2].reshape(len(rows), -1)
    k.decode(codes, scales, biases, e.bits, 2.0**exponent, first, target, store, rows, take)


def _uncast(
    e: Encoding, codes: npt.NDArray[np.uint8], first: int, out: Array, name: str, rows: Rows, take: Take
) -> None:
    assert e.dtype is not None
    values = codes.view(DTYPES[e.dtype])[:, first : first + out.shape[1]]
    if e.dtype != name:
        values = narrowed(widened(np.ascontiguousarray(values), e.dtype), name)
    _copy(values, out, rows, take)


def _copy(values: Array, out: Array, rows: Rows, take: Take) -> None:
    """Scatter rows of equal dtype as bytes; each row of `values` is contiguous, with any stride between rows."""
    k = kernel_choice.active()
    k.copy_scatter(_row_bytes(values), _row_bytes(out), rows, take)


def _row_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """View the rows of [n, C] as uint8 [n, C * itemsize], whatever the stride between rows."""
    width = array.shape[1] * array.itemsize
    column = array[:, :1].view(np.uint8) if array.itemsize > 1 else array[:, :1]
    return np.lib.stride_tricks.as_strided(column, (len(array), width), (array.strides[0], 1))
