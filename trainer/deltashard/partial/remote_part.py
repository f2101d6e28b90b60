"""What ranks of other pods and machines take of the donor's part, as bytes that go over the store of the process group.

    lengths of the frames (u64 little-endian each, their count first), the frames as they are staged

A frame says itself what it is of, and has its hash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.format.frame import FrameKind, parse_frame

from deltashard.partial.staged_part import StagedPart, blobs_of


def packed(part: StagedPart, tables: frozenset[str]) -> bytes:
    frames = part.carried(tables)
    lengths = struct.pack(f"<{len(frames) + 1}Q", len(frames), *(len(frame) for frame in frames))
    return b"".join([lengths, *frames])


class RemoteStagedPart:
    """What `packed` made of a part, on a rank that cannot read it."""

    def __init__(self, data: bytes) -> None:
        """Raises `CorruptObject` for bytes that are none of ours."""
        try:
            (count,) = struct.unpack_from("<Q", data)
            lengths = struct.unpack_from(f"<{count}Q", data, 8)
        except struct.error as error:
            raise CorruptObject(f"it says no lengths: {error}", where="a part that a donor sent") from None
        at, view = 8 + 8 * count, memoryview(data)
        if at + sum(lengths) != len(data):
            raise CorruptObject(f"{len(data)} bytes are not what it says", where="a part that a donor sent")
        self._frames: list[memoryview] = []
        for length in lengths:
            self._frames.append(view[at : at + length])
            at += length

    def blobs(self) -> dict[str, memoryview]:
        return blobs_of(f for f in self._frames if parse_frame(f).info.kind is FrameKind.BLOB)

    def frames(self, tables: frozenset[str]) -> Iterator[memoryview]:
        for frame in self._frames:
            info = parse_frame(frame).info
            if info.kind is not FrameKind.BLOB and info.table in tables:
                yield frame


Donor = StagedPart | RemoteStagedPart
"""Where the donor's part is read."""
