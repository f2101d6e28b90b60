"""What a DCP directory holds, by its `.metadata`: a pickle, read without running any of it.

An unpickler that may name the few classes DCP writes, and gets for each a stand-in that only keeps what it is given:
no class or function of torch's is reached, and any other name is refused, said in the message. What comes out is then
checked as any foreign bytes are: types, bounds, that the pieces of a tensor tile it, that files are there and long
enough, and lie in the directory.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_MAX_DIMS = 32


class NotReadable(UserError):
    """A directory that is no DCP checkpoint, or one that is damaged or not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where bytes of one `torch.save` lie."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a tensor, and where its elements are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place

    def stop(self, dimension: int) -> int:
        """Where it ends."""
        return self.offsets[dimension] + self.sizes[dimension]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, whole or in pieces that tile it."""

    name: str
    dtype: str
    """A name of `element_type`."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Those with elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Anything else."""

    name: str
    place: Place


ValuePath = tuple[str | int, ...]
"""Keys and indexes that lead to a value in the state dict that was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All values of a directory by their paths in the state dict that was saved, in its order."""

    values: Mapping[ValuePath, StoredTensor | StoredObject]


def read_contents(directory: Path) -> Contents:
    """What `directory` holds. Raises `NotReadable`."""
    path = directory / METADATA
    if not path.is_file():
        raise NotReadable(
            "no DCP checkpoint: there is no .metadata",
            where=str(directory),
            remedy="name the directory that dcp.save wrote; without its .metadata it was never finished",
        )
    with path.open("rb") as file:
        return _Checker(directory).contents(_load(file, str(path)))


class _Stand:
    """In the place of a class of torch's: keeps what the pickle gives its instances, and does nothing."""

    kind = ""
    held: Any = None

    def __init__(self, *_given: object) -> None:
        pass

    # Everything that a pickle can set comes by here, so that it can change no class.
    def __setstate__(self, state: object) -> None:
        self.held = state


def _stand(name: str) -> type[_Stand]:
    return type(name, (_Stand,), {"kind": name})


