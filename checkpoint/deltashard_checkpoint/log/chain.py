"""Restore chains: from a checkpoint to the parts that restore it, following `covers` per part and box.

A part that covers checkpoint c holds, for its boxes, every row changed since c; all other rows of those boxes are
restored from c. Building a chain is a walk: at checkpoint s the wanted boxes are intersected with the parts of s, and
each piece continues at the checkpoint that its part covers, until a baseline is reached. Ranks may have learnt of
commits at different times, so two parts of one checkpoint may follow different paths. Log order does not matter.

A live `compact` entry of s replaces the parts of s and ends the walk there.

For a checkpoint of many ranks, its layout finds the parts whose boxes overlap the wanted ones. A piece that was
assigned to a rank stays with that rank while the layout is unchanged.

The lineage of an attempt lists the checkpoints it may cover: its own, then the one it resumed from and that
checkpoint's lineage. A checkpoint of an abandoned branch (fallback, time travel) is in the log, but not in the lineage.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import FormatError, InternalBug, UserError
from deltashard_checkpoint.format.schema import Box
from deltashard_checkpoint.log.entry import Checkpoint, Part
from deltashard_checkpoint.log.part_list import PartList
from deltashard_checkpoint.log.run_state import RunState

MAX_LISTED = 16
"""Maximum number of checkpoints that a message lists; the rest are counted."""


class CheckpointNotFound(UserError):
    """No live checkpoint matches the requested seq, step or pin."""

    cause = Cause.NOT_FOUND


class ChainIncomplete(FormatError):
    """No part of the chain holds some wanted box, so a restore would leave rows uninitialised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """One index to read: `boxes` are the pieces of the wanted boxes that this part, of checkpoint `seq`, provides.

    Within those boxes an older link only fills rows (and columns) that no newer link provided.
    """

    seq: int
    part: Part
    boxes: tuple[Box, ...]


def parts_of(state: RunState, seq: int) -> tuple[Part, ...]:
    """Return the parts from which checkpoint `seq` is read, or its compaction's. Blobs are read from these only.

    Raises `CheckpointNotFound`.
    """
    return tuple(_parts_of(state, seq))


def blob_parts_of(state: RunState, seq: int, own: Iterable[int]) -> tuple[Part, ...]:
    """Return the parts of checkpoint `seq` that hold blobs common to all ranks, and the parts of the ranks `own`.

    Raises `CheckpointNotFound`.
    """
    parts = _parts_of(state, seq)
    return tuple(map(parts.part, parts.ranks_with_blobs(own))) if isinstance(parts, PartList) else parts


def _parts_of(state: RunState, seq: int) -> tuple[Part, ...] | PartList:
    entry = state.checkpoints.get(seq)
    if entry is None:
        raise CheckpointNotFound(
            f"no live checkpoint {seq}",
            where=f"run {state.run}",
            remedy=describe_live(state.checkpoints.values()),
        )
    if (compact := state.compactions.get(seq)) is not None:
        return compact.parts
    if entry.listed is None:
        return entry.parts
    if seq not in state.listings:
        raise InternalBug(f"the manifest of checkpoint {seq} was not read", where=f"run {state.run}")
    return state.listings[seq]


def prefixes_of(state: RunState, seq: int) -> frozenset[str]:
    """Return the prefixes of the objects from which live checkpoint `seq` is read."""
    compact = state.compactions.get(seq)
    if compact is not None:
        return frozenset(part.prefix for part in compact.parts)
    return state.checkpoints[seq].prefixes


def live_prefixes(state: RunState) -> frozenset[str]:
    return frozenset(prefix for seq in state.checkpoints for prefix in prefixes_of(state, seq))


def held_bytes(state: RunState, seq: int) -> int:
    """Return the stored bytes of the objects from which live checkpoint `seq` is read."""
    compact = state.compactions.get(seq)
    return state.checkpoints[seq].stored_bytes if compact is None else compact.stored_bytes


