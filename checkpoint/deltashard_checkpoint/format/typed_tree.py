"""The typed tree: the storage format of all non-table state, without pickle.

    header (32 B) | structure | 0.. | leaf | 0.. | leaf | ...      every leaf at a multiple of 64 bytes

The structure is a depth-first sequence of nodes: a tag byte, then lengths as varints and small values inline. Arrays
and `Tensor`s store only their type and shape there; their raw bytes follow as leaves, in node order. So encoding copies
no tensor (`EncodedTree` is a list of buffers) and decoding returns views. Python types round-trip: tuples stay tuples,
int keys stay ints of any size, dicts keep their order. Sets are sorted by their elements' encoding, so equal trees have
equal bytes. Other types (enums, dataclasses and other classes, which would need pickle) are rejected with their path.
`adapt` and `untag` let a caller (the trainer, for torch's types) map its own leaf types through `Tensor` and `Tagged`.

Decoding trusts nothing: every count and length is checked against the remaining bytes before allocation.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deltashard_checkpoint.errors import CorruptObject, UnsupportedVersion, UserError
from deltashard_checkpoint.format import element_type
from deltashard_checkpoint.format.tree_decoder import (
    ALIGN,
    FACTORIES,
    HEADER,
    MAGIC,
    MAX_DEPTH,
    MAX_DIMS,
    NUMPY_TYPE,
    VERSION,
    Tagged,
    Tensor,
    TreeReader,
    aligned,
)

__all__ = ["EncodedTree", "Tagged", "Tensor", "UnsupportedValue", "decode", "encode"]
_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


class UnsupportedValue(UserError):
    """A value of the tree has a type that cannot be stored; the message contains its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTree:
    """The encoding as a list of buffers, `total_bytes` long in total; leaves refer to the caller's memory."""

    buffers: tuple[memoryview, ...]
    total_bytes: int

    def copy_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes [offset, offset + len(out)) of the encoding."""
        if offset < 0 or offset + len(out) > self.total_bytes:
            raise ValueError(f"[{offset}, {offset + len(out)}) of {self.total_bytes} bytes")
        filled = 0
        for buffer in self.buffers:
            if filled == len(out):
                break
            if offset >= len(buffer):
                offset -= len(buffer)
                continue
            piece = buffer[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            offset = 0

    def to_bytes(self) -> bytes:
        """Return the encoding as one contiguous copy."""
        return b"".join(self.buffers)


def encode(tree: object, *, adapt: Callable[[object], object] | None = None) -> EncodedTree:
    """Encode `tree`; raises `UnsupportedValue` with the path of the first value that cannot be stored.

    `adapt` is called for every value whose exact type is unknown to the codec. It returns a value that is (or contains)
    known types, for example a `Tensor` or a `Tagged`, or `NotImplemented`. Tensor data is not copied: the buffers refer
    to the caller's memory until they are written.
    """
    writer = _Writer(adapt)
    writer.node(tree)
    structure = writer.out
    start = aligned(HEADER.size + len(structure))
    buffers: list[memoryview] = []
    at = start
    for leaf in writer.leaves:
        buffers.append(leaf)
        at += len(leaf)
        if padding := -at % ALIGN:
            buffers.append(memoryview(bytes(padding)))
            at += padding
    header = HEADER.pack(MAGIC, VERSION, len(structure), at, len(writer.leaves), 0)
    head = header + bytes(structure) + bytes(start - HEADER.size - len(structure))
    return EncodedTree(buffers=(memoryview(head), *buffers), total_bytes=at)


def decode(
    buffer: bytes | bytearray | memoryview,
    *,
    tensor: Callable[[Tensor], object] | None = None,
    untag: Callable[[str, Any], object] | None = None,
) -> Any:
    """Decode `buffer`, which must be exactly one encoding.

    numpy arrays are copies. A `Tensor`'s data is a view of `buffer`; if `tensor` is given, its result replaces it.
    Raises `UnsupportedVersion` or `CorruptObject`; allocates no more than `buffer` justifies.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < HEADER.size:
        raise CorruptObject(f"{len(view)} bytes are too few for a tree")
    magic, version, structure_bytes, total_bytes, leaves, zero = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CorruptObject("not a tree: wrong magic")
    if version != VERSION:
        raise UnsupportedVersion(
            f"tree of version {version}, this library reads {VERSION}", remedy="update deltashard"
        )
    start = aligned(HEADER.size + structure_bytes)
    if total_bytes != len(view) or start > total_bytes or zero != 0:
        raise CorruptObject(
            f"tree of {total_bytes} bytes with {structure_bytes} of structure in {len(view)} bytes"
        )
    reader = TreeReader(view, HEADER.size + structure_bytes, start, tensor, untag)
    tree = reader.node(0)
    if reader.at != reader.end or reader.leaf_at != len(view) or reader.leaves != leaves:
        raise CorruptObject("tree has bytes or leaves that no node references")
    if any(view[reader.end : start]):
        raise CorruptObject("padding is not zero")
    return tree


