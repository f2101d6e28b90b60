"""Native kernels equal numpy's bit for bit at every instruction set; the choice between the two."""

import sys

import numpy as np
import pytest
from deltashard_checkpoint.codecs import kernel_choice
from deltashard_checkpoint.codecs import numpy_kernel as reference
from deltashard_checkpoint.codecs.quantizer import STARTS
from deltashard_checkpoint.errors import UserError

from tests.unit.checkpoint.codecs.support import odd_rows

COLUMNS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 63, 64, 65, 100, 128, 200)
NONE = np.empty(0, np.bool_)


def _rows(columns: int, seed: int = 0) -> np.ndarray:
    extra = np.random.default_rng(seed).standard_t(3, (19, columns)).astype(np.float32)
    return np.concatenate(
        [odd_rows(columns, seed), extra]
    )  # 83 rows: five whole blocks of lanes and a remainder


def _encoded(k, x, bits, mode, unit):
    n, d = x.shape
    lo, hi = np.empty(n, np.float32), np.empty(n, np.float32)
    if mode != "plain":
        k.row_ranges(x, lo, hi)
    with np.errstate(all="ignore"):
        if mode == "greedy":
            k.greedy(x, bits, 25, 15, lo, hi)
        elif mode.startswith("refit"):
            k.refit(x, bits, STARTS[bits][: int(mode[-1])], 3, lo, hi)
    scale_dtype = np.float32 if bits == 8 else np.uint16
    scales, biases = np.zeros(n, scale_dtype), np.zeros(n, scale_dtype)
    codes = np.full((n, -(-d * bits // 8)), 0xAA, np.uint8)
    special = k.encode(x, bits, unit, mode != "plain", lo, hi, scales, biases, codes)
    return lo, hi, scales, biases, codes, special


@pytest.mark.parametrize(
    "mode", ["plain", pytest.param("greedy", marks=pytest.mark.slow), "refit1", "refit4"]
)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_native_encoding_equals_numpy(level, bits, mode):
    for columns in COLUMNS:
        for unit in (1.0,) if bits == 8 else (1.0, 2.0**9, 2.0**-40):
            x = _rows(columns)
            *found, special = _encoded(level, x, bits, mode, unit)
            *wanted, expected = _encoded(reference, x, bits, mode, unit)
            assert special == expected, (columns, unit)
            for name, a, b in zip(("lo", "hi", "scales", "biases", "codes"), found, wanted, strict=True):
                assert a.tobytes() == b.tobytes(), (name, columns, unit)


@pytest.mark.parametrize(("dtype", "store"), [("float32", 0), ("float64", 0), ("uint16", 1), ("uint16", 2)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_native_decoding_equals_numpy(level, bits, dtype, store):
    rng = np.random.default_rng(bits)
    for columns in COLUMNS:
        x = _rows(columns)[40:]
        n = len(x)
        _, _, scales, biases, codes, _ = _encoded(reference, x, bits, "plain", 1.0)
        if bits < 8:
            scales[2], biases[2] = 0x7D12, 0x3F80  # a constant row
        rows = rng.permutation(2 * n)[:n].astype(np.int64)
        for first in (f for f in (0, 1, 4) if f < columns):
            for take in (NONE, rng.random(n) < 0.6):
                targets = [np.zeros((2 * n, columns - first + 2), dtype) for _ in range(2)]
                for k, out in zip((level, reference), targets, strict=True):
                    k.decode(codes, scales, biases, bits, 2.0**-3, first, out[:, 1:-1], store, rows, take)
                assert targets[0].tobytes() == targets[1].tobytes(), (columns, first)


def test_large_aligned_scatter_equals_numpy(level):
    """Above 1 MiB into 64-byte aligned rows, the native scatter bypasses the caches."""
    rng = np.random.default_rng(0)
    n, d = 6000, 64
    codes = rng.integers(0, 256, (n, 32), dtype=np.uint8)
    scales, biases = rng.random((2, n)).astype(np.float16).view(np.uint16)
    rows = rng.permutation(n).astype(np.int64)
    space = np.zeros(n * d + 16, np.float32)
    start = -(space.ctypes.data // 4) % 16
    out = space[start : start + n * d].reshape(n, d)
    expected = np.zeros((n, d), np.float32)
    level.decode(codes, scales, biases, 4, 1.0, 0, out, 0, rows, NONE)
    reference.decode(codes, scales, biases, 4, 1.0, 0, expected, 0, rows, NONE)
    assert (out == expected).all()
    values = rng.integers(0, 256, (n, 4 * d), dtype=np.uint8)
    level.copy_scatter(values, out.view(np.uint8), rows, NONE)
    assert (out.view(np.uint8)[rows] == values).all()


def test_unknown_choice_and_missing_native_kernels_are_refused(monkeypatch):
    monkeypatch.setenv(kernel_choice.VARIABLE, "cuda")
    with pytest.raises(UserError, match="cuda"):
        kernel_choice.active.__wrapped__()
    monkeypatch.setenv(kernel_choice.VARIABLE, "native")
    monkeypatch.setitem(sys.modules, "deltashard_checkpoint.codecs.native_kernel", None)
    monkeypatch.delattr("deltashard_checkpoint.codecs.native_kernel", raising=False)
    with pytest.raises(UserError, match="not built"):
        kernel_choice.active.__wrapped__()
    monkeypatch.setenv(kernel_choice.VARIABLE, "")
    assert kernel_choice.active.__wrapped__() is reference
