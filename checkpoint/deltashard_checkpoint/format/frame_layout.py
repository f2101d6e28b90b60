"""The outer layout of a frame: header, sections, limits; bounded reads of sections and their meta."""

from __future__ import annotations

import struct

from deltashard_proto import arena_layout

from deltashard_checkpoint.errors import CorruptObject

MAGIC = b"DSFR"
VERSION = 1
MAX_FRAME_BYTES = arena_layout.MAX_FRAME_BYTES
"""Maximum size of a frame, so that one arena block always holds one."""
ALIGN = 64
HEADER = struct.Struct("<4sHBBBbHIIIIIQQ16s")
HEADER_BYTES = 64
KIND_AT = 6
DIGEST_AT = 48
MAX_ROWS = MAX_FRAME_BYTES
MAX_TABLE_ROWS = 1 << 48
MAX_NAME_BYTES = 4096
MAX_BLOB_BYTES = 1 << 44

TABLE_META = struct.Struct("<QIBIIQQ")  # table rows, columns, dtype, column range, row min, row max
TAIL_META = struct.Struct(
    "<I16s"
)  # of rows and tombstones, after TABLE_META: length and hash of their tail, or zeros
BLOB_META = struct.Struct("<QQQ")  # offset in the blob, bytes of the whole blob, bytes of this chunk


def aligned(n: int) -> int:
    """Round `n` up to the section alignment."""
    return -(-n // ALIGN) * ALIGN


class Sections:
    """Consecutive 64-byte aligned sections after the header."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = HEADER_BYTES

    def take(self, n: int) -> memoryview:
        stop = self._at + n
        end = aligned(stop)
        if end > len(self._view):
            raise CorruptObject(f"a section of {n} bytes does not fit into a frame of {len(self._view)}")
        piece = self._view[self._at : stop]
        if any(self._view[stop:end]):
            raise CorruptObject("padding is not zero")
        self._at = end
        return piece

    def end(self) -> None:
        if self._at != len(self._view):
            raise CorruptObject(f"{len(self._view) - self._at} trailing bytes after a frame's sections")


class MetaReader:
    """Bounded reads from the meta section."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def take(self, n: int) -> memoryview:
        if n > len(self._view) - self._at:
            raise CorruptObject("the meta section ends inside a value")
        piece = self._view[self._at : self._at + n]
        self._at += n
        return piece

    def name(self, length_format: str = "<H") -> str:
        (n,) = struct.unpack(length_format, self.take(struct.calcsize(length_format)))
        if not 0 < n <= MAX_NAME_BYTES:
            raise CorruptObject(f"a name of {n} bytes")
        try:
            return bytes(self.take(n)).decode()
        except UnicodeDecodeError:
            raise CorruptObject("a name is not UTF-8") from None

    def end(self) -> None:
        if self._at != len(self._view):
            raise CorruptObject("the meta section has trailing bytes")