class _Writer:
    def __init__(self, adapt: Callable[[object], object] | None) -> None:
        self.out = bytearray()
        self.leaves: list[memoryview] = []
        self._adapt = adapt
        self._path: list[tuple[str, object]] = []
        """Pairs of format and argument, formatted only for an error message."""
        self._keys = 0  # > 0 inside dict keys and set elements, where arrays are not allowed

    def fail(self, what: str, remedy: str = "") -> UnsupportedValue:
        path = "".join(form.format(key) for form, key in self._path)
        return UnsupportedValue(f"state{path}: {what}", remedy=remedy)

    def node(self, value: Any) -> None:  # noqa: C901
        if len(self._path) > MAX_DEPTH:
            raise self.fail(f"nested deeper than {MAX_DEPTH} (a cycle?)")
        kind = type(value)
        if value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"T" if value else b"F"
        elif kind is int:
            self.out += b"i"
            self.integer(value)
        elif kind is float:
            self.out += b"f" + struct.pack("<d", value)
        elif kind is complex:
            self.out += b"c" + struct.pack("<dd", value.real, value.imag)
        elif kind is str:
            self.out += b"s"
            self.text(value)
        elif kind in _BYTES_TAGS:
            self.out += _BYTES_TAGS[kind]
            self.raw(value)
        elif kind in _SEQUENCE_TAGS:
            self.out += _SEQUENCE_TAGS[kind]
            self.sequence(value)
        elif kind is deque:
            self.out += b"q"
            self.varint(0 if value.maxlen is None else value.maxlen + 1)
            self.sequence(value)
        elif kind in _MAPPING_TAGS:
            self.out += _MAPPING_TAGS[kind]
            self.mapping(value)
        elif kind is defaultdict:
            if value.default_factory not in _FACTORY_NAMES:
                raise self.fail(
                    f"defaultdict with factory {value.default_factory!r} would need pickle",
                    f"use one of {', '.join(filter(None, FACTORIES))}, or store dict(...)",
                )
            self.out += b"D"
            self.text(_FACTORY_NAMES[value.default_factory])
            self.mapping(value)
        elif kind in _SET_TAGS:
            self.out += _SET_TAGS[kind]
            self.set_of(value)
        elif kind is range:
            self.out += b"r"
            for number in (value.start, value.stop, value.step):
                self.integer(number)
        elif kind is np.ndarray:
            self.array(value)
        elif isinstance(value, np.generic):
            self.out += b"g"
            self.numpy_type(value.dtype)
            self.out += value.tobytes()
        elif kind is Tensor:
            self.tensor(value)
        elif kind is Tagged:
            self.out += b"G"
            self.text(value.tag)
            self._path.append((".<{}>", value.tag))
            self.node(value.value)
            self._path.pop()
        else:
            self.foreign(value)

    def foreign(self, value: object) -> None:
        replacement = NotImplemented if self._adapt is None else self._adapt(value)
        if replacement is NotImplemented or type(replacement) is type(value):
            kind = type(value)
            raise self.fail(
                f"a {kind.__module__}.{kind.__qualname__} cannot be stored without pickle",
                "give plain values (dict, list, tuple, numbers, str, bytes, arrays, tensors), for example by "
                "state_dict() or .value, or a (get, set) pair",
            )
        self._path.append(("", None))  # a chain of replacements counts as depth
        self.node(replacement)
        self._path.pop()

    def varint(self, value: int) -> None:
        if value <= 0x7F:
            self.out.append(value)
        else:
            self.out += _varint(value)

    def raw(self, value: bytes | bytearray) -> None:
        self.varint(len(value))
        self.out += value

    def text(self, value: str) -> None:
        self.out += _short_text(value) if len(value) <= _SHORT else _text(value)

    def integer(self, value: int) -> None:
        self.raw(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def sequence(self, values: Iterable[Any]) -> None:
        items = tuple(values)
        self.varint(len(items))
        for i, item in enumerate(items):
            self._path.append(("[{}]", i))
            self.node(item)
            self._path.pop()

    def mapping(self, values: Mapping[Any, Any]) -> None:
        items = tuple(values.items())
        self.varint(len(items))
        for key, item in items:
            self._path.append(("[{!r:.60}]", key))
            self._keys += 1
            self.node(key)
            self._keys -= 1
            self.node(item)
            self._path.pop()

    def set_of(self, values: Iterable[Any]) -> None:
        whole, encodings = self.out, []
        self._keys += 1
        for item in tuple(values):
            self.out = bytearray()
            self._path.append(("{{{!r:.60}}}", item))
            self.node(item)
            self._path.pop()
            encodings.append(bytes(self.out))
        self._keys -= 1
        self.out = whole
        self.varint(len(encodings))
        self.out += b"".join(sorted(encodings))

    def numpy_type(self, dtype: np.dtype[Any]) -> None:
        if dtype.hasobject or NUMPY_TYPE.fullmatch(dtype.str) is None or dtype.itemsize == 0:
            raise self.fail(
                f"numpy type {dtype} cannot be stored", "use plain numbers, bool, bytes, str or datetime"
            )
        self.text(dtype.str)

    def array(self, value: npt.NDArray[Any]) -> None:
        self.out += b"a"
        self.numpy_type(value.dtype)
        self.leaf(value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8))

    def tensor(self, value: Tensor) -> None:
        if not element_type.is_known(value.dtype):
            raise self.fail(f"tensor type {value.dtype!r} cannot be stored")
        data = np.frombuffer(value.data, np.uint8) if memoryview(value.data).nbytes else np.empty(0, np.uint8)
        if data.size != math.prod(value.shape) * element_type.by_name(value.dtype).itemsize_bytes:
            raise self.fail(f"{data.size} bytes for a {value.dtype} tensor of shape {value.shape}")
        self.out += b"x"
        self.text(value.dtype)
        self.leaf(value.shape, data)

    def leaf(self, shape: tuple[int, ...], data: npt.NDArray[np.uint8]) -> None:
        if self._keys:
            raise self.fail("an array cannot be a dict key or a set element")
        if len(shape) > MAX_DIMS:
            raise self.fail(f"{len(shape)} dimensions, at most {MAX_DIMS} can be stored")
        self.varint(len(shape))
        for size in shape:
            self.varint(size)
        self.leaves.append(data.data if data.size else memoryview(b""))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return _varint(len(encoded)) + encoded


_SHORT = 64
_short_text = lru_cache(4096)(_text)
"""Caches the encoding of names, which repeat at every snapshot."""

_BYTES_TAGS: dict[type, bytes] = {bytes: b"b", bytearray: b"y"}
_SEQUENCE_TAGS: dict[type, bytes] = {list: b"l", tuple: b"t"}
_MAPPING_TAGS: dict[type, bytes] = {dict: b"d", OrderedDict: b"O", Counter: b"C"}
_SET_TAGS: dict[type, bytes] = {set: b"S", frozenset: b"Z"}
