"""Row ids: any ascending set round-trips, the smallest form is used, and the decoder is safe for all bytes."""

import numpy as np
import pytest
from deltashard_checkpoint.codecs.encoding import EncodingError
from deltashard_checkpoint.codecs.row_id import BITMAP, DELTAS, MAX_ID, RANGE, decode_ids, encode_ids
from deltashard_checkpoint.errors import CorruptObject
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

fixture_settings = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
id_sets = st.one_of(
    st.sets(st.integers(0, 300), max_size=200),
    st.sets(st.integers(0, MAX_ID - 1), max_size=20),
    st.tuples(st.integers(0, 10**12), st.integers(0, 100)).map(lambda t: set(range(t[0], sum(t)))),
)


def _varint_bytes(ids: list[int]) -> int:
    gaps = [b - a - 1 for a, b in zip([-1, *ids], ids, strict=False)]
    return sum(max(1, -(-gap.bit_length() // 7)) for gap in gaps)


@fixture_settings
@given(ids=id_sets)
def test_any_id_set_round_trips_in_smallest_form(kernel_set, ids):
    ordered = sorted(ids)
    kind, data = encode_ids(np.array(ordered, np.int64))
    low, high = (ordered[0], ordered[-1] + 1) if ordered else (0, 0)
    assert decode_ids(kind, data, len(ordered), (low, high)).tolist() == ordered
    if not ordered:
        return
    if kind == RANGE:
        assert len(data) == 8
        assert encode_ids(range(low, high)) == (kind, data)
    else:
        sizes = {BITMAP: 8 + (ordered[-1] - ordered[0]) // 8 + 1, DELTAS: _varint_bytes(ordered)}
        assert len(data) == sizes[kind] == min(sizes.values())
    for wrong in ((low + 1, high + 1), (low, high - 1)):
        with pytest.raises(CorruptObject):
            decode_ids(kind, data, len(ordered), wrong)


@fixture_settings
@given(
    kind=st.integers(-1, 4), data=st.binary(max_size=40), n=st.integers(-1, 60), low=st.integers(-1, 50),
    span=st.integers(-1, 10**6),
)  # fmt: skip
def test_any_bytes_decode_to_bounded_ids_or_an_error(kernel_set, kind, data, n, low, span):
    try:
        ids = decode_ids(kind, data, n, (low, low + span))
    except CorruptObject:
        return
    assert len(ids) == n
    assert (np.diff(ids) > 0).all()
    assert n == 0 or (ids[0] >= low and ids[-1] < low + span)
    if n:
        # The accepted bytes are the only way to write these ids in this form.
        other, again = encode_ids(ids)
        assert other != kind or bytes(again) == data


def test_hostile_bytes_are_refused(kernel_set):
    for data, why in (
        (b"", "truncated"), (b"\x80", "truncated"), (b"\x80\x00\x00\x00", "overlong"), (b"\xff" * 12, "overlong"),
        (b"\x05\x00\xff\x7f", "leave"), (b"\x05\x00\x00\x00", "left over"),
    ):  # fmt: skip
        with pytest.raises(CorruptObject, match=why):
            decode_ids(DELTAS, data, 3, (0, 100))
    kind, data = encode_ids(np.array([3, 4, 6, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 40]))
    assert kind == BITMAP
    for bad, n in (
        (data[:-1], 15), (data + b"\0", 15), (data + b"\1", 15), (data, 14), (data, 16), (data[:8], 0), (data[:7], 0),
        (data[:8] + b"\xfe" + data[9:], 15), (b"\xff" * 8 + data[8:], 15),
    ):  # fmt: skip
        with pytest.raises(CorruptObject):
            decode_ids(BITMAP, bad, n, (0, 100))


@pytest.mark.parametrize(
    "ids",
    [
        *(np.array(each) for each in ([3, 2], [2, 2], [-1, 2], [MAX_ID], [[1, 2]])),
        *(np.array([1, 2], np.int32), np.arange(10)[::2], range(0, 10, 2), range(-1, 5)),
    ],
)
def test_ids_that_are_not_ascending_are_refused(kernel_set, ids):
    with pytest.raises(EncodingError):
        encode_ids(ids)
