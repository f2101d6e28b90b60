"""From a checkpoint to the parts that restore it: `covers` followed per part, box by box.

A part that covers checkpoint c holds, for its boxes, every row changed since c; the rest of those boxes is whatever c
restores there. So a chain is a walk: at checkpoint s every wanted box is cut among the parts of s, and the piece
that fell to a part goes on to the checkpoint that part covers, until baselines are reached. Ranks may have learnt
of commits at different times, so two parts of one checkpoint may walk different ways. Log order plays no part.

A live `compact` entry of s stands in for the parts of s, and ends the walk there.

Of a checkpoint of many ranks only the parts are looked at whose boxes meet what is wanted: its layout finds them. Once
a piece fell to a rank it stays that rank's, as far as the layout is the same.

The lineage of an attempt is what it may cover: its own checkpoints, then the one it resumed from and that one's
lineage. A checkpoint of a branch that was left (fallback, time travel) is in the log, but not in the lineage.
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
"""So many checkpoints are named to people; the rest are counted."""


class CheckpointNotFound(UserError):
    """No live checkpoint answers to the seq, step or pin that was asked for."""

    cause = Cause.NOT_FOUND


class ChainIncomplete(FormatError):
    """Some wanted box is held by no part of the chain: restoring it would leave rows that nobody loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLink:
    """One index to read: `boxes` are the pieces of the wanted boxes for which this part, of checkpoint `seq`, speaks.

    Within those boxes an older link only fills rows (and columns) that no newer link has provided.
    """

    seq: int
    part: Part
    boxes: tuple[Box, ...]


def parts_of(state: RunState, seq: int) -> tuple[Part, ...]:
    """The parts checkpoint `seq` is read from: its compaction's if it has one. Blobs are read from these and no older.

    Raises `CheckpointNotFound`.
    """
    return tuple(_parts_of(state, seq))


def blob_parts_of(state: RunState, seq: int, own: Iterable[int]) -> tuple[Part, ...]:
    """The parts of checkpoint `seq` to read the blobs for all ranks from, and those that are one of these ranks' own.

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
    """Prefixes under which what live checkpoint `seq` is read from lies."""
    compact = state.compactions.get(seq)
    if compact is not None:
        return frozenset(part.prefix for part in compact.parts)
    return state.checkpoints[seq].prefixes


def live_prefixes(state: RunState) -> frozenset[str]:
    return frozenset(prefix for seq in state.checkpoints for prefix in prefixes_of(state, seq))


def held_bytes(state: RunState, seq: int) -> int:
    """Bytes in the store of what live checkpoint `seq` is read from."""
    compact = state.compactions.get(seq)
    return state.checkpoints[seq].stored_bytes if compact is None else compact.stored_bytes


def chain(
    state: RunState, seq: int, boxes: Iterable[Box] | None = None, *, strict: bool = True
) -> tuple[ChainLink, ...]:
    """The links that restore `boxes` (None: all boxes) of checkpoint `seq`, newest first.

    Raises `CheckpointNotFound`, and `ChainIncomplete` when a wanted box is held by nobody. With `strict` false boxes
    the checkpoint itself does not have (a grown or new table) are left out instead: `missing` tells which.
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
    """What is wanted of one checkpoint: pieces that are a rank's of some layout, and loose ones by table."""

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
    """(part, its share of the pieces, who holds that); what no part has is left among the loose pieces."""
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
    meeting = parts.layout.ranks_overlapping(box for held in pieces.loose.values() for box in held)
    for rank in sorted({*known, *meeting}):
        part = parts.part(rank)
        mine = [*known.get(rank, ()), *_take(pieces.loose, part.boxes)]
        yield part, mine, (digest, rank)


def missing(state: RunState, seq: int, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The pieces of `boxes` that checkpoint `seq` does not have."""
    pieces = _Pieces()
    pieces.add(None, boxes)
    for _ in _shares(_parts_of(state, seq), pieces):
        pass
    return tuple(box for held in pieces.loose.values() for box in held)


def closure(state: RunState, seqs: Iterable[int], *, written: bool = False) -> frozenset[int]:
    """`seqs` and every checkpoint their chains may read: what must stay live for them to stay restorable.

    `written`: through the parts as written: all that a reader who planned before a compaction may read.
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
    """Seqs of the live checkpoints `attempt` may cover, newest first."""
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
    """Whether `attempt` may cover checkpoint `seq`, which must be live: no need to walk all checkpoints for it."""
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
    """Whether a part of `attempt` may cover checkpoint `seq`: it is in the lineage, and of the same layout.

    After a change of layout a rank's marks say nothing of the rows that others have handed it.
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
    """`a` without `b`, as at most four disjoint rectangles."""
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
    """What of the loose pieces, by table, lies in `held`; it is taken out of them, and no piece is given twice."""
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
    """Boxes for a message: the first three as table[rows, columns], and how many more."""
    texts = [f"{b.table}[{b.row_start}:{b.row_stop}, {b.col_start}:{b.col_stop}]" for b in boxes[:3]]
    return ", ".join(texts) + (f" and {len(boxes) - 3} more" if len(boxes) > 3 else "")


def describe_live(checkpoints: Iterable[Checkpoint]) -> str:
    """For people who asked for one that is not there: the newest of these live ones, and how many there are."""
    every = sorted(checkpoints, key=lambda checkpoint: checkpoint.seq)
    newest = every[-MAX_LISTED:]
    some = f", the newest {len(newest)} of {len(every)}" if len(newest) < len(every) else ""
    return f"live{some}: " + (", ".join(f"seq {each.seq} (step {each.step})" for each in newest) or "none")
