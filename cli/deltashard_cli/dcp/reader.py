"""Reader of a DCP directory, on top of torch's own reader, with a check for completeness.

`.metadata` is a pickle, and unpickling can run arbitrary code: use it only on trusted directories. Values are loaded by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format import element_type
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

METADATA = ".metadata"
Array = npt.NDArray[Any]
ValuePath = tuple[str | int, ...]


class NotReadable(UserError):
    """The directory is not a DCP checkpoint, or is damaged or incomplete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Location of the bytes of one `torch.save`."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChunk:
    """A rectangle of a tensor, and the location of its elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: TensorPlace

    def stop(self, dimension: int) -> int:
        return self.offsets[dimension] + self.sizes[dimension]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in one or more pieces that tile it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]
    """Non-empty pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """A value that is not a sharded tensor."""

    name: str
    place: TensorPlace


Contents = Mapping[ValuePath, StoredTensor | StoredObject]
"""All values of a directory by path, in the order of the saved state dict."""


def read_contents(directory: Path) -> Contents:
    """Return all values of `directory`, unread. Raises `NotReadable`."""
    path = directory / METADATA
    if not path.is_file():
        raise NotReadable(
            "not a DCP checkpoint: .metadata is missing",
            where=str(directory),
            remedy="use a directory written by dcp.save; without .metadata the save did not finish",
        )
    try:
        return _contents(directory, FileSystemReader(directory).read_metadata())
    except (NotReadable, OSError):
        raise
    except Exception as error:  # a damaged pickle may raise any error
        raise NotReadable(
            f"unreadable metadata: {type(error).__name__}: {error}", where=str(path), remedy="copy it again"
        ) from error


def _contents(directory: Path, metadata: Any) -> Contents:
    values: dict[ValuePath, StoredTensor | StoredObject] = {}
    paths = metadata.planner_data or {}
    for name, stored in metadata.state_dict_metadata.items():
        path = paths.get(name, (name,))
        if isinstance(stored, BytesStorageMetadata):
            place = _place(directory, name, metadata.storage_data.get(MetadataIndex(name)))
            values[path] = StoredObject(name=name, place=place)
            continue
        shape, chunks = tuple(stored.size), []
        for chunk in stored.chunks:
            if math.prod(chunk.sizes):
                info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
                chunks.append(
                    TensorChunk(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        place=_place(directory, name, info),
                    )
                )
        if (wrong := _tiling_error(shape, chunks)) is not None:
            raise _damaged(f"{name} is incomplete: {wrong}", directory / METADATA)
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        if not element_type.is_known(dtype):
            raise _damaged(f"{name} has an unsupported element type", directory / METADATA)
        values[path] = StoredTensor(name=name, dtype=dtype, shape=shape, chunks=tuple(chunks))
    return values


def _tiling_error(shape: tuple[int, ...], chunks: Sequence[TensorChunk]) -> str | None:
    """Return why `chunks` do not cover each element of a tensor exactly once; None if they do."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape) or any(
        not 0 <= chunk.offsets[d] < chunk.stop(d) <= whole
        for chunk in chunks
        for d, whole in enumerate(shape)
    ):
        return "its pieces do not cover it"
    # The element counts match, so the pieces leave a hole only if two of them overlap.
    active: list[TensorChunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets) if shape else ():
        active = [each for each in active if each.stop(0) > chunk.offsets[0]]
        if any(_overlap(each, chunk) for each in active):
            return "two of its pieces overlap"
        active.append(chunk)
    return None


def _overlap(a: TensorChunk, b: TensorChunk) -> bool:
    return all(a.offsets[d] < b.stop(d) and b.offsets[d] < a.stop(d) for d in range(len(a.offsets)))


def _place(directory: Path, name: str, info: Any) -> TensorPlace:
    """Return a value's location, after checking that its file exists and is long enough."""
    if info is None:
        raise _damaged(f"the location of {name} is missing", directory / METADATA)
    if getattr(info, "transform_descriptors", None):
        raise NotReadable(
            f"{name} was transformed when it was written ({info.transform_descriptors!r:.60})",
            where=str(directory / METADATA),
            remedy="load it with torch, and dcp.save it again without _extensions",
        )
    file = directory / info.relative_path
    there = file.stat().st_size if file.is_file() else -1
    if there < info.offset + info.length:
        what = "does not exist" if there < 0 else "is too short"
        raise _damaged(f"a file {what}, of which {name} needs {info.length} bytes", file)
    return TensorPlace(file=file, offset=info.offset, length=info.length)


def _damaged(what: str, where: Path) -> NotReadable:
    return NotReadable(what, where=str(where), remedy="copy the complete directory again")


def read_object(stored: StoredObject) -> Any:
    """Return the value. Raises `NotReadable` if it is damaged or not made of numbers, strings, containers, tensors."""
    return _load(stored.place, stored.name)


def read_tensor(stored: StoredTensor) -> Array:
    """Return a copy of the whole tensor as bits (bfloat16 as uint16). Raises `NotReadable`."""
    found = np.zeros(stored.shape, element_type.by_name(stored.dtype).carrier)
    for chunk in stored.chunks:
        at = tuple(slice(a, chunk.stop(d)) for d, a in enumerate(chunk.offsets))
        found[at] = read_chunk(stored, chunk)
    return found


def read_chunk(stored: StoredTensor, chunk: TensorChunk) -> Array:
    found = _load(chunk.place, stored.name)
    if (
        not isinstance(found, torch.Tensor)
        or found.layout != torch.strided
        or tuple(found.shape) != chunk.sizes
        or str(found.dtype) != f"torch.{stored.dtype}"
    ):
        what = f"{stored.name} is not a {stored.dtype} {list(chunk.sizes)} as in .metadata"
        raise _damaged(what, chunk.place.file)
    return array_of(found)


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's bits as the NumPy carrier type of its dtype, sharing memory if possible."""
    carrier = element_type.by_name(str(tensor.dtype).removeprefix("torch.")).carrier
    whole = tensor.detach().cpu().contiguous()
    if not whole.numel():
        return np.zeros(tuple(whole.shape), carrier)
    return whole.reshape(-1).view(torch.uint8).numpy().view(carrier).reshape(tuple(whole.shape))


def _load(place: TensorPlace, name: str) -> Any:
    try:
        with place.file.open("rb") as file:
            view = cast("IO[bytes]", _create_file_view(file, place.offset, place.length))
            return torch.load(view, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise NotReadable(
            f"{name} cannot be read: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            where=f"{place.file}, bytes {place.offset} to {place.offset + place.length}",
            remedy="copy the directory again; only tensors and plain values can be imported",
        ) from error
