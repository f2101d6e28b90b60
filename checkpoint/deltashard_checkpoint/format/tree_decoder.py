"""Decoding of typed trees: every count, length, depth and type is checked against the remaining bytes before use."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.format import element_type

MAGIC = b"DSTREE"
VERSION = 1
ALIGN = 64
MAX_DEPTH = 100
MAX_DIMS = 32
HEADER = struct.Struct("<6sHQQII")  # magic, version, structure bytes, total bytes, leaves, 0
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None, "int": int, "float": float, "complex": complex, "bool": bool, "str": str, "bytes": bytes,
    "list": list, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset,
}  # fmt: skip
NUMPY_TYPE = re.compile(
    r"[<>|][biufcSU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
MAX_DIM = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """A tensor as raw contiguous bytes (row-major), with the name of its element type (see `element_type`)."""

    dtype: str
    shape: tuple[int, ...]
    data: Any
    """A contiguous buffer of prod(shape) x itemsize bytes; after decoding a read-only or writable memoryview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """A value with a caller-defined type name: `adapt` creates it, `untag` converts it back."""

    tag: str
    value: Any


def aligned(n: int) -> int:
    """Round `n` up to the alignment of leaves."""
    return -(-n // ALIGN) * ALIGN


class TreeReader:
    """Reads one tree: `at` is the position in the structure (up to `end`), `leaf_at` that in the leaves."""

    def __init__(
        self,
        view: memoryview,
        end: int,
        leaf_at: int,
        tensor: Callable[[Tensor], object] | None,
        untag: Callable[[str, Any], object] | None,
    ) -> None:
        self.view = view
        self.at = HEADER.size
        self.end = end
        self.leaf_at = leaf_at
        self.leaves = 0
        self._adopt = tensor
        self._untag = untag

    def _take(self, n: int) -> memoryview:
        if n > self.end - self.at:
            raise CorruptObject(f"tree ends inside a value: {n} bytes wanted, {self.end - self.at} left")
        piece = self.view[self.at : self.at + n]
        self.at += n
        return piece

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise CorruptObject("a length is not in its shortest form")
                return value
            shift += 7
            if shift > 56:
                raise CorruptObject("a length is too large")

    def _count(self) -> int:
        n = self._varint()
        if n > self.end - self.at:  # every element takes at least one byte
            raise CorruptObject(f"{n} elements in {self.end - self.at} bytes")
        return n

    def _text(self) -> str:
        raw = bytes(self._take(self._varint()))
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptObject(f"text is not UTF-8: {error}") from None

    def _integer(self) -> int:
        raw = self._take(self._varint())
        value = int.from_bytes(raw, "little", signed=True)
        if len(raw) != value.bit_length() // 8 + 1:
            raise CorruptObject("an integer is not in its shortest form")
        return value

    def node(self, depth: int) -> Any:  # noqa: C901
        """Decode the node at `at` and its children; raises `CorruptObject`."""
        if depth > MAX_DEPTH:
            raise CorruptObject(f"tree is nested deeper than {MAX_DEPTH}")
        tag = self._take(1)[0]
        match chr(tag):
            case "N":
                return None
            case "T":
                return True
            case "F":
                return False
            case "i":
                return self._integer()
            case "f":
                return struct.unpack("<d", self._take(8))[0]
            case "c":
                return complex(*struct.unpack("<dd", self._take(16)))
            case "s":
                return self._text()
            case "b":
                return bytes(self._take(self._varint()))
            case "y":
                return bytearray(self._take(self._varint()))
            case "l":
                return list(self._items(depth))
            case "t":
                return tuple(self._items(depth))
            case "q":
                return self._queue(depth)
            case "d":
                return self._pairs(depth, {})
            case "O":
                return self._pairs(depth, OrderedDict())
            case "C":
                return self._pairs(depth, Counter())
            case "D":
                name = self._text()
                if name not in FACTORIES:
                    raise CorruptObject(f"unknown defaultdict factory {name[:40]!r}")
                return self._pairs(depth, defaultdict(FACTORIES[name]))
            case "S":
                return set(self._elements(depth))
            case "Z":
                return frozenset(self._elements(depth))
            case "r":
                start, stop, step = self._integer(), self._integer(), self._integer()
                if step == 0:
                    raise CorruptObject("a range's step is 0")
                return range(start, stop, step)
            case "g":
                dtype = self._numpy_type()
                return np.frombuffer(bytes(self._take(dtype.itemsize)), dtype)[0]
            case "a":
                dtype = self._numpy_type()
                shape, data = self._leaf(dtype.itemsize)
                return (
                    np.frombuffer(bytearray(data), dtype).reshape(shape) if data else np.empty(shape, dtype)
                )
            case "x":
                return self._tensor()
            case "G":
                name = self._text()
                value = self.node(depth + 1)
                return Tagged(tag=name, value=value) if self._untag is None else self._untag(name, value)
        raise CorruptObject(f"unknown tag {tag:#04x} in a tree")

    def _items(self, depth: int) -> Iterator[Any]:
        for _ in range(self._count()):
            yield self.node(depth + 1)

    def _queue(self, depth: int) -> deque[Any]:
        maxlen = self._varint() - 1
        values = list(self._items(depth))
        if -1 < maxlen < len(values):
            raise CorruptObject(f"a deque of at most {maxlen} with {len(values)} elements")
        return deque(values, None if maxlen < 0 else maxlen)

    def _pairs(self, depth: int, into: Any) -> Any:
        n = self._count()
        for _ in range(n):
            key = self.node(depth + 1)
            value = self.node(depth + 1)
            try:
                into[key] = value
            except TypeError:
                raise CorruptObject(f"a {type(key).__name__} cannot be a dict key") from None
        if len(into) != n:
            raise CorruptObject("a dict has a key twice")
        return into

    def _elements(self, depth: int) -> Iterator[Any]:
        before = b""
        for _ in range(self._count()):
            start = self.at
            item = self.node(depth + 1)
            encoding = bytes(self.view[start : self.at])
            if encoding <= before:
                raise CorruptObject("a set's elements are not sorted, or not distinct")
            before = encoding
            try:
                hash(item)
            except TypeError:
                raise CorruptObject(f"a {type(item).__name__} cannot be a set element") from None
            yield item

    def _numpy_type(self) -> np.dtype[Any]:
        name = self._text()
        if NUMPY_TYPE.fullmatch(name) is None:
            raise CorruptObject(f"unknown numpy type {name[:40]!r}")
        try:
            dtype = np.dtype(name)
        except TypeError:
            raise CorruptObject(f"unknown numpy type {name[:40]!r}") from None
        if dtype.itemsize == 0 or dtype.str != name:
            raise CorruptObject(f"numpy type {name[:40]!r} is not in its canonical form")
        return dtype

    def _tensor(self) -> object:
        name = self._text()
        if not element_type.is_known(name):
            raise CorruptObject(f"unknown tensor type {name[:40]!r}")
        shape, data = self._leaf(element_type.by_name(name).itemsize_bytes)
        found = Tensor(dtype=name, shape=shape, data=data)
        return found if self._adopt is None else self._adopt(found)

    def _leaf(self, itemsize: int) -> tuple[tuple[int, ...], memoryview]:
        dims = self._varint()
        if dims > MAX_DIMS:
            raise CorruptObject(f"{dims} dimensions")
        shape = tuple(self._varint() for _ in range(dims))
        # numpy multiplies all sizes even if one of them is 0.
        if any(size > MAX_DIM for size in shape) or math.prod(max(size, 1) for size in shape) > MAX_DIM:
            raise CorruptObject(f"shape {shape} is too large")
        length = math.prod(shape) * itemsize
        stop = self.leaf_at + length
        if aligned(stop) > len(self.view):
            raise CorruptObject(f"a leaf of {length} bytes does not fit into the tree")
        data = self.view[self.leaf_at : stop]
        if any(self.view[stop : aligned(stop)]):
            raise CorruptObject("padding is not zero")
        self.leaf_at = aligned(stop)
        self.leaves += 1
        return shape, data
