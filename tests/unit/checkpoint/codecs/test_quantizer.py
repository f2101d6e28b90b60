"""Encoded rows: bounded errors, torch's bits, exponents, and nothing that decodes as garbage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deltashard_checkpoint.codecs.encoding import (
    DTYPES,
    EncodingError,
    effective_encoding,
    raw_encoding,
    section_bytes,
)
from deltashard_checkpoint.codecs.quantizer import (
    DEFAULT_SEARCH,
    PLAIN,
    Search,
    choose_exponent,
    encode_rows,
    narrowed,
    widened,
)
from deltashard_checkpoint.codecs.side_list import exception_bytes
from deltashard_checkpoint.vocabulary import ENCODINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.checkpoint.codecs.support import odd_rows, store

QUANTIZED = ("q8", "q4", "q3", "q2")
TORCH = {"q8": "byte", "q4": "4bit", "q2": "2bit"}
SEARCHES = (PLAIN, Search(kind="greedy", bins=25, ratio=0.6), Search(kind="refit", starts=3, passes=2))

blocks = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
    fill=st.floats(-1, 1, width=32),
)


def _exceptional(stored) -> np.ndarray:
    from deltashard_checkpoint.codecs.side_list import read_exceptions

    listed = np.frombuffer(stored.encoded.exceptions, np.uint8)
    return np.isin(np.arange(stored.shape[0]), read_exceptions(listed, *stored.shape)[0])


def _check_bounds(x: np.ndarray, stored) -> None:
    """Plain rows are within half a step, plus what rounding scale, bias and result to their formats can cost."""
    y = stored.restored().astype(np.float64)
    listed = _exceptional(stored)
    assert x[listed].tobytes() == y[listed].astype(np.float32).tobytes()
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isfinite(x[~listed].max(axis=1) - x[~listed].min(axis=1)).all()
    rest, out = x[~listed].astype(np.float64), y[~listed]
    if not len(rest):
        return
    high, low = rest.max(axis=1, keepdims=True), rest.min(axis=1, keepdims=True)
    magnitude = np.maximum(np.abs(high), np.abs(low))
    step = (high - low) / ENCODINGS[stored.encoding].qmax
    constant = (high == low)[:, 0]
    assert (out[constant] == rest[constant]).all()
    if stored.encoding == "q8":
        bound = step * (0.5 + 0.05) + magnitude * 2.0**-22 + 2.0**-149
    else:
        # Half a step, a bias off by 2**-12 of its size, a scale off by 2**-12 (or 1/16 of a step at the top) each.
        bound = step * (0.5 + 0.13) + magnitude * 2.0**-9 + 2.0**-140
    assert (np.abs(out - rest) <= bound).all()


@pytest.mark.parametrize("encoding", QUANTIZED)
@settings(max_examples=60, deadline=None)
@given(x=blocks)
def test_any_floats_come_back_within_the_error_of_a_step_or_exactly(encoding, x):
    stored = store(encoding, x, search=PLAIN)
    if stored.encoded.fits:
        _check_bounds(x, stored)
        raw = sum(section_bytes(ENCODINGS["fp32"], *x.shape))
        if effective_encoding(ENCODINGS[encoding], "float32", x.shape[1]).name == encoding:
            assert sum(section_bytes(ENCODINGS[encoding], *x.shape)) + len(stored.encoded.exceptions) <= raw


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 33, 64, 130])
@pytest.mark.parametrize("encoding", QUANTIZED)
@pytest.mark.slow
def test_rows_of_every_odd_kind_are_exact_or_bounded(kernel_set, encoding, columns):
    x = odd_rows(columns)
    x = np.concatenate([x, np.random.default_rng(1).normal(0, 0.05, (200, columns)).astype(np.float32)])
    stored = store(encoding, x, search=PLAIN)
    if effective_encoding(ENCODINGS[encoding], "float32", columns).name == encoding and columns > 3:
        assert stored.encoded.fits
    if stored.encoded.fits:
        _check_bounds(x, stored)


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: s.kind)
@pytest.mark.parametrize("encoding", QUANTIZED)
@pytest.mark.slow
def test_nan_and_inf_survive_every_search(kernel_set, encoding, search):
    x = np.random.default_rng(3).normal(0, 0.05, (100, 16)).astype(np.float32)
    x[3, 5] = np.nan
    x[4, 0] = np.inf
    x[99, 15] = -np.inf
    stored = store(encoding, x, search=search)
    y = stored.restored()
    assert y[[3, 4, 99]].tobytes() == x[[3, 4, 99]].tobytes()
    assert np.isfinite(np.delete(y, [3, 4, 99], axis=0)).all()
    assert len(stored.encoded.exceptions) == exception_bytes(3, 16, 4)


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_a_block_of_nans_is_reported_as_unfit(kernel_set, encoding):
    x = np.full((16, 64), np.nan, np.float32)
    assert not store(encoding, x).encoded.fits


@pytest.mark.parametrize("value", [0.1, -0.1, 1.0, 0.0, 1e-30, 1e30, 3.4e38, 1e-45, 65504.0, 65520.0])
@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: s.kind)
@pytest.mark.parametrize("encoding", QUANTIZED)
def test_constant_rows_are_exact(kernel_set, encoding, search, value):
    x = np.full((40, 12), value, np.float32)
    stored = store(encoding, x, search=search)
    assert stored.encoded.fits
    assert (stored.restored() == x).all()


@pytest.mark.parametrize("columns", [4, 8, 20, 64, 96, 128, 200])
@pytest.mark.parametrize("encoding", TORCH)
def test_plain_rows_are_torchs_rows(kernel_set, encoding, columns):
    """Same bits as prepack after the reorder, and the same bits as unpack after decoding."""
    rng = np.random.default_rng(columns)
    x = rng.normal(0, 0.05, (500, columns)) + rng.normal(0, 0.03, (500, 1))
    x[:100] = rng.uniform(-1e-2, 1e-2, (100, columns))
    x[100:200] = 3 * rng.standard_t(3, (100, columns))
    x[200] = 0
    x[201] = 1.5
    x = x.astype(np.float32)
    stored = store(encoding, x, search=PLAIN)
    packed = getattr(torch.ops.quantized, f"embedding_bag_{TORCH[encoding]}_prepack")(torch.from_numpy(x))
    unpacked = getattr(torch.ops.quantized, f"embedding_bag_{TORCH[encoding]}_unpack")(packed)
    scales, biases, codes = (section.reshape(len(x), -1) for section in stored.sections)
    assert stored.encoded.exponent == 0
    assert not stored.encoded.exceptions
    assert np.concatenate([codes, scales, biases], axis=1).tobytes() == packed.numpy().tobytes()
    assert stored.restored().tobytes() == unpacked.numpy().tobytes()


def test_q8_keeps_rows_that_torchs_epsilon_spoils():
    x = (1e-9 * np.random.default_rng(0).random((20, 64))).astype(np.float32)
    packed = torch.ops.quantized.embedding_bag_byte_prepack(torch.from_numpy(x))
    torch_error = np.abs(torch.ops.quantized.embedding_bag_byte_unpack(packed).numpy() - x).max()
    ours = np.abs(store("q8", x).restored() - x).max()
    assert ours <= 1e-9 / 255
    assert torch_error > 50 * ours


@pytest.mark.parametrize("span", [1e-45, 3e-43, 4e-43, 1e-41, 1e-39, 1e-37, 7e-37, 8e-37, 1e-36])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6])
def test_subnormal_rows_of_q8_are_within_half_a_step_as_all_are(kernel_set, span, offset):
    """The inverse of such a scale is infinite in float32; and a scale that is rounded down would not reach the top."""
    x = (span * (offset + np.random.default_rng(0).random((40, 70)))).astype(np.float32)
    _check_bounds(x, store("q8", x))


@pytest.mark.parametrize("encoding", ["q4", "q3", "q2"])
def test_fresh_tables_of_any_size_keep_their_precision(kernel_set, encoding):
    """Rows uniform in +-1/sqrt(rows): float16 scales underflow at 10**9 rows and beyond, the exponent takes over."""
    base = np.random.default_rng(0).uniform(-1, 1, (3000, 64))
    relative = []
    for rows in (1e4, 1e8, 1e9, 1e12, 1e30):
        x = (base / np.sqrt(rows)).astype(np.float32)
        stored = store(encoding, x, search=PLAIN)
        assert not stored.encoded.exceptions
        relative.append(np.abs(stored.restored().astype(np.float64) - x).mean() * np.sqrt(rows))
        assert stored.encoded.exponent == 0 if rows <= 1e8 else stored.encoded.exponent < 0 or rows == 1e9
    assert max(relative) < 1.02 * min(relative)


def test_one_huge_row_does_not_cost_the_others_their_precision(kernel_set):
    x = np.random.default_rng(0).normal(0, 0.01, (200, 64)).astype(np.float32)
    x[17] *= 1e32
    stored = store("q4", x)
    y = stored.restored()
    assert stored.encoded.exponent == 0
    assert (y[17] == x[17]).all()
    assert np.abs(np.delete(y - x, 17, axis=0)).max() < 0.005


@given(
    scale=st.integers(-120, 120),
    spread=st.integers(0, 40),
    bits=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_the_exponent_serves_the_most_rows_or_is_zero(scale, spread, bits, seed):
    """No other exponent leaves fewer misfits, unless 0 serves 63 of 64 rows."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(rng.normal(0, 1, (64, 8)), scale + rng.integers(-spread, spread + 1, (64, 1))).astype(
            np.float32
        )
    lo, hi = x.min(axis=1), x.max(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        exponent, misfit = choose_exponent(lo, hi, bits)
        if exponent == 0 and misfit.sum() <= 1:
            return
        for other in range(-100, 114, 3):
            unit = 2.0**-other
            magnitude = np.maximum(abs(lo), abs(hi)).astype(np.float64) * unit
            span = (hi.astype(np.float64) - lo) * unit
            fits = (magnitude < 2**15) & ((span >= 2.0 ** (2 * bits - 21)) | (span <= magnitude * 2.0**-9))
            finite = np.isfinite(hi - lo)
            assert misfit.sum() <= (finite & ~fits).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.slow
def test_every_dtype_goes_into_every_encoding_and_back(kernel_set, encoding, dtype):
    wide = np.random.default_rng(0).normal(0, 0.05, (50, 24)).astype(np.float32)
    x = narrowed(wide.astype(np.float64) if dtype == "float64" else wide, dtype)
    stored = store(encoding, x, dtype=dtype)
    y = stored.restored(dtype)
    assert y.dtype == DTYPES[dtype]
    error = np.abs(widened(y, dtype).astype(np.float64) - widened(x, dtype)).max()
    if (
        encoding == raw_encoding(dtype).name
        or (encoding == "fp64")
        or (encoding == "fp32" and dtype != "float64")
    ):
        assert y.tobytes() == x.tobytes()
    assert error < {"q2": 0.2, "q3": 0.05, "q4": 0.02, "q8": 2e-3}.get(encoding, 1e-3)


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("fp16", "float32"), ("bf16", "float64"), ("fp32", "float64")]
)
def test_a_cast_that_overflows_keeps_the_row(kernel_set, encoding, dtype):
    """Finite values that would become Inf travel in the side list; NaN and Inf need no help."""
    wide = np.ones((40, 16), np.float64)
    wide[3, 2] = 1e300 if dtype == "float64" else 1e38
    wide[4, 0] = np.nan
    wide[5, 1] = -np.inf
    x = narrowed(wide, dtype)
    stored = store(encoding, x, dtype=dtype)
    assert stored.restored(dtype)[3].tobytes() == x[3].tobytes()
    assert np.array_equal(widened(stored.restored(dtype), dtype), widened(x, dtype), equal_nan=True)
    assert len(stored.encoded.exceptions) == exception_bytes(1, 16, 8 if dtype == "float64" else 4)


