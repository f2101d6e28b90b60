"""The parts of one checkpoint of many ranks, created on demand: most readers need a few of thousands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deltashard_checkpoint.format.layout import Layout
from deltashard_checkpoint.format.object_key import index_key
from deltashard_checkpoint.log.entry import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPart:
    """One rank's part, as listed in a manifest."""

    token: str
    xxh3: str
    """Hash of the index's bytes."""
    covers: int | None
    rows: int
    stored_bytes: int
    common_blobs: bool
    """Whether it may hold blobs common to all ranks (`format.blob_name`); its own rank's blobs are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartList:
    """All parts by rank, with the layout that defines their boxes. Created parts are not cached."""

    attempt: int
    snapshot_id: int
    listed: tuple[ListedPart, ...]
    layout: Layout

    def __len__(self) -> int:
        return len(self.listed)

    def __iter__(self) -> Iterator[Part]:
        return map(self.part, range(len(self)))

    def part(self, rank: int) -> Part:
        each = self.listed[rank]
        return Part(
            rank=rank,
            index_key=index_key(
                attempt=self.attempt,
                snapshot_id=self.snapshot_id,
                rank=rank,
                token=each.token,
                xxh3=each.xxh3,
            ),
            boxes=self.layout.boxes_of(rank),
            stored_bytes=each.stored_bytes,
            covers=each.covers,
        )

    def ranks_with_blobs(self, own: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks whose parts hold common blobs, and the ranks `own`; ascending."""
        common = {rank for rank, each in enumerate(self.listed) if each.common_blobs}
        return tuple(sorted(common.union(rank for rank in own if rank < len(self))))