_KNOWN: Mapping[tuple[str, str], Any] = {
    (module, name): _stand(name)
    for module, names in {
        f"{_DCP}.metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        f"{_DCP}.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
        "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    }.items()
    for name in names
} | {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Names stand-ins only."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        if (known := _KNOWN.get((module, name))) is not None:
            return known
        if module == "torch" and element_type.is_known(name):
            return name
        raise NotReadable(
            f"the pickle names {module}.{name}, which no DCP checkpoint does that can be imported",
            remedy="do not load it with torch either, unless you know who wrote it: a pickle runs what it names",
        )


def _load(file: BinaryIO, where: str) -> Any:
    try:
        return _Unpickler(file).load()
    except NotReadable as error:
        raise NotReadable(error.what, where=where, remedy=error.remedy) from None
    except Exception as error:  # a pickle may fail in any way there is
        raise NotReadable(
            f"it cannot be read: {type(error).__name__}: {error}", where=where, remedy="copy it again"
        ) from error


class _Checker:
    """Makes `Contents` of stand-ins, trusting nothing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._where = str(directory / METADATA)
        self._sizes: dict[str, int] = {}

    def contents(self, found: Any) -> Contents:
        held = self._held(found, "Metadata")
        stored = self._mapping(held.get("storage_data"), "storage_data")
        places = {self._index(index): info for index, info in stored.items()}
        paths = held.get("planner_data")
        paths = {} if paths is None else self._mapping(paths, "planner_data")
        values: dict[ValuePath, StoredTensor | StoredObject] = {}
        for name, what in self._mapping(held.get("state_dict_metadata"), "state_dict_metadata").items():
            if not isinstance(name, str):
                raise self._wrong("a name that is no text")
            path = self._path(paths.get(name, (name,)))
            if path in values:
                raise self._wrong(f"two values at {'.'.join(map(str, path))}")
            if getattr(what, "kind", None) == "BytesStorageMetadata":
                values[path] = StoredObject(name=name, place=self._place(name, places.get((name, None))))
            else:
                values[path] = self._tensor(name, self._held(what, "TensorStorageMetadata"), places)
        return Contents(values=values)

    def _tensor(self, name: str, held: Mapping[str, Any], places: Mapping[Any, Any]) -> StoredTensor:
        shape = self._numbers(held.get("size"), name)
        properties = getattr(held.get("properties"), "held", None)
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, str) or not element_type.is_known(dtype):
            raise self._wrong(f"{name} has no known type")
        pieces = []
        for each in self._sequence(held.get("chunks"), name):
            chunk = self._held(each, "ChunkStorageMetadata")
            offsets, sizes = (self._numbers(chunk.get(key), name) for key in ("offsets", "sizes"))
            if not len(offsets) == len(sizes) == len(shape) or any(
                offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise self._wrong(f"{name} has a piece that is not within it")
            if math.prod(sizes):
                place = self._place(name, places.get((name, offsets)))
                pieces.append(Piece(offsets=offsets, sizes=sizes, place=place))
        self._check_tiling(name, shape, pieces)
        return StoredTensor(name=name, dtype=dtype, shape=shape, pieces=tuple(pieces))

    def _check_tiling(self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
            raise self._wrong(f"{name} is not whole: its pieces have not as many elements as it has")
        active: list[Piece] = []
        for piece in sorted(pieces, key=lambda piece: piece.offsets) if shape else ():
            active = [each for each in active if each.stop(0) > piece.offsets[0]]
            if any(_overlap(each, piece) for each in active):
                raise self._wrong(f"two pieces of {name} overlap")
            active.append(piece)

    def _place(self, name: str, info: Any) -> Place:
        """Where a value lies; its file is there and long enough."""
        held = self._held(info, "_StorageInfo", f"nothing says where {name} lies")
        file: Any = held.get("relative_path")
        offset: Any = held.get("offset")
        length: Any = held.get("length")
        if not isinstance(file, str) or file in {"", ".", ".."} or Path(file).name != file or "\0" in file:
            raise self._wrong(f"{name} lies in {file!r}, which is no file of this directory")
        if not (_is_count(offset) and _is_count(length)):
            raise self._wrong(f"{name} has no place in {file}")
        if held.get("transform_descriptors"):
            raise NotReadable(
                f"{name} was transformed when it was written ({held['transform_descriptors']!r:.60})",
                where=self._where,
                remedy="load it with torch, and dcp.save it again without _extensions",
            )
        path = self._directory / file
        if file not in self._sizes:
            self._sizes[file] = path.stat().st_size if path.is_file() else -1
        if self._sizes[file] < offset + length:
            what = "does not exist" if self._sizes[file] < 0 else "is too short"
            raise NotReadable(
                f"a file {what}, of which {name} needs {length} bytes",
                where=str(path),
                remedy="copy the directory again, whole",
            )
        return Place(file=path, offset=offset, length=length)

    def _index(self, index: Any) -> tuple[str, tuple[int, ...] | None]:
        held = self._held(index, "MetadataIndex")
        name, offset = held.get("fqn"), held.get("offset")
        if not isinstance(name, str):
            raise self._wrong("a name that is no text")
        return name, None if offset is None else self._numbers(offset, name)

    def _path(self, path: Any) -> ValuePath:
        if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
            raise self._wrong("a path that is none")
        return path

    def _held(self, found: Any, kind: str, what: str = "") -> Mapping[str, Any]:
        if getattr(found, "kind", None) != kind or not isinstance(found, _Stand):
            raise self._wrong(what or f"there is no {kind} where one has to be")
        return self._mapping({} if found.held is None else found.held, kind)

    def _mapping(self, found: Any, what: str) -> Mapping[Any, Any]:
        if not isinstance(found, dict):
            raise self._wrong(f"{what} is no dict")
        return found

    def _sequence(self, found: Any, name: str) -> Sequence[Any]:
        if not isinstance(found, list | tuple):
            raise self._wrong(f"{name} has no list of pieces")
        return found

    def _numbers(self, found: Any, name: str) -> tuple[int, ...]:
        if not isinstance(found, tuple | list) or len(found) > _MAX_DIMS or not all(map(_is_count, found)):
            raise self._wrong(f"{name} has a shape or place that is none")
        return tuple(found)

    def _wrong(self, what: str) -> NotReadable:
        return NotReadable(what, where=self._where, remedy="copy it again")


def _is_count(found: object) -> bool:
    return type(found) is int and 0 <= found < 1 << 62


def _overlap(a: Piece, b: Piece) -> bool:
    return all(a.offsets[d] < b.stop(d) and b.offsets[d] < a.stop(d) for d in range(len(a.offsets)))
