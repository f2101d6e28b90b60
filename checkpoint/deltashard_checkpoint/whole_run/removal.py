"""Remove a whole run, in an order in which an interrupted removal leaves nothing that restores.

1. Put a barrier: a `log/HINT` that names a slot beyond any log. Every reader then misses the newest entries (`LogGap`)
   and neither restores, commits nor deletes; a living trainer finds the log changed. On a full store the barrier takes
   the space of redundant copies: the old HINT and folded states, without which a run is still complete.
2. Delete the folded states, then the entries, oldest first: if HINT is lost, the log has a gap at its beginning instead
   of looking like a shorter complete log.
3. Delete data, layouts and all other objects of the run, and again those of concurrent writers that had read the log
   before (and the HINT that they may have overwritten), until a round finds nothing. Delete HINT last.
4. List once more: remaining objects were put after the rounds and are reported (`Content.left`). If the rounds did not
   reach an end, HINT stays and keeps readers out.

A repeated call continues, because HINT identifies a removal. Only folders that every run has are touched, so a run
whose name begins with this one's (`a/b` next to `a`) keeps its objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.format.object_key import RESERVED
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import entry_key, seq_of
from deltashard_checkpoint.log.listing import REMOVAL
from deltashard_checkpoint.stores.abc import ObjectInfo, ObjectNotFound, StoreFull

_BATCH = 1000
_ROUNDS = 8
"""Rounds against concurrent writes; a longer-lived writer is a trainer that should have been ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Objects under a run's name."""

    objects: int
    bytes: int
    left: int = 0
    """Objects found after the removal, from concurrent writers."""


def content(log: RunLog) -> Content:
    """Return everything that a removal would delete; reads only."""
    objects = size = 0
    for info in _all_objects(log):
        objects, size = objects + 1, size + info.size_bytes
    return Content(objects=objects, bytes=size)


def is_being_removed(log: RunLog) -> bool:
    return log.hint() == REMOVAL


class RunAdvanced(UserError):
    """The log advanced during the check: the run is in use."""


def remove(
    log: RunLog, *, through: int | None = None, advance: Callable[[int], None] = lambda _bytes: None
) -> Content:
    """Remove the run; return what was deleted and what is left. May be killed at any time and repeated.

    The caller has checked that the run has no holder (`holder`), by the log up to slot `through`; a later entry aborts
    the removal. None: ignore later entries.

    Raises `RunAdvanced`, with nothing removed, and store errors.
    """
    hint = None if through is None else _hint(log)
    # IMPORTANT: before any deletion. From here on no reader accepts the rest as a run.
    _put_barrier(log)
    crash_point("rm.after_barrier")
    if through is not None and (newer := _first_after(log, through)) is not None:
        if hint is not None:
            log.store.put(log.key("log/HINT"), hint)
        else:
            log.store.delete([log.key("log/HINT")])
        raise RunAdvanced(
            f"entry {newer} was written during the check: the run is in use",
            where=f"run {log.run}",
            remedy="end its trainers and run the command again",
        )
    gone: list[int] = []

    def drop(found: Iterator[ObjectInfo]) -> bool:
        before = len(gone)
        while batch := list(islice(found, _BATCH)):
            _delete(log, batch, advance)
            gone.extend(info.size_bytes for info in batch)
        return len(gone) > before

    drop(log.store.list(log.key("log/fold-")))
    crash_point("rm.after_folds")
    # Listings are in key order: entries oldest first.
    drop(info for info in log.store.list(log.key("log/")) if seq_of(info.key[len(log.run) + 1 :]) is not None)
    crash_point("rm.after_log")
    for _ in range(_ROUNDS):
        # IMPORTANT: the barrier must be in place during the deletion. A concurrent writer may have put its own HINT.
        if not is_being_removed(log):
            _put_barrier(log)
        if not drop(_all_but_hint(log)):
            break
    for folder in RESERVED:
        log.store.sweep(log.key(f"{folder}/"), quiet_s=0.0)
    left = sum(1 for _ in _all_but_hint(log))
    if not left:
        crash_point("rm.before_hint")
        log.store.delete([log.key("log/HINT")])
        crash_point("rm.after_hint")
        gone.append(len(REMOVAL.data))
        left = sum(1 for _ in _all_objects(log))
    return Content(objects=len(gone), bytes=sum(gone), left=left)


def _put_barrier(log: RunLog) -> None:
    """Put the barrier; raises `StoreFull` if there is no space even without the redundant copies."""
    try:
        log.put_hint(REMOVAL)
    except StoreFull:
        log.store.delete([info.key for info in log.store.list(log.key("log/fold-"))])
        log.store.delete([log.key("log/HINT")])
        log.put_hint(REMOVAL)


def _hint(log: RunLog) -> bytes | None:
    try:
        return bytes(log.store.get(log.key("log/HINT")))
    except ObjectNotFound:
        return None


def _first_after(log: RunLog, through: int) -> int | None:
    """Return the first entry of the log after a slot; None if there is none."""
    after = log.key(entry_key(through)) if through >= 0 else ""
    found = (
        seq_of(info.key[len(log.run) + 1 :]) for info in log.store.list(log.key("log/"), start_after=after)
    )
    return next((seq for seq in found if seq is not None and seq > through), None)


def _delete(log: RunLog, batch: list[ObjectInfo], advance: Callable[[int], None]) -> None:
    if not batch:
        return
    keys = [info.key for info in batch]
    half = len(keys) // 2
    log.store.delete(keys[:half])
    crash_point("rm.during_delete")
    log.store.delete(keys[half:])
    advance(sum(info.size_bytes for info in batch))


def _all_objects(log: RunLog) -> Iterator[ObjectInfo]:
    """The log comes first: if HINT is lost, entries without data are worse than data without entries."""
    for folder in sorted(RESERVED, key=lambda name: (name != "log", name)):
        yield from log.store.list(log.key(f"{folder}/"))


def _all_but_hint(log: RunLog) -> Iterator[ObjectInfo]:
    return (info for info in _all_objects(log) if info.key != log.key("log/HINT"))
