"""A staged part: a survivor's data in one file on this machine, written at once and never read as a commit.

    frames    rows, each followed by its tail, and blobs (`format.frame`), each with its hash
    facts     JSON of `rule.StagedMetadata`, of the boxes, and of the bytes of all frames
    trailer   bytes of the facts (u64 little-endian), their xxh3-128, magic

The file is written under a temporary name, synced, and renamed, so a file of the final name is complete or fails its
hash. No store and no log refers to it.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash
from deltashard_checkpoint.errors import CorruptObject, DeltashardError
from deltashard_checkpoint.format.frame import Frame, FrameBytes, FrameInfo, TailInfo, scan_pack
from deltashard_checkpoint.format.frame_encoder import EncodedFrame
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.restore.frame_applier import FrameApplier

from deltashard.partial.rule import StagedMetadata

MAGIC = b"DSSTGD01"
_TRAILER = struct.Struct("<Q16s8s")


def path_of(staging_dir: Path, rank: int) -> Path:
    return staging_dir / f"rank-{rank}.part"


def discard(staging_dir: Path, rank: int) -> None:
    for path in (path_of(staging_dir, rank), path_of(staging_dir, rank).with_suffix(".new")):
        path.unlink(missing_ok=True)


def other_ranks(staging_dir: Path, rank: int) -> tuple[int, ...]:
    found = (path.stem.removeprefix("rank-") for path in staging_dir.glob("rank-*.part"))
    return tuple(sorted({int(each) for each in found if each.isdecimal()} - {rank}))


def write(
    staging_dir: Path, staged: StagedMetadata, frames: Iterable[EncodedFrame], *, boxes: Iterable[Box]
) -> Path:
    """Write and sync the part of a rank under a temporary name, which `publish` replaces by the final one."""
    staging_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = path_of(staging_dir, staged.rank).with_suffix(".new")
    place.unlink(missing_ok=True)
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        for frame in frames:
            file.write(frame.data)
            if frame.tail is not None:
                file.write(frame.tail)
        held = {
            "staged": dataclasses.asdict(staged),
            "boxes": [dataclasses.asdict(box) for box in boxes],
            "frame_bytes": file.tell(),
        }
        facts = json.dumps(held, sort_keys=True).encode()
        file.write(facts)
        file.write(_TRAILER.pack(len(facts), xxhash.xxh3_128_digest(facts), MAGIC))
        file.flush()
        os.fsync(file.fileno())
    return place


def publish(staging_dir: Path, rank: int) -> None:
    """Make the output of `write` the rank's staged part, durably."""
    path = path_of(staging_dir, rank)
    path.with_suffix(".new").replace(path)
    fd = os.open(staging_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class PartFrames:
    """Frames of a staged part: all of them, or those that the donor sent."""

    def __init__(self, data: memoryview) -> None:
        """Raises `CorruptObject` if `data` is not a sequence of whole frames."""
        self._frames: list[tuple[FrameInfo, memoryview]] = []
        expected: TailInfo | None = None
        for at, each in scan_pack(data):
            if isinstance(each, Frame):
                whole, expected = expected is None, each.info.tail
                self._frames.append((each.info, data[at : at + each.info.stored_bytes]))
            else:
                whole, expected = each.info == expected, None
            if not whole:
                raise CorruptObject("a frame and its tail do not belong together", where="a staged part")
        if expected is not None:
            raise CorruptObject("it ends before a frame's tail", where="a staged part")

    def frames(self, tables: frozenset[str]) -> Iterator[FrameBytes]:
        for info, data in self._frames:
            if info.table in tables:
                yield data[: info.length], None if info.tail is None else data[info.length :]

    def shared_frames(self, tables: frozenset[str]) -> list[memoryview]:
        """Return frames with tails that other ranks use: all blobs, and rows of `tables`, which every rank has."""
        return [data for info, data in self._frames if info.name or info.table in tables]

    def blobs(self) -> dict[str, memoryview]:
        applier = FrameApplier([])
        for info, data in self._frames:
            if info.name:
                applier.apply(data)
        applier.finish()
        return applier.blobs


class StagedPart(PartFrames):
    """A staged part that was read and verified."""

    def __init__(self, path: Path) -> None:
        """Raises `FileNotFoundError` if there is none, `DeltashardError` or `OSError` if it cannot be used."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _TRAILER.size:
                raise CorruptObject(f"{size} bytes are too few for a staged part", where=str(path))
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        facts_bytes, digest, magic = _TRAILER.unpack(view[-_TRAILER.size :])
        if magic != MAGIC:
            raise CorruptObject("it does not end with the magic of a staged part", where=str(path))
        facts_at = max(0, size - _TRAILER.size - facts_bytes)
        facts = bytes(view[facts_at : size - _TRAILER.size])
        if xxhash.xxh3_128_digest(facts) != digest:
            raise CorruptObject("its facts do not match their hash", where=str(path))
        try:
            held = json.loads(facts)
            self.staged = StagedMetadata(**held["staged"])
            self.boxes = tuple(Box(**box) for box in held["boxes"])
            if held["frame_bytes"] != facts_at:
                raise CorruptObject("its frames are incomplete", where=str(path))
        except (ValueError, TypeError, KeyError) as error:  # another version
            raise CorruptObject(f"its facts are invalid: {error}", where=str(path)) from None
        super().__init__(view[:facts_at])


def read_part(staging_dir: Path, rank: int) -> tuple[StagedPart | None, str]:
    """Return (the rank's staged part, ""), (None, why it cannot be used), or (None, "") if there is none."""
    try:
        return StagedPart(path_of(staging_dir, rank)), ""
    except FileNotFoundError:
        return None, ""
    except DeltashardError as error:
        return None, error.what
    except (OSError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