def test_a_cast_that_overflows_and_saves_nothing_is_unfit(kernel_set):
    x = narrowed(np.full((40, 16), 1e38), "bfloat16")
    assert not store("fp16", x, dtype="bfloat16").encoded.fits


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_rows_are_fine(kernel_set, encoding):
    stored = store(encoding, np.empty((0, 8), np.float32))
    assert stored.restored().shape == (0, 8)


def test_what_cannot_be_taken_is_said():
    x = np.ones((4, 8), np.float32)
    room = [np.empty(s, np.uint8) for s in section_bytes(ENCODINGS["q4"], 4, 8)]
    with pytest.raises(EncodingError, match="C-contiguous"):
        encode_rows(ENCODINGS["q4"], np.ones((4, 16), np.float32)[:, ::2], *room)
    with pytest.raises(EncodingError, match="C-contiguous"):
        encode_rows(ENCODINGS["q4"], x[0], *room)
    with pytest.raises(EncodingError, match="bytes for codes"):
        encode_rows(ENCODINGS["q4"], x, room[0], room[1], room[2][:-1])
    with pytest.raises(EncodingError, match="writable"):
        encode_rows(ENCODINGS["q4"], x, room[0], room[1], memoryview(bytes(16)))
    with pytest.raises(EncodingError, match="bfloat16"):
        encode_rows(ENCODINGS["q4"], x.view(np.uint16), *room)
    with pytest.raises(EncodingError, match="travels as"):
        encode_rows(ENCODINGS["q4"], x, *room, dtype="bfloat16")
    with pytest.raises(EncodingError, match="columns"):
        section_bytes(ENCODINGS["q4"], 1, 0)
    with pytest.raises(EncodingError, match="starts"):
        Search(kind="refit", starts=99)


