"""Encoding of rows: `encode_rows` casts or quantizes a block of weights into a frame's buffers.

Quantizing a row has three steps. First its *range* (lo, hi): min and max, or a range with less squared error found by a
`Search`. Then its *scale and bias*, rounded to their stored precision: bias first, scale from the rest of the range.
Last the *codes*, relative to the rounded pair, clipped. For plain ranges the result equals torch's prepack.

Searches. *Greedy* (Check-N-Run, PyTorch's `choose_qparams_optimized`): divide the range into `bins` steps, trim one at
the cheaper end, `bins * ratio` times, and keep the best range visited. *Refit*: for given codes, the scale and bias of
least squared error have a closed form; with v the row minus its mean, s = sum(q v) / (sum q^2 - (sum q)^2 / D), the
bias is -s sum(q) / D, and the remaining error is sum(v^2) - s sum(q v). So each of a few trimmed ranges is fitted once;
the best one gets new codes and is fitted again, `passes` times in total. Refit reaches greedy's error in a tenth of its
passes: one fit moves both ends by the right amount and yields the error, too.

float16 scales reach down to 6e-8 only; rows of a table of 10^9 rows, initialised at 1/sqrt(rows), underflow. So a frame
has a power-of-two exponent. It is 0 while that represents at least 63 of 64 rows well (torch compatibility is the
normal case), else the exponent that represents most rows. Remaining rows, and rows with NaN or Inf, go into the side
list. If the side list costs more than the encoding saves, `fits` is False and the block should be stored raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.codecs import kernel_choice
from deltashard_checkpoint.codecs.encoding import EncodingError, dtype_name, raw_encoding, section_bytes
from deltashard_checkpoint.codecs.numpy_kernel import bfloat_bits
from deltashard_checkpoint.codecs.side_list import exception_bytes, write_exceptions
from deltashard_checkpoint.vocabulary import Encoding

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[np.generic]
Writable = bytearray | memoryview | npt.NDArray[np.uint8]

CONSTANT_TAG = np.uint16(0x7D00)
MIN_EXPONENT, MAX_EXPONENT = -100, 113
NEARLY_INFINITE = np.float32(2.0**128 * (1 - 2.0**-9))
MAX_STARTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Range search of a row; the module docstring describes the three kinds."""

    kind: Literal["plain", "greedy", "refit"] = "plain"
    bins: int = 200
    """greedy: number of steps that the range is divided into."""
    ratio: float = 0.16
    """greedy: fraction of the range that may be trimmed (PyTorch's meaning)."""
    starts: int = 1
    """refit: number of `STARTS` to try, with one fit each."""
    passes: int = 1
    """refit: total number of fits from the best start to the result."""

    def __post_init__(self) -> None:
        """Reject values that the kernels do not support."""
        if self.bins < 1 or not 0 <= self.ratio <= 1 or not 1 <= self.starts <= MAX_STARTS or self.passes < 1:
            raise EncodingError(
                f"{self}", remedy=f"bins and passes >= 1, ratio 0 to 1, starts 1 to {MAX_STARTS}"
            )


PLAIN = Search()

_INFINITE_FROM = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}
"""Smallest magnitude that rounds to an infinity of the type."""


def _trims(*pairs: tuple[float, float]) -> F32:
    return np.array(pairs, np.float32)


# Found by forward selection (each start is the one that lowers the mean error most, given the previous ones) over
# Gaussian with row means, student-t(3), Laplace, uniform and gamma rows of 16, 64 and 128 columns.
STARTS: dict[int, F32] = {
    2: _trims(
        (0.15, 0.15), (0.1, 0.25), (0.2, 0.1), (0.05, 0.1), (0.25, 0.2), (0.1, 0.0),
        (0.2, 0.25), (0.0, 0.15), (0.3, 0.1), (0.1, 0.35), (0.15, 0.2), (0.2, 0.0),
    ),
    3: _trims(
        (0.0, 0.0), (0.06, 0.09), (0.09, 0.03), (0.0, 0.06), (0.03, 0.12), (0.06, 0.06),
        (0.06, 0.0), (0.12, 0.09), (0.15, 0.06), (0.09, 0.12), (0.09, 0.0), (0.06, 0.15),
    ),
    4: _trims(
        (0.0, 0.0), (0.03, 0.0), (0.0, 0.03), (0.03, 0.03), (0.045, 0.0), (0.0, 0.045),
        (0.015, 0.03), (0.03, 0.015), (0.0, 0.015), (0.03, 0.06), (0.015, 0.0), (0.06, 0.03),
    ),
}  # fmt: skip
"""Fractions of a row's range trimmed (below, above) at the starts of a refit, by bits, best first. float32 [12, 2]."""
STARTS[8] = STARTS[4] * np.float32(
    15 / 255
)  # a trim of an 8-bit row has as many code steps as that of a 4-bit row

