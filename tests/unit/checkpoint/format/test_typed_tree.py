"""The typed tree: everything comes back as it was, and what cannot is refused by path."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from deltashard_checkpoint.errors import CorruptObject, UnsupportedVersion
from deltashard_checkpoint.format import tree_decoder
from deltashard_checkpoint.format.typed_tree import Tagged, Tensor, UnsupportedValue, decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.golden_case import golden_tree

GOLDEN = Path(__file__).parents[3] / "golden" / "v1" / "state.tree"

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**300), 2**300), st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False), st.text(), st.binary(),
)  # fmt: skip
keys = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner), st.dictionaries(keys, inner, max_size=4), st.sets(keys, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=20,
)  # fmt: skip


def same(a: object, b: object) -> bool:
    """Equal in value and in every type, arrays and tensors by their bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Tensor):
        return (a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data))
    if isinstance(a, Tagged):
        return a.tag == b.tag and same(a.value, b.value)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, q) and same(v, w) for (k, v), (q, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(values)
def test_any_tree_comes_back_with_its_types_and_order(tree: object) -> None:
    """Tuples stay tuples, int keys ints, big ints big, dicts in order; equal trees have equal bytes."""
    data = encode(tree).to_bytes()
    assert same(decode(data), tree)
    assert encode(decode(data)).to_bytes() == data


def test_the_golden_tree_reads_and_writes_as_ever() -> None:
    """Version 1's bytes never change."""
    assert encode(golden_tree()).to_bytes() == GOLDEN.read_bytes()
    assert same(decode(GOLDEN.read_bytes()), golden_tree())


def test_equal_sets_have_equal_bytes_whatever_their_order() -> None:
    """Hash randomisation of strings does not reach the store."""
    words = [f"w{i}" for i in range(100)]
    assert encode(set(words)).to_bytes() == encode({words[i * 37 % 100] for i in range(100)}).to_bytes()


def test_pcg64_state_survives() -> None:
    """Numpy's generators have 128-bit ints, which msgpack loses."""
    rng = np.random.default_rng(3)
    rng.random(5)
    other = np.random.default_rng(0)
    other.bit_generator.state = decode(encode(rng.bit_generator.state).to_bytes())
    assert other.random() == rng.random()
    legacy = np.random.RandomState(4)
    again = np.random.RandomState(0)
    again.set_state(decode(encode(legacy.get_state()).to_bytes()))
    assert again.randint(1 << 30) == legacy.randint(1 << 30)


def test_tensor_data_is_neither_copied_nor_moved_from_its_alignment() -> None:
    """Scatter-gather: the buffers refer to the caller's memory; leaves lie at multiples of 64; any range can be copied."""
    big = np.arange(1 << 16, dtype=np.float32)
    encoded = encode({"w": Tensor(dtype="float32", shape=(256, 256), data=big), "b": b"x"})
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), big) for b in encoded.buffers)
    data = encoded.to_bytes()
    assert len(data) == encoded.total_bytes
    view = decode(data)["w"].data
    offset = np.frombuffer(view, np.uint8).ctypes.data - np.frombuffer(data, np.uint8).ctypes.data
    assert offset % 64 == 0
    for at in (0, 1, 31, 100, 70_000, len(data) - 5):
        for n in (0, 5, 64, 1000):
            out = bytearray(min(n, len(data) - at))
            encoded.copy_into(at, memoryview(out))
            assert out == data[at : at + len(out)]


def test_nan_and_negative_zero_keep_their_bits() -> None:
    """Floats are their bits."""
    found = decode(encode([math.nan, -0.0]).to_bytes())
    assert math.isnan(found[0])
    assert math.copysign(1, found[1]) == -1


class Colour(enum.Enum):
    """An enum."""

    RED = 1


class Level(enum.IntEnum):
    """An int that is more than an int."""

    LOW = 1


@dataclass
class Thing:
    """A dataclass."""

    x: int


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    y: int


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"x": [0, 1, 2, Colour.RED]}, r"state\['x'\]\[3\]: "),
        ({"l": Level.LOW}, r"state\['l'\]: "),
        ({"a": {5: (Thing(1),)}}, r"state\['a'\]\[5\]\[0\]: "),
        ([Point(1, 2)], r"state\[0\]: .*Point"),
        ({"f": print}, r"state\['f'\]: .*builtin_function"),
        ({"o": np.array([object()])}, r"state\['o'\]: numpy type object"),
        ({"s": np.zeros(2, [("a", "i4")])}, r"state\['s'\]: numpy type"),
        ({"t": Tensor(dtype="float32", shape=(3,), data=b"123")}, r"state\['t'\]: 3 bytes"),
        ({(1, Colour.RED): 1}, r"state\[\(1, <Colour.RED: 1>\)\]\[1\]: "),
    ],
)
def test_what_would_need_pickle_is_refused_by_path(tree: object, path: str) -> None:
    """Enums, dataclasses, subclasses: the message says where and what to do."""
    with pytest.raises(UnsupportedValue, match=path):
        encode(tree)


def test_a_cycle_is_refused() -> None:
    """Not a stack overflow."""
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedValue, match="nested deeper"):
        encode(loop)


def test_callers_types_travel_as_tags_and_tensors() -> None:
    """`adapt` and `untag` are how torch's types go through a package that knows no torch."""

    def adapt(value: object) -> object:
        if isinstance(value, Colour):
            return Tagged(tag="Colour", value=value.name)
        if isinstance(value, memoryview):
            return Tensor(dtype="uint8", shape=(len(value),), data=value)
        return NotImplemented

    data = encode([Colour.RED, memoryview(b"abc")], adapt=adapt).to_bytes()
    back = decode(data, untag=lambda tag, value: Colour[value], tensor=lambda t: bytes(t.data))
    assert back == [Colour.RED, b"abc"]
    with pytest.raises(UnsupportedValue):
        encode([Thing(1)], adapt=adapt)


def test_hostile_trees_are_refused_before_anything_is_built() -> None:
    """Counts, depths, versions."""
    good = bytearray(encode(Counter("a")).to_bytes())
    newer = bytearray(good)
    newer[6] = 9
    with pytest.raises(UnsupportedVersion):
        decode(newer)
    for structure in (
        b"l\xff\xff\xff\xff\x7f",
        b"l\x01" * 200 + b"N",
        b"i\x02\x01\x00",
        b"d\x02NNNN",
        b"S\x02NN",
        b"d\x01l\x00N",
    ):
        data = tree_decoder.HEADER.pack(tree_decoder.MAGIC, 1, len(structure), 0, 0, 0) + structure
        data += bytes(-len(data) % 64)
        data = tree_decoder.HEADER.pack(tree_decoder.MAGIC, 1, len(structure), len(data), 0, 0) + data[32:]
        with pytest.raises(CorruptObject):
            decode(data)