def chain(
    state: RunState, seq: int, boxes: Iterable[Box] | None = None, *, strict: bool = True
) -> tuple[ChainLink, ...]:
    """Return the links that restore `boxes` (None: all boxes) of checkpoint `seq`, newest first.

    Raises `CheckpointNotFound`, and `ChainIncomplete` if no part holds a wanted box. If not `strict`, boxes that the
    checkpoint itself lacks (a grown or new table) are omitted instead; `missing` returns them.
    """
    parts = _parts_of(state, seq)
    pieces = _Pieces()
    if boxes is not None:
        pieces.add(None, boxes)
    elif isinstance(parts, PartList):
        for rank in range(len(parts)):
            pieces.add((parts.layout.digest, rank), parts.layout.boxes_of(rank))
    else:
        pieces.add(None, (box for part in parts for box in part.boxes))
    links: list[ChainLink] = []
    pending: dict[int, _Pieces] = {seq: pieces}
    queue = [-seq]
    while queue:
        at = -heapq.heappop(queue)
        pieces = pending.pop(at)
        for part, mine, holder in _shares(_parts_of(state, at), pieces):
            if not mine and not (at == seq and boxes is None):
                continue
            links.append(ChainLink(seq=at, part=part, boxes=tuple(mine)))
            if part.covers is not None and mine:
                if part.covers not in pending:
                    pending[part.covers] = _Pieces()
                    heapq.heappush(queue, -part.covers)
                pending[part.covers].add(holder, mine)
        rest = [box for held in pieces.loose.values() for box in held]
        if rest and (strict or at != seq):
            raise ChainIncomplete(
                f"checkpoint {seq} is incomplete: {describe(rest)} is held by no part of checkpoint {at}",
                where=f"run {state.run}",
                remedy="restore another checkpoint, or only the boxes it has",
            )
    return tuple(links)


Holder = tuple[str, int]
"""(digest of a layout, rank)."""


class _Pieces:
    """Pieces wanted from one checkpoint: held by a rank of a layout, or loose (by table)."""

    def __init__(self) -> None:
        self.held: dict[Holder, list[Box]] = {}
        self.loose: dict[str, list[Box]] = {}

    def add(self, holder: Holder | None, boxes: Iterable[Box]) -> None:
        if holder is not None:
            self.held.setdefault(holder, []).extend(boxes)
            return
        for box in boxes:
            self.loose.setdefault(box.table, []).append(box)


def _shares(
    parts: tuple[Part, ...] | PartList, pieces: _Pieces
) -> Iterator[tuple[Part, list[Box], Holder | None]]:
    """Yield (part, its share of the pieces, its holder); pieces that no part holds remain among the loose ones."""
    if not isinstance(parts, PartList):
        for boxes in pieces.held.values():
            pieces.add(None, boxes)
        for part in parts:
            yield part, _take(pieces.loose, part.boxes), None
        return
    digest = parts.layout.digest
    known = {rank: boxes for (layout, rank), boxes in pieces.held.items() if layout == digest}
    for (layout, _), boxes in pieces.held.items():
        if layout != digest:
            pieces.add(None, boxes)
    overlapping = parts.layout.ranks_overlapping(box for held in pieces.loose.values() for box in held)
    for rank in sorted({*known, *overlapping}):
        part = parts.part(rank)
        mine = [*known.get(rank, ()), *_take(pieces.loose, part.boxes)]
        yield part, mine, (digest, rank)


