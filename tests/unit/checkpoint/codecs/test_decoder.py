"""Fused decode and scatter equals decode, then scatter. Hostile sections and positions are refused before any write."""

import numpy as np
import pytest
from deltashard_checkpoint.codecs.decoder import decode_rows, decode_scatter, scatter
from deltashard_checkpoint.codecs.encoding import DTYPES, EncodingError, section_bytes
from deltashard_checkpoint.codecs.quantizer import narrowed, widened
from deltashard_checkpoint.codecs.side_list import read_exceptions, write_exceptions
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.vocabulary import ENCODINGS

from tests.unit.checkpoint.codecs.support import odd_rows, store

ONES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_fused_scatter_equals_decode_then_scatter(kernel_set, encoding, dtype):
    """The cases cover every dtype, a column range of a wider tensor, a mask and odd rows."""
    x = odd_rows(21, seed=4)
    stored = store(encoding, np.concatenate([x, 0.1 * odd_rows(21, 5)[20:], odd_rows(21, 6)[20:]]))
    assert stored.encoded.fits
    n = stored.shape[0]
    rng = np.random.default_rng(0)
    rows = rng.permutation(300)[:n].astype(np.int64)
    decoded = stored.restored(dtype)
    for take in (None, rng.random(n) < 0.5, np.zeros(n, np.bool_)):
        for first, width in ((0, 21), (3, 10), (8, 13), (20, 1)):
            out = np.zeros((300, 40), DTYPES[dtype])
            decode_scatter(
                ENCODINGS[encoding], *stored.sections, stored.encoded.exponent, out=out[:, 5 : 5 + width], rows=rows, take=take,
                exceptions=stored.encoded.exceptions, dtype=dtype, columns=21, first_column=first,
            )  # fmt: skip
            expected = np.zeros_like(out)
            chosen = slice(None) if take is None else take
            expected[rows[chosen], 5 : 5 + width] = decoded[chosen, first : first + width]
            assert out.tobytes() == expected.tobytes()


def test_narrow_dtypes_round_to_nearest(kernel_set):
    stored = store("q8", np.random.default_rng(0).normal(0, 1, (50, 33)).astype(np.float32))
    wide = stored.restored()
    assert stored.restored("float16").tobytes() == wide.astype(np.float16).tobytes()
    assert stored.restored("bfloat16").tobytes() == narrowed(wide, "bfloat16").tobytes()
    assert stored.restored("float64").tobytes() == wide.astype(np.float64).tobytes()


@pytest.mark.parametrize("rows", [[0, 4], [0, -1], [0, 1 << 62], [-(1 << 63), 0]])
@pytest.mark.parametrize("encoding", ["q4", "fp32"])
def test_positions_outside_the_target_write_nothing(kernel_set, encoding, rows):
    stored = store(encoding, np.ones((2, 8), np.float32))
    out, positions = np.zeros((4, 8), np.float32), np.array(rows, np.int64)
    with pytest.raises(CorruptObject, match="row position"):
        decode_scatter(ENCODINGS[encoding], *stored.sections, 0, out=out, rows=positions)
    assert not out.any()
    with pytest.raises(CorruptObject, match="row position"):
        scatter(np.ones(2, np.float32), out=out[:, 0].copy(), rows=positions)
    inside = (positions >= 0) & (positions < 4)
    decode_scatter(ENCODINGS[encoding], *stored.sections, 0, out=out, rows=positions, take=inside)
    assert (out[0] == (1 if rows[0] == 0 else out[0])).all()


def test_wrong_section_sizes_are_corrupt_and_any_bytes_decode(kernel_set):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (9, 7)).astype(np.float32)
    for encoding in ENCODINGS.values():
        sections = [s.tobytes() for s in store(encoding.name, x).sections]
        for k in range(3):
            for wrong in {sections[k][:-1], sections[k] + b"\0"} - {sections[k]}:
                with pytest.raises(CorruptObject, match="expected"):
                    decode_rows(encoding, *sections[:k], wrong, *sections[k + 1 :], 0, rows=9, columns=7)
        hostile = [rng.integers(0, 256, s, dtype=np.uint8) for s in section_bytes(encoding, 50, 9)]
        assert decode_rows(encoding, *hostile, 0, rows=50, columns=9).shape == (50, 9)
    for name, exponent in (("q4", 200), ("q8", 1)):
        with pytest.raises(CorruptObject, match="exponent"):
            decode_rows(ENCODINGS[name], *store(name, x).sections, exponent, rows=9, columns=7)
    out, rows = np.zeros((9, 4), np.float32), np.arange(9)
    with pytest.raises(EncodingError, match="columns"):
        decode_scatter(
            ENCODINGS["q8"], *store("q8", x).sections, 0, out=out, rows=rows, columns=7, first_column=4
        )


def test_side_lists_are_validated():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    good = write_exceptions(np.array([1, 4]), values)
    positions, read = read_exceptions(np.frombuffer(good, np.uint8), 5, 3)
    assert positions.tolist() == [1, 4]
    assert (read == values).all()
    for bad in (good[:-1], good + b"\0", good[:4], write_exceptions(np.array([4, 1]), values),
                write_exceptions(np.array([1, 5]), values), write_exceptions(np.array([1, 1]), values),
                b"\xff" * 8 + good[8:], b"\x02\0\0\0\x05\0\0\0" + good[8:], b"\0" * 8):  # fmt: skip
        with pytest.raises(CorruptObject):
            read_exceptions(np.frombuffer(bad, np.uint8), 5, 3)


def test_scattered_fields_are_converted_between_float_dtypes(kernel_set):
    rng = np.random.default_rng(0)
    rows, take = np.array([7, 0, 3], np.int64), np.array([True, False, True])
    for dtype in (np.float32, np.float64, np.int64, np.uint8, np.float16):
        for shape in ((3,), (3, 5)):
            values = (100 * rng.random(shape)).astype(dtype)
            out = np.zeros((9, *shape[1:]), dtype)
            expected = out.copy()
            expected[rows[take]] = values[take]
            scatter(values, out=out, rows=rows, take=take)
            assert out.tobytes() == expected.tobytes()
    wide = rng.normal(0, 1, (3, 4)).astype(np.float32)
    half = narrowed(wide, "bfloat16")
    out, back = np.zeros((9, 4), np.float32), np.zeros((9, 4), np.uint16)
    scatter(half, out=out, rows=rows, values_dtype="bfloat16")
    assert (out[rows] == widened(half, "bfloat16")).all()
    scatter(wide, out=back, rows=rows, dtype="bfloat16")
    assert (back[rows] == half).all()


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("into", {"values": np.ones((2, 3), np.float32)}),
        ("for 3 rows", {"rows": np.arange(3)}),
        ("int64", {"rows": np.arange(2, dtype=np.int32)}),
        ("take", {"take": np.ones(3, np.bool_)}),
        ("weight dtype", {"values": np.ones((2, 2), np.int32)}),
        ("writable", {"out": np.broadcast_to(np.float32(0), (4, 2))}),
        ("rows contiguous", {"out": np.zeros((4, 4), np.float32)[:, ::2]}),
    ],
)
def test_malformed_fields_are_refused(what, changes):
    given = {"values": ONES, "out": np.zeros((4, 2), np.float32), "rows": np.arange(2), **changes}
    with pytest.raises(EncodingError, match=what):
        scatter(given.pop("values"), **given)