def test_buffers_longer_than_their_section_keep_their_rest():
    x = np.ones((3, 9), np.float32)
    room = [np.full(s + 7, 0x55, np.uint8) for s in section_bytes(ENCODINGS["q3"], 3, 9)]
    encode_rows(ENCODINGS["q3"], x, *room)
    assert all((b[-7:] == 0x55).all() for b in room)


def test_few_columns_are_stored_raw():
    assert effective_encoding(ENCODINGS["q8"], "float32", 2).name == "fp32"
    assert effective_encoding(ENCODINGS["q8"], "float32", 3).name == "q8"
    assert effective_encoding(ENCODINGS["q4"], "float16", 2).name == "fp16"
    assert effective_encoding(ENCODINGS["q2"], "float32", 64).name == "q2"
    assert effective_encoding(ENCODINGS["fp32"], "float64", 64).name == "fp64"  # fp32 promises the very bits
    assert effective_encoding(ENCODINGS["fp32"], "bfloat16", 64).name == "bf16"
    assert effective_encoding(ENCODINGS["q8"], "float64", 64).name == "q8"


def test_the_paper_sizes_hold():
    """64 columns: 12.8, 9.1, 7.1 and 3.6 times smaller at 2, 3, 4 and 8 bits."""
    factors = [256 / sum(section_bytes(ENCODINGS[e], 1, 64)) for e in ("q2", "q3", "q4", "q8")]
    assert np.allclose(factors, [12.8, 9.14, 7.11, 3.56], atol=0.01)


