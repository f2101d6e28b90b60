"""Values of a DCP directory, read by `torch.load(weights_only=True)`, which builds tensors and plain values only."""

from __future__ import annotations

import io
from typing import IO, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import torch
from deltashard_checkpoint.format import element_type

from deltashard_cli.dcp.metadata import NotReadable, Piece, Place, StoredObject, StoredTensor

Array = npt.NDArray[Any]


def read_object(stored: StoredObject) -> Any:
    """The value. Raises `NotReadable` for one that is more than numbers, text, containers and tensors, or damaged."""
    return _load(stored.place, stored.name)


def read_tensor(stored: StoredTensor) -> Array:
    """The whole tensor as its bits (bfloat16 as uint16), in memory of its own. Raises `NotReadable`."""
    found = np.zeros(stored.shape, element_type.by_name(stored.dtype).carrier)
    for piece in stored.pieces:
        at = tuple(slice(a, piece.stop(d)) for d, a in enumerate(piece.offsets))
        found[at] = read_piece(stored, piece)
    return found


def read_piece(stored: StoredTensor, piece: Piece) -> Array:
    """One piece's bits. Raises `NotReadable`."""
    found = _load(piece.place, stored.name)
    if (
        not isinstance(found, torch.Tensor)
        or found.layout != torch.strided
        or tuple(found.shape) != piece.sizes
        or str(found.dtype) != f"torch.{stored.dtype}"
    ):
        raise NotReadable(
            f"{stored.name} is not the {stored.dtype} {list(piece.sizes)} that .metadata says",
            where=str(piece.place.file),
            remedy="copy the directory again",
        )
    return array_of(found)


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor's bits, as the numpy type that carries its type; of the same memory if that is possible."""
    carrier = element_type.by_name(str(tensor.dtype).removeprefix("torch.")).carrier
    whole = tensor.detach().cpu().contiguous()
    if not whole.numel():
        return np.zeros(tuple(whole.shape), carrier)
    return whole.reshape(-1).view(torch.uint8).numpy().view(carrier).reshape(tuple(whole.shape))


def _load(place: Place, name: str) -> Any:
    try:
        with place.file.open("rb") as file:
            return torch.load(cast("IO[bytes]", _Range(file, place)), map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise NotReadable(
            f"{name} cannot be read: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            where=f"{place.file}, bytes {place.offset} to {place.offset + place.length}",
            remedy="copy the directory again; what is no tensor or plain value is not imported",
        ) from error


class _Range(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._file = file
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")
        count = max(0, min(len(room), self._place.length - self._at))
        self._file.seek(self._place.offset + self._at)
        data = self._file.readinto(room[:count])  # type: ignore[attr-defined]
        self._at += data
        return int(data)
