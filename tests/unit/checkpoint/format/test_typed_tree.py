"""The typed tree: every value round-trips unchanged, and unsupported values are refused by path."""

import enum
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
def test_any_tree_round_trips_with_types_and_order(tree: object) -> None:
    """Tuples stay tuples, int keys and big ints stay ints, dicts keep their order, and equal trees have equal bytes."""
    encoded = encode(tree)
    data = encoded.to_bytes()
    part = bytearray(len(data) - 2)
    encoded.copy_into(1, memoryview(part))
    assert part == data[1:-1]
    assert same(decode(data), tree)
    assert encode(decode(data)).to_bytes() == data


def test_golden_tree_round_trips() -> None:
    assert encode(golden_tree()).to_bytes() == GOLDEN.read_bytes()
    assert same(decode(GOLDEN.read_bytes()), golden_tree())


class Colour(enum.Enum):
    """An enum."""

    RED = 1


class Level(enum.IntEnum):
    """An int subclass."""

    LOW = 1


@dataclass
class PlainData:
    """A dataclass."""

    x: int


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: int


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"x": [0, 1, 2, Colour.RED]}, r"state\['x'\]\[3\]: "),
        ({"l": Level.LOW}, r"state\['l'\]: "),
        ({"a": {5: (PlainData(1),)}}, r"state\['a'\]\[5\]\[0\]: "),
        ([Point(1, 2)], r"state\[0\]: .*Point"),
        ({"f": print}, r"state\['f'\]: .*builtin_function"),
        ({"o": np.array([object()])}, r"state\['o'\]: numpy type object"),
        ({"s": np.zeros(2, [("a", "i4")])}, r"state\['s'\]: numpy type"),
        ({"t": Tensor(dtype="float32", shape=(3,), data=b"123")}, r"state\['t'\]: 3 bytes"),
        ({(1, Colour.RED): 1}, r"state\[\(1, <Colour.RED: 1>\)\]\[1\]: "),
    ],
)
def test_values_that_need_pickle_are_refused_with_their_path(tree: object, path: str) -> None:
    with pytest.raises(UnsupportedValue, match=path):
        encode(tree)


def test_a_cycle_is_refused() -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedValue, match="nested deeper"):
        encode(loop)


def test_caller_types_are_encoded_as_tags() -> None:
    """`adapt` and `untag` carry torch's types through a package that does not import torch."""

    def adapt(value: object) -> object:
        if isinstance(value, Colour):
            return Tagged(tag="Colour", value=value.name)
        if isinstance(value, memoryview):
            return Tensor(dtype="uint8", shape=(len(value),), data=value)
        return NotImplemented

    data = encode([Colour.RED, memoryview(b"abc" * 99)], adapt=adapt).to_bytes()
    back = decode(data, untag=lambda tag, value: Colour[value], tensor=lambda t: bytes(t.data))
    assert back == [Colour.RED, b"abc" * 99]
    with pytest.raises(UnsupportedValue):
        encode([PlainData(1)], adapt=adapt)


def test_hostile_trees_are_refused_before_allocation() -> None:
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
        b"!",
        b"S\x02NN",
        b"d\x01l\x00N",
    ):
        data = tree_decoder.HEADER.pack(tree_decoder.MAGIC, 1, len(structure), 0, 0, 0) + structure
        data += bytes(-len(data) % 64)
        data = tree_decoder.HEADER.pack(tree_decoder.MAGIC, 1, len(structure), len(data), 0, 0) + data[32:]
        with pytest.raises(CorruptObject):
            decode(data)
