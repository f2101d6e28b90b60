"""Encoded rows have bounded errors, equal torch's bits and never decode as garbage."""

import numpy as np
import pytest
import torch
from deltashard_checkpoint.codecs.encoding import EncodingError, effective_encoding, section_bytes
from deltashard_checkpoint.codecs.quantizer import (
    DEFAULT_SEARCH,
    PLAIN,
    Search,
    choose_exponent,
    encode_rows,
    narrowed,
    widened,
)
from deltashard_checkpoint.codecs.side_list import exception_bytes, read_exceptions
from deltashard_checkpoint.vocabulary import ENCODINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.checkpoint.codecs.support import store

QUANTIZED = ("q8", "q4", "q3", "q2")
TORCH = {"q8": "byte", "q4": "4bit", "q2": "2bit"}
SEARCHES = (PLAIN, Search(kind="greedy", bins=25, ratio=0.6), Search(kind="refit", starts=3, passes=2))

blocks = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
    fill=st.floats(-1, 1, width=32),
)


def _check_bounds(x: np.ndarray, stored) -> None:
    """Check that the error is at most half a step plus the rounding of scale, bias and result to their formats."""
    y = stored.restored().astype(np.float64)
    found = read_exceptions(np.frombuffer(stored.encoded.exceptions, np.uint8), *stored.shape)[0]
    listed = np.isin(np.arange(stored.shape[0]), found)
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
        # Half a step, a bias off by 2**-12 of its size, and a scale off by 2**-12 (or 1/16 of a step at the top).
        bound = step * (0.5 + 0.13) + magnitude * 2.0**-9 + 2.0**-140
    assert (np.abs(out - rest) <= bound).all()


@pytest.mark.parametrize("encoding", QUANTIZED)
@settings(max_examples=60, deadline=None)
@given(x=blocks)
def test_any_floats_decode_within_one_step(encoding, x):
    stored = store(encoding, x, search=PLAIN)
    if stored.encoded.fits:
        _check_bounds(x, stored)
        raw = sum(section_bytes(ENCODINGS["fp32"], *x.shape))
        if effective_encoding(ENCODINGS[encoding], "float32", x.shape[1]).name == encoding:
            assert sum(section_bytes(ENCODINGS[encoding], *x.shape)) + len(stored.encoded.exceptions) <= raw


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
def test_plain_rows_equal_torch_prepack(kernel_set, encoding, columns):
    """The bits equal those of torch's prepack after the reorder, and those of unpack after decoding."""
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


@pytest.mark.parametrize("encoding", ["q4", "q3", "q2"])
def test_precision_is_independent_of_table_size(kernel_set, encoding):
    """Rows are uniform in +-1/sqrt(rows). From 10**9 rows, float16 scales underflow and the exponent compensates."""
    base = np.random.default_rng(0).uniform(-1, 1, (3000, 64))
    relative = []
    for rows in (1e4, 1e8, 1e9, 1e12, 1e30):
        x = (base / np.sqrt(rows)).astype(np.float32)
        stored = store(encoding, x, search=PLAIN)
        assert not stored.encoded.exceptions
        relative.append(np.abs(stored.restored().astype(np.float64) - x).mean() * np.sqrt(rows))
        assert stored.encoded.exponent == 0 if rows <= 1e8 else stored.encoded.exponent < 0 or rows == 1e9
    assert max(relative) < 1.02 * min(relative)
    x = (0.01 * base[:200]).astype(np.float32)
    x[17] *= 1e32  # One huge row does not reduce the precision of the others.
    stored = store(encoding, x)
    assert stored.encoded.exponent == 0
    assert (stored.restored()[17] == x[17]).all()
    assert np.abs(np.delete(stored.restored() - x, 17, axis=0)).max() < 0.005


