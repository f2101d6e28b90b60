"""Byte layouts of the encodings of weight rows (`vocabulary` has their names).

A frame stores rows [n, D] as three sections of fixed size, each C-contiguous and little-endian:

    encoding          scales       biases       codes (bytes per row)
    fp32 fp16 bf16    none         none         D values, raw or cast
    fp64              none         none         D values
    q8                float32 [n]  float32 [n]  D
    q4                float16 [n]  float16 [n]  ceil(D / 2), first value in the low nibble
    q3                float16 [n]  float16 [n]  ceil(3 D / 8), value i in bits [3 i, 3 i + 3) of the row, low bits first
    q2                float16 [n]  float16 [n]  ceil(D / 4), first value in the low bits

A value decodes as `code * (scale * 2**exponent) + (bias * 2**exponent)` in float32, rounded once (as torch's unpack
does on every machine with a fused multiply-add), with one `exponent` per frame: 0 for all but q4, q3, q2, and normally
0 there too. Rows over their plain range (`quantizer.PLAIN`) at exponent 0, reordered to `codes | scale | bias`, are
the rows of `torch.ops.quantized.embedding_bag_{byte,4bit,2bit}_prepack`, bit for bit. q8 rows that span less than
2**-14 are not: torch's epsilon spoils those.

Two kinds of row are not what that formula says, so that nothing ever decodes as garbage:

* *Constant rows* of q4, q3, q2 whose value float16 cannot hold are stored exactly, in place: the scale is a float16
  NaN `0x7D00 | low byte`, the bias word holds the upper 16 bits of the float32 value, the first code byte bits 8..15.
* *Exceptional rows* (NaN, Inf, or a magnitude the scale and bias cannot carry at the frame's exponent) are kept
  losslessly in a side list, the `side_list` bytes of `quantizer.Encoded`, which override the sections on decode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.vocabulary import ENCODINGS, Encoding

MAX_COLUMNS = 1 << 20
"""Widest row the codecs take; keeps every offset within a frame far from overflow."""

DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float64": np.dtype(np.float64),
}
"""Weight dtypes by name, and the numpy dtype that carries them (numpy has no bfloat16: its bits as uint16)."""


_RAW: dict[str, Encoding] = {e.dtype: e for e in ENCODINGS.values() if e.dtype is not None}


class EncodingError(UserError):
    """A dtype, shape or buffer that the codecs cannot take."""


class SectionBytes(NamedTuple):
    """Sizes in bytes of a frame's three weight sections."""

    scales: int
    biases: int
    codes: int


def section_bytes(encoding: Encoding, rows: int, columns: int) -> SectionBytes:
    """Sizes of the sections (scales, biases, codes) that hold `rows` rows of `columns` values."""
    if rows < 0 or not 1 <= columns <= MAX_COLUMNS:
        raise EncodingError(f"{rows} rows of {columns} columns", remedy=f"1 to {MAX_COLUMNS} columns")
    scale_bytes = rows * encoding.scale_bytes
    return SectionBytes(scale_bytes, scale_bytes, rows * encoding.row_code_bytes(columns))


def raw_encoding(dtype: str) -> Encoding:
    """The encoding that keeps weights of `dtype` bit for bit."""
    encoding = _RAW.get(dtype)
    if encoding is None:
        raise EncodingError(f"weight dtype {dtype!r}", remedy=f"one of {', '.join(DTYPES)}")
    return encoding


def effective_encoding(encoding: Encoding, dtype: str, columns: int) -> Encoding:
    """`encoding`, or the raw one of `dtype` where `encoding` would not make rows smaller (very few columns).

    With it a stored frame is never larger than the rows it holds. fp32 promises that rows come back bit for bit, so
    float64 rows are kept as they are under it.
    """
    raw = raw_encoding(dtype)
    if encoding is raw or (encoding.name == "fp32" and dtype == "float64"):
        return raw
    return encoding if sum(section_bytes(encoding, 1, columns)) < sum(section_bytes(raw, 1, columns)) else raw


def dtype_name(array: npt.NDArray[np.generic], dtype: str | None) -> str:
    """The weight dtype of `array`: `dtype` when given (needed for bfloat16 carried as uint16), else the array's own."""
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