def missing(state: RunState, seq: int, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return the pieces of `boxes` that checkpoint `seq` does not hold."""
    pieces = _Pieces()
    pieces.add(None, boxes)
    for _ in _shares(_parts_of(state, seq), pieces):
        pass
    return tuple(box for held in pieces.loose.values() for box in held)


def closure(state: RunState, seqs: Iterable[int], *, written: bool = False) -> frozenset[int]:
    """Return `seqs` and every checkpoint that their chains may read: all must stay live for `seqs` to be restorable.

    `written`: follow the parts as written, ignoring compactions; a reader may have planned before a compaction.
    """
    found: set[int] = set()
    stack = [seq for seq in seqs if seq in state.checkpoints]
    while stack:
        seq = stack.pop()
        if seq not in found:
            found.add(seq)
            if written or seq not in state.compactions:
                stack += [covers for covers in state.checkpoints[seq].covered if covers in state.checkpoints]
    return frozenset(found)


def lineage(state: RunState, attempt: int) -> Iterator[int]:
    """Yield the seqs of the live checkpoints that `attempt` may cover, newest first."""
    by_attempt: dict[int, list[int]] = {}
    for seq, entry in state.checkpoints.items():
        by_attempt.setdefault(entry.attempt, []).append(seq)
    below: int | None = None
    number: int | None = attempt
    while number is not None:
        opened = state.attempts.get(number)
        for seq in sorted(by_attempt.get(number, ()), reverse=True):
            if below is None or seq <= below:
                yield seq
        if opened is None or opened.resumes_from is None:
            return
        below, number = opened.resumes_from, opened.resumes_attempt


def in_lineage(state: RunState, attempt: int, seq: int) -> bool:
    """Whether live checkpoint `seq` is in the lineage of `attempt`, without walking all checkpoints."""
    entry = state.checkpoints.get(seq)
    if entry is None:
        return False
    below: int | None = None
    number: int | None = attempt
    while number is not None and number >= entry.attempt:
        opened = state.attempts.get(number)
        if number == entry.attempt:
            return below is None or seq <= below
        if opened is None:
            return False
        below, number = opened.resumes_from, opened.resumes_attempt
    return False


def may_cover(state: RunState, attempt: int, seq: int) -> bool:
    """Whether a part of `attempt` may cover checkpoint `seq`: it is in the lineage and has the same layout.

    After a change of layout a rank has no change marks for rows that it received from other ranks.
    """
    opened = state.attempts.get(attempt)
    return (
        opened is not None
        and in_lineage(state, attempt, seq)
        and state.checkpoints[seq].layout == opened.layout
    )


# Boxes


def intersection(a: Box, b: Box) -> Box | None:
    if a.table != b.table:
        return None
    row_start, row_stop = max(a.row_start, b.row_start), min(a.row_stop, b.row_stop)
    col_start, col_stop = max(a.col_start, b.col_start), min(a.col_stop, b.col_stop)
    if row_start >= row_stop or col_start >= col_stop:
        return None
    return Box(table=a.table, row_start=row_start, row_stop=row_stop, col_start=col_start, col_stop=col_stop)


def difference(a: Box, b: Box) -> list[Box]:
    """Return `a` minus `b` as at most four disjoint rectangles."""
    common = intersection(a, b)
    if common is None:
        return [a]
    pieces = []
    for rows, cols in (
        ((a.row_start, common.row_start), (a.col_start, a.col_stop)),
        ((common.row_stop, a.row_stop), (a.col_start, a.col_stop)),
        ((common.row_start, common.row_stop), (a.col_start, common.col_start)),
        ((common.row_start, common.row_stop), (common.col_stop, a.col_stop)),
    ):
        if rows[0] < rows[1] and cols[0] < cols[1]:
            pieces.append(
                Box(table=a.table, row_start=rows[0], row_stop=rows[1], col_start=cols[0], col_stop=cols[1])
            )
    return pieces


def _take(loose: dict[str, list[Box]], held: Iterable[Box]) -> list[Box]:
    """Remove from the loose pieces, by table, those inside `held` and return them. Each piece is returned once."""
    mine: list[Box] = []
    for box in held:
        left: list[Box] = []
        for want in loose.get(box.table, ()):
            common = intersection(want, box)
            if common is not None:
                mine.append(common)
                left += difference(want, box)
            else:
                left.append(want)
        if left:
            loose[box.table] = left
        else:
            loose.pop(box.table, None)
    return mine


def describe(boxes: Sequence[Box]) -> str:
    """Format boxes for a message: the first three as table[rows, columns], and the number of the others."""
    texts = [f"{b.table}[{b.row_start}:{b.row_stop}, {b.col_start}:{b.col_stop}]" for b in boxes[:3]]
    return ", ".join(texts) + (f" and {len(boxes) - 3} more" if len(boxes) > 3 else "")


def describe_live(checkpoints: Iterable[Checkpoint]) -> str:
    """Format live checkpoints for a message: the newest ones and the total count."""
    every = sorted(checkpoints, key=lambda checkpoint: checkpoint.seq)
    newest = every[-MAX_LISTED:]
    some = f", the newest {len(newest)} of {len(every)}" if len(newest) < len(every) else ""
    return f"live{some}: " + (", ".join(f"seq {each.seq} (step {each.step})" for each in newest) or "none")