DEFAULT_SEARCH: dict[str, Search] = {
    "q8": PLAIN,
    "q4": Search(kind="refit", starts=6, passes=2),
    "q3": Search(kind="refit", starts=4, passes=2),
    "q2": Search(kind="refit", starts=3, passes=2),
}
"""Default searches: at 2 to 4 bits the error of the best greedy search, at five times its speed."""


def default_search(encoding: Encoding) -> Search:
    """Return the default search of `encoding`; raw encodings ignore it."""
    return DEFAULT_SEARCH.get(encoding.name, PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Header fields of a frame that result from encoding its sections."""

    exponent: int = 0
    """Scales and biases are multiplied by 2**exponent."""
    exceptions: bytes = b""
    """Side list of rows that the encoding cannot hold (`side_list`); usually empty."""
    fits: bool = True
    """False: too many exceptional rows, the sections are unusable; store the block in its raw encoding."""


def encode_rows(
    encoding: Encoding,
    weights: Array,
    scales: Writable,
    biases: Writable,
    codes: Writable,
    *,
    dtype: str | None = None,
    search: Search | None = None,
) -> Encoded:
    """Encode `weights` into the three section buffers, each at least `section_bytes(...)` long.

    Args:
        encoding: encoding of the sections.
        weights: C-contiguous [n, D] float32, float16, float64, or uint16 holding bfloat16 with `dtype="bfloat16"`.
        scales: writable buffer, likewise `biases` and `codes`; bytes beyond the section's size are unchanged.
        biases: see `scales`.
        codes: see `scales`.
        dtype: name of the weights' dtype if the array does not determine it.
        search: range search of quantized encodings; None: `default_search(encoding)`. PLAIN gives torch's bits.

    Returns:
        Exponent, exceptional rows, and whether the encoding fits these rows.

    Raises:
        EncodingError: unknown dtype, wrong shape, non-contiguous weights, buffers too small.
    """
    name = dtype_name(weights, dtype)
    if weights.ndim != 2 or not weights.flags.c_contiguous:
        raise EncodingError(
            f"weights of shape {list(weights.shape)}, strides {list(weights.strides)}",
            remedy="a C-contiguous [n, D] array: np.ascontiguousarray copies",
        )
    n, d = weights.shape
    want = section_bytes(encoding, n, d)
    out = [
        _buffer(b, size, what)
        for b, size, what in zip((scales, biases, codes), want, ("scales", "biases", "codes"), strict=True)
    ]
    if n == 0:
        return Encoded()
    if not encoding.quantized:
        return _cast(encoding, weights, name, out[2])
    return _quantize(encoding, weights, name, out, search or default_search(encoding))


def _buffer(buffer: Writable, size: int, what: str) -> npt.NDArray[np.uint8]:
    array = np.frombuffer(buffer, np.uint8)
    if len(array) < size or not array.flags.writeable:
        raise EncodingError(f"{len(array)} bytes for {what}, {size} writable ones are needed")
    return array[:size]


def widened(weights: Array, name: str) -> Array:
    """Return weights of dtype `name` as float32 (float64 for float64), without a copy if they already are."""
    if name == "bfloat16":
        return (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return weights.astype(np.float64 if name == "float64" else np.float32, copy=False)


def narrowed(values: Array, name: str) -> Array:
    """Return float32 or float64 `values` as `name` (bfloat16 as uint16), round to nearest even, overflow to Inf."""
    if name == "bfloat16":
        with np.errstate(over="ignore"):
            return bfloat_bits(np.ascontiguousarray(values, np.float32))
    with np.errstate(over="ignore"):
        return values.astype(name, copy=False)


def narrowed_once(values: npt.NDArray[np.float64], name: str) -> Array:
    """Return float64 `values` as dtype `name` (bfloat16 as uint16), rounded to nearest even in a single step."""
    if name != "bfloat16":
        return narrowed(values, name)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        rest = values - single.astype(np.float64)
    # Round to odd first, so that the second rounding still sees the discarded bits (Boldo and Melquiond, 2008).
    odd = np.isfinite(single) & (rest != 0) & (single.view(np.uint32) & np.uint32(1) == 0)
    nearest = np.nextafter(single, np.where(rest > 0, np.inf, -np.inf).astype(np.float32))
    return narrowed(np.where(odd, nearest, single), name)


def _cast(e: Encoding, weights: Array, name: str, codes: npt.NDArray[np.uint8]) -> Encoded:
    """Encode raw: copy or cast; rows in which a finite value became infinite are exceptional."""
    if e.dtype == name:
        codes[:] = weights.reshape(-1).view(np.uint8)
        return Encoded()
    assert e.dtype is not None
    wide = widened(weights, name)
    cast = narrowed(wide, e.dtype)
    codes[:] = cast.reshape(-1).view(np.uint8)
    if e.bits >= 8 * wide.itemsize or (name, e.dtype) == ("bfloat16", "fp32"):
        return Encoded()
    infinite = np.asarray((np.isinf(widened(cast, e.dtype)) & np.isfinite(wide)).any(axis=1))
    return _with_exceptions(e, weights, name, infinite, 0)


def _with_exceptions(
    e: Encoding, weights: Array, name: str, bad: npt.NDArray[np.bool_], exponent: int
) -> Encoded:
    n, d = weights.shape
    positions = np.flatnonzero(bad)
    if not len(positions):
        return Encoded(exponent=exponent)
    value_bytes = 8 if name == "float64" else 4
    spare = sum(section_bytes(raw_encoding(name), n, d)) - sum(section_bytes(e, n, d))
    if len(positions) > n // 8 or exception_bytes(len(positions), d, value_bytes) > spare:
        return Encoded(fits=False)
    values = widened(np.ascontiguousarray(weights[positions]), name)
    return Encoded(exponent=exponent, exceptions=write_exceptions(positions, values))


def _quantize(
    e: Encoding, weights: Array, name: str, out: list[npt.NDArray[np.uint8]], search: Search
) -> Encoded:
    n = len(weights)
    k = kernel_choice.active()
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.ascontiguousarray(widened(weights, name), np.float32)
    lo, hi = np.empty(n, np.float32), np.empty(n, np.float32)
    word = np.float32 if e.scale_bytes == 4 else np.uint16
    scales, biases, codes = out[0].view(word), out[1].view(word), out[2].reshape(n, -1)
    searched = search.kind != "plain"
    if searched:
        k.row_ranges(x, lo, hi)
        search_ranges(search, e.bits, x, lo, hi)
    special = k.encode(x, e.bits, 1.0, searched, lo, hi, scales, biases, codes)
    if not special and not (infinite := _infinite(e, name, scales, biases, 0, lo, hi)).any():
        return Encoded()
    # Some row is special: find the exponent that represents most rows, and the rows it does not represent.
    with np.errstate(over="ignore", invalid="ignore"):
        bad = ~np.isfinite(hi - lo)
        exponent = 0
        if e.scale_bytes == 2:
            exponent, misfit = choose_exponent(lo, hi, e.bits)
            bad |= misfit
            if exponent:
                k.encode(x, e.bits, 2.0**-exponent, True, lo, hi, scales, biases, codes)
            held = biases.view(np.float16).astype(np.float32) * np.float32(2.0**exponent)
            inexact = np.flatnonzero((lo == hi) & ~bad & (held != lo))
            infinite = _infinite(e, name, scales, biases, exponent, lo, hi)
            _write_constants(lo, inexact, out[0].view(np.uint16), out[1].view(np.uint16), codes)
        else:
            infinite = _infinite(e, name, scales, biases, 0, lo, hi)
        bad |= infinite
    return _with_exceptions(e, weights, name, bad, exponent)


def _infinite(
    e: Encoding, name: str, scales: Array, biases: Array, exponent: int, lo: F32, hi: F32
) -> npt.NDArray[np.bool_]:
    """Return the rows [n] with a code that decodes to an infinity of dtype `name` although the weights are finite.

    Scale and bias are rounded, and a search may extend the range beyond the largest weight; near the largest value of a
    dtype that overflows. Constant rows are exact, whatever their words contain.
    """
    limit = _INFINITE_FROM.get(name, _INFINITE_FROM["float32"])
    if not (np.maximum(np.abs(lo), np.abs(hi)) > limit / 8).any():
        return np.zeros(len(lo), np.bool_)
    words = (
        biases.view(np.float16 if e.scale_bytes == 2 else np.float32),
        scales.view(np.float16 if e.scale_bytes == 2 else np.float32),
    )
    bias, scale = (word.astype(np.float64) * 2.0**exponent for word in words)
    top = bias + (2**e.bits - 1) * scale
    return np.asarray((lo != hi) & ~(np.maximum(np.abs(bias), np.abs(top)) < limit))


def search_ranges(search: Search, bits: int, x: F32, lo: F32, hi: F32) -> None:
    """Replace the rows' min and max by the ranges found by `search`; x float32 [n, D], lo and hi float32 [n]."""
    k = kernel_choice.active()
    if search.kind == "greedy":
        k.greedy(x, bits, search.bins, int(search.bins * search.ratio + 1e-6), lo, hi)
    elif search.kind == "refit":
        k.refit(x, bits, STARTS[bits][: search.starts], search.passes, lo, hi)


def choose_exponent(lo: F32, hi: F32, bits: int) -> tuple[int, npt.NDArray[np.bool_]]:
    """Return the exponent of a frame with row ranges [lo, hi], and the rows it does not represent (bool [n]).

    An exponent represents a row if no value reaches 2**15 in its units nor an infinity when decoded, and if float16's
    smallest spacing moves the top code by at most 1/16 of a step. The latter does not apply to rows with a range below
    2**-9 of their magnitude, where the rounding of the bias dominates. Non-finite rows are ignored and not reported.
    """
    finite = np.isfinite(lo) & np.isfinite(hi) & np.isfinite(hi - lo)
    magnitude = np.maximum(np.abs(lo), np.abs(hi))
    span = hi - lo
    least = np.frexp(np.where(finite, magnitude, 0))[1] - 15
    most = np.frexp(np.where(finite, span, 0))[1] + 20 - 2 * bits
    least = np.where(magnitude == 0, MIN_EXPONENT, np.clip(least, MIN_EXPONENT, MAX_EXPONENT))
    # IMPORTANT: no exponent represents these rows. A bias or scale this close to the largest float32, rounded to
    # float16, would decode finite weights to an infinity. (Constant rows are stored exactly, in place.)
    least = np.where((magnitude >= NEARLY_INFINITE) & (span > 0), MAX_EXPONENT + 1, least)
    most = np.where(span <= magnitude * np.float32(2.0**-9), MAX_EXPONENT, np.minimum(most, MAX_EXPONENT))
    misfit = finite & ((least > 0) | (most < 0))
    if int(misfit.sum()) * 64 <= len(lo):
        return 0, misfit
    sound = finite & (least <= most)
    if not sound.any():
        return 0, misfit
    starts = np.bincount(least[sound] - MIN_EXPONENT, minlength=MAX_EXPONENT - MIN_EXPONENT + 2)
    ends = np.bincount(most[sound] + 1 - MIN_EXPONENT, minlength=MAX_EXPONENT - MIN_EXPONENT + 2)
    served = np.cumsum(starts - ends)[:-1]
    best = np.flatnonzero(served == served.max()) + MIN_EXPONENT
    exponent = int(best[np.argmin(np.abs(best))])
    return exponent, finite & ((least > exponent) | (most < exponent))


def _write_constants(
    values: F32,
    rows: npt.NDArray[np.int64],
    scales: npt.NDArray[np.uint16],
    biases: npt.NDArray[np.uint16],
    codes: npt.NDArray[np.uint8],
) -> None:
    """Store constant rows exactly, in place of scale, bias and first code byte (see `encoding`)."""
    bits = values[rows].view(np.uint32)
    scales[rows] = CONSTANT_TAG | (bits & np.uint32(0xFF)).astype(np.uint16)
    biases[rows] = (bits >> np.uint32(16)).astype(np.uint16)
    codes[rows] = 0
    codes[rows, 0] = ((bits >> np.uint32(8)) & np.uint32(0xFF)).astype(np.uint8)
