"""A staged part: what a survivor held, as one file on this machine, written at once and never read as a commit.

    frames    rows and blobs, as in any pack (`format.frame`), each with its hash
    index     of an ordinary part (`format.index`): attempt, rank, step, boxes, covers, where each frame lies
    facts     JSON of `rule.Staged`
    trailer   bytes of index and of facts (u64 little-endian each), xxh3-128 of all before it, magic

It is written beside, synced, and renamed: a file of this name is whole, or its hash says that it is not. No store and
no log knows of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash
from deltashard_checkpoint.cache.pack_spool import PACK_BYTES
from deltashard_checkpoint.errors import CorruptObject, DeltashardError
from deltashard_checkpoint.format.frame import FrameKind
from deltashard_checkpoint.format.frame_encoder import EncodedFrame
from deltashard_checkpoint.format.index import Index, Pack, Place, encode_index, parse_index
from deltashard_checkpoint.format.object_key import new_token, pack_key
from deltashard_checkpoint.format.schema import Box, TableSchema
from deltashard_checkpoint.restore.frame_applier import FrameApplier

from deltashard.partial.rule import Staged

MAGIC = b"DSSTGD01"
_TRAILER = struct.Struct("<QQ16s8s")
_HASHED_AT_ONCE = 16 << 20


def path_of(home: Path, rank: int) -> Path:
    return home / f"rank-{rank}.part"


def discard(home: Path, rank: int) -> None:
    for path in (path_of(home, rank), path_of(home, rank).with_suffix(".new")):
        path.unlink(missing_ok=True)


def others(home: Path, rank: int) -> tuple[int, ...]:
    """Ranks other than `rank` whose parts lie there."""
    found = (path.stem.removeprefix("rank-") for path in home.glob("rank-*.part"))
    return tuple(sorted({int(each) for each in found if each.isdecimal()} - {rank}))


def write(
    home: Path,
    staged: Staged,
    frames: Iterable[EncodedFrame],
    *,
    tables: tuple[TableSchema, ...],
    boxes: tuple[Box, ...],
) -> Path:
    """Write the part of a rank, synced, under a name of its own; `publish` gives it the one that is read."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = path_of(home, staged.rank).with_suffix(".new")
    token, digest, raw_bytes = new_token(), xxhash.xxh3_128(), 0
    places: list[Place] = []
    sizes = [0]
    with contextlib.suppress(FileNotFoundError):
        place.unlink()
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        for frame in frames:
            put(frame.data)
            if sizes[-1] >= PACK_BYTES:
                sizes.append(0)
            places.append(Place(pack=len(sizes) - 1, offset=sizes[-1], info=frame.info))
            sizes[-1] += frame.info.length
            raw_bytes += frame.raw_bytes
        packs = tuple(
            Pack(key=pack_key(attempt=staged.attempt, cut=1, rank=staged.rank, token=token, n=n), bytes=size)
            for n, size in enumerate(sizes)
        )
        index = encode_index(
            Index(
                run=staged.run, attempt=staged.attempt, cut=1, step=staged.step, rank=staged.rank, token=token,
                tables=tables, packs=packs, places=tuple(places), boxes=boxes,
                covers=staged.covers, raw_bytes=raw_bytes,
            )
        )  # fmt: skip
        facts = json.dumps(dataclasses.asdict(staged), sort_keys=True).encode()
        put(index)
        put(facts)
        put(struct.pack("<QQ", len(index), len(facts)))
        file.write(digest.digest() + MAGIC)
        file.flush()
        os.fsync(file.fileno())
    return place


def publish(home: Path, rank: int) -> None:
    """What `write` wrote is the rank's staged part from now on, whatever dies."""
    path = path_of(home, rank)
    path.with_suffix(".new").replace(path)
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class StagedPart:
    """One that was read and is whole."""

    def __init__(self, path: Path) -> None:
        """Raises `FileNotFoundError` when there is none, `DeltashardError` or `OSError` for one that cannot be used."""
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _TRAILER.size:
                raise CorruptObject(f"{size} bytes are no staged part", where=str(path))
            self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        index_bytes, facts_bytes, digest, magic = _TRAILER.unpack(self._view[-_TRAILER.size :])
        if magic != MAGIC:
            raise CorruptObject("it does not end as a staged part does", where=str(path))
        found = xxhash.xxh3_128()
        end = size - 24  # the hash and the magic
        for at in range(0, end, _HASHED_AT_ONCE):
            found.update(self._view[at : min(end, at + _HASHED_AT_ONCE)])
        if found.digest() != digest:
            raise CorruptObject("its bytes do not have its hash", where=str(path))
        facts_at = size - _TRAILER.size - facts_bytes
        index_at = facts_at - index_bytes
        if index_at < 0:
            raise CorruptObject("its sections do not fit", where=str(path))
        self.index = parse_index(bytes(self._view[index_at:facts_at]), where=str(path))
        try:
            self.staged = Staged(**json.loads(bytes(self._view[facts_at : facts_at + facts_bytes])))
        except (ValueError, TypeError) as error:
            raise CorruptObject(f"it says what no part says: {error}", where=str(path)) from None
        said = self.staged
        if (self.index.attempt, self.index.rank, self.index.step, self.index.covers) != (
            said.attempt, said.rank, said.step, said.covers,
        ):  # fmt: skip
            raise CorruptObject("index and facts differ", where=str(path))

        self._starts = [0, *itertools.accumulate(pack.bytes for pack in self.index.packs)]
        if self._starts[-1] != index_at:
            raise CorruptObject("its frames are not all that comes before the index", where=str(path))

    def _at(self, place: Place) -> memoryview:
        start = self._starts[place.pack] + place.offset
        return self._view[start : start + place.info.length]

    def frames(self, tables: frozenset[str]) -> Iterator[memoryview]:
        for place in self.index.places:
            if place.info.kind is not FrameKind.BLOB and place.info.table in tables:
                yield self._at(place)

    def carried(self, tables: frozenset[str]) -> list[memoryview]:
        """Frames that are of use to other ranks: all blobs, and rows of `tables`, which every rank has."""
        return [
            self._at(place)
            for place in self.index.places
            if place.info.kind is FrameKind.BLOB or place.info.table in tables
        ]

    def carried_bytes(self, tables: frozenset[str]) -> int:
        return sum(len(frame) for frame in self.carried(tables))

    def blobs(self) -> dict[str, memoryview]:
        places = (place for place in self.index.places if place.info.kind is FrameKind.BLOB)
        return blobs_of(map(self._at, places))


def blobs_of(frames: Iterable[memoryview]) -> dict[str, memoryview]:
    applier = FrameApplier([])
    for frame in frames:
        applier.apply(frame)
    applier.finish()
    return applier.blobs


def look(home: Path, rank: int) -> tuple[StagedPart | None, str]:
    """The rank's staged part, or (None, why what is there cannot be used); (None, "") where there is none."""
    try:
        return StagedPart(path_of(home, rank)), ""
    except FileNotFoundError:
        return None, ""
    except DeltashardError as error:
        return None, error.what
    except (OSError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
