"""Byte layouts of the weight encodings (`vocabulary` defines their names).

A frame stores rows [n, D] as three sections of fixed size, each C-contiguous and little-endian:

    encoding          scales       biases       codes (bytes per row)
    fp32 fp16 bf16    none         none         D values, raw or cast
    fp64              none         none         D values
    q8                float32 [n]  float32 [n]  D
    q4                float16 [n]  float16 [n]  ceil(D / 2), first value in the low nibble
    q3                float16 [n]  float16 [n]  ceil(3 D / 8), value i in bits [3 i, 3 i + 3) of the row, low bits first
    q2                float16 [n]  float16 [n]  ceil(D / 4), first value in the low bits

A value decodes as `code * (scale * 2**exponent) + (bias * 2**exponent)` in float32, rounded once (like torch's unpack
on machines with a fused multiply-add). Each frame has one `exponent`: 0 except for q4, q3, q2, and normally 0 there,
too. Rows quantized over their plain range (`quantizer.PLAIN`) at exponent 0, reordered to `codes | scale | bias`, equal
the rows of `torch.ops.quantized.embedding_bag_{byte,4bit,2bit}_prepack` bit for bit, except q8 rows that span less than
2**-14, where torch's epsilon causes large errors.

Two kinds of row deviate from that formula, so that every row decodes correctly:

* *Constant rows* of q4, q3, q2 whose value float16 cannot hold are stored exactly, in place: the scale is a float16
  NaN `0x7D00 | low byte`, the bias word holds the upper 16 bits of the float32 value, the first code byte bits 8..15.
* *Exceptional rows* (NaN, Inf, or a magnitude that scale and bias cannot represent at the frame's exponent) are stored
  losslessly in a side list, `quantizer.Encoded.exceptions`, which overrides the sections on decode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import ENCODINGS, Encoding

MAX_COLUMNS = 1 << 20
"""Maximum columns per row; keeps every offset within a frame far from overflow."""

DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float64": np.dtype(np.float64),
}
"""Weight dtypes by name, with the numpy dtype that carries them (numpy has no bfloat16: its bits as uint16)."""


_RAW: dict[str, Encoding] = {e.dtype: e for e in ENCODINGS.values() if e.dtype is not None}


class EncodingError(UserError):
    """The codecs do not support this dtype, shape or buffer."""


class SectionBytes(NamedTuple):
    """Sizes in bytes of a frame's three weight sections."""

    scales: int
    biases: int
    codes: int


def section_bytes(encoding: Encoding, rows: int, columns: int) -> SectionBytes:
    """Return the sizes of the sections (scales, biases, codes) of `rows` rows with `columns` values each."""
    if rows < 0 or not 1 <= columns <= MAX_COLUMNS:
        raise EncodingError(f"{rows} rows of {columns} columns", remedy=f"1 to {MAX_COLUMNS} columns")
    scale_bytes = rows * encoding.scale_bytes
    return SectionBytes(scale_bytes, scale_bytes, rows * encoding.row_code_bytes(columns))


def raw_encoding(dtype: str) -> Encoding:
    """Return the encoding that stores weights of `dtype` bit for bit."""
    encoding = _RAW.get(dtype)
    if encoding is None:
        raise EncodingError(f"weight dtype {dtype!r}", remedy=f"one of {', '.join(DTYPES)}")
    return encoding


def effective_encoding(encoding: Encoding, dtype: str, columns: int) -> Encoding:
    """Return `encoding`, or the raw one of `dtype` if `encoding` would not shrink rows (very few columns).

    So a stored frame is never larger than its rows. fp32 guarantees bit-exact rows, so it stores float64 rows
    unchanged.
    """
    raw = raw_encoding(dtype)
    if encoding is raw or (encoding.name == "fp32" and dtype == "float64"):
        return raw
    return encoding if sum(section_bytes(encoding, 1, columns)) < sum(section_bytes(raw, 1, columns)) else raw


def dtype_name(array: npt.NDArray[np.generic], dtype: str | None) -> str:
    """Return the weight dtype of `array`: `dtype` if given (required for bfloat16 as uint16), else the array's own."""
    name = dtype if dtype is not None else str(array.dtype)
    held = DTYPES.get(name)
    if held is None:
        raise EncodingError(
            f"weight dtype {name!r}",
            remedy=f'one of {", ".join(DTYPES)}; bits as uint16 need dtype="bfloat16"',
        )
    if array.dtype != held:
        raise EncodingError(f"an array of {array.dtype} given as {name}", remedy=f"{name} travels as {held}")
    return name