def test_the_default_search_is_used_unless_another_is_asked_for():
    x = np.random.default_rng(0).normal(0, 1, (32, 64)).astype(np.float32)
    for encoding in QUANTIZED:
        default = store(encoding, x)
        asked = store(encoding, x, search=DEFAULT_SEARCH[encoding])
        assert default.sections[2].tobytes() == asked.sections[2].tobytes()


@pytest.mark.parametrize("encoding", QUANTIZED)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_floats_never_come_back_as_infinities(kernel_set, encoding, sign):
    """Rounding a scale or bias to float16 there would overflow; such rows are kept exactly."""
    largest = np.float32(np.finfo(np.float32).max)
    top = largest * np.linspace(0.99, 1, 60, dtype=np.float32)
    x = np.zeros((600, 16), np.float32)
    x[::10, 3] = sign * top
    x[::10, 4] = sign * top / 3
    stored = store(encoding, x, search=PLAIN)
    assert stored.encoded.fits
    assert np.isfinite(stored.restored()).all()
    _check_bounds(x, stored)


@pytest.mark.parametrize("encoding", QUANTIZED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("search", [PLAIN, Search(kind="refit", starts=3, passes=2)])
def test_no_table_reads_its_largest_weights_as_infinities(kernel_set, encoding, dtype, search):
    """Neither the rounding of a scale nor a range that a search made wider may cost a finite weight."""
    largest = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": np.finfo(np.float32).max}[
        dtype
    ]
    rng = np.random.default_rng(3)
    rows = (rng.normal(0, 0.1, (600, 16)) * largest / 100).astype(np.float32)
    rows[::12, 3] = largest * np.linspace(0.9, 1, 50)
    rows[::12, 5] = -largest
    weights = narrowed(rows, dtype)
    stored = store(encoding, weights, dtype=dtype, search=search)
    if stored.encoded.fits:
        assert np.isfinite(widened(stored.restored(dtype), dtype)).all()