@given(
    scale=st.integers(-120, 120),
    spread=st.integers(0, 40),
    bits=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_exponent_covers_most_rows_or_is_zero(scale, spread, bits, seed):
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


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("fp16", "float32"), ("bf16", "float64"), ("fp32", "float64")]
)
def test_overflowing_cast_keeps_finite_rows(kernel_set, encoding, dtype):
    """Finite values that would become Inf are in the side list. NaN and Inf are not."""
    wide = np.ones((40, 16), np.float64)
    wide[3, 2] = 1e300 if dtype == "float64" else 1e38
    wide[4, 0] = np.nan
    wide[5, 1] = -np.inf
    x = narrowed(wide, dtype)
    stored = store(encoding, x, dtype=dtype)
    assert stored.restored(dtype)[3].tobytes() == x[3].tobytes()
    assert np.array_equal(widened(stored.restored(dtype), dtype), widened(x, dtype), equal_nan=True)
    assert len(stored.encoded.exceptions) == exception_bytes(1, 16, 8 if dtype == "float64" else 4)


@pytest.mark.parametrize("encoding", QUANTIZED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("search", [PLAIN, Search(kind="refit", starts=3, passes=2)])
def test_largest_weights_never_decode_as_inf(kernel_set, encoding, dtype, search):
    most = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": np.finfo(np.float32).max}
    largest = most[dtype]
    rng = np.random.default_rng(3)
    rows = (rng.normal(0, 0.1, (600, 16)) * largest / 100).astype(np.float32)
    rows[::12, 3] = largest * np.linspace(0.9, 1, 50)
    rows[::12, 5] = -largest
    weights = narrowed(rows, dtype)
    stored = store(encoding, weights, dtype=dtype, search=search)
    if stored.encoded.fits:
        assert np.isfinite(widened(stored.restored(dtype), dtype)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encoding_without_savings_is_unfit_and_no_rows_are_valid(kernel_set, encoding):
    assert store(encoding, np.empty((0, 8), np.float32)).restored().shape == (0, 8)
    if encoding in QUANTIZED:
        assert not store(encoding, np.full((16, 64), np.nan, np.float32)).encoded.fits
    if encoding == "fp16":
        assert not store("fp16", narrowed(np.full((40, 16), 1e38), "bfloat16"), dtype="bfloat16").encoded.fits


def test_invalid_inputs_are_refused_and_longer_buffers_keep_their_tail():
    x, q4 = np.ones((4, 8), np.float32), ENCODINGS["q4"]
    sections = [np.full(s + 7, 0x55, np.uint8) for s in section_bytes(q4, 4, 8)]
    encode_rows(q4, x, *sections)
    assert all((b[-7:] == 0x55).all() for b in sections)
    for why, rows, buffers, dtype in (
        ("C-contiguous", np.ones((4, 16), np.float32)[:, ::2], sections, None),
        ("C-contiguous", x[0], sections, None),
        ("bytes for codes", x, [*sections[:2], sections[2][:15]], None),
        ("writable", x, [*sections[:2], memoryview(bytes(16))], None),
        ("bfloat16", x.view(np.uint16), sections, None),
        ("travels as", x, sections, "bfloat16"),
    ):
        with pytest.raises(EncodingError, match=why):
            encode_rows(q4, rows, *buffers, dtype=dtype)
    with pytest.raises(EncodingError, match="columns"):
        section_bytes(q4, 1, 0)
    with pytest.raises(EncodingError, match="starts"):
        Search(kind="refit", starts=99)


@pytest.mark.parametrize(
    ("asked", "dtype", "columns", "found"),
    [
        *(("q8", "float32", 2, "fp32"), ("q8", "float32", 3, "q8"), ("q4", "float16", 2, "fp16")),
        *(("q2", "float32", 64, "q2"), ("q8", "float64", 64, "q8")),
        *(("fp32", "float64", 64, "fp64"), ("fp32", "bfloat16", 64, "bf16")),  # fp32 keeps the exact bits
    ],
)
def test_few_columns_are_stored_raw(asked, dtype, columns, found):
    assert effective_encoding(ENCODINGS[asked], dtype, columns).name == found


def test_default_search_is_used_unless_overridden():
    x = np.random.default_rng(0).normal(0, 1, (32, 64)).astype(np.float32)
    for encoding in QUANTIZED:
        asked = store(encoding, x, search=DEFAULT_SEARCH[encoding])
        assert store(encoding, x).sections[2].tobytes() == asked.sections[2].tobytes()
