"""A whole run, removed: in an order in which a removal that was killed leaves nothing that restores.

1. `log/HINT` says that the log goes on to a slot that no log has: from here on every reader finds its newest entries
   gone (`LogGap`) and restores, commits and deletes nothing. A living trainer finds the log changed under it. On a full
   store it takes the place of copies: of the old HINT, and of folded states. Without them a run is as whole as before.
2. The folded states, then the entries, oldest first: should HINT be lost, a gap is left at the beginning, not a shorter
   log that looks whole.
3. Data, layouts and all else that is a run's, and once more what somebody may have written meanwhile, who had read the
   log before (and HINT again, which he wrote over): listed again until a round finds nothing. Last of all HINT.
4. A last look: what is there now came after the rounds, and is said (`Content.left`). Where the rounds did not come to
   an end, HINT stays, and with it the door is shut.

Begun again it goes on: HINT says what this is. Only folders that every run has are touched, so a run whose name begins
with this one's (`a/b` beside `a`) keeps its own.
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
"""Of what others write meanwhile; who goes on longer is a trainer that should have been ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What lies under a run's name."""

    objects: int
    bytes: int
    left: int = 0
    """Objects that a removal saw when it was done: somebody put them meanwhile."""


def content(log: RunLog) -> Content:
    """Everything that a removal would delete; reads only."""
    objects = size = 0
    for info in _all_objects(log):
        objects, size = objects + 1, size + info.size_bytes
    return Content(objects=objects, bytes=size)


def is_being_removed(log: RunLog) -> bool:
    return log.hint() == REMOVAL


class RunAdvanced(UserError):
    """The log went on while it was being looked at: the run is somebody's."""


def remove(
    log: RunLog, *, through: int | None = None, advance: Callable[[int], None] = lambda _bytes: None
) -> Content:
    """Remove the run; what was deleted, and what is left. May be killed at any instant and run again.

    The caller has asked whether anyone holds the run (`holder`), by the log up to slot `through`: whoever wrote behind
    it meanwhile keeps the run. None: whoever writes is not to be minded.

    Raises `RunAdvanced`, with nothing removed, and store errors.
    """
    hint = None if through is None else _hint(log)
    # IMPORTANT: before anything goes. From here on nobody takes what is left for a run.
    _put_barrier(log)
    crash_point("rm.after_barrier")
    if through is not None and (newer := _first_after(log, through)) is not None:
        if hint is not None:
            log.store.put(log.key("log/HINT"), hint)
        else:
            log.store.delete([log.key("log/HINT")])
        raise RunAdvanced(
            f"entry {newer} was written while it was looked at: it goes on",
            where=f"run {log.run}",
            remedy="end its trainers, and call again",
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
    # A listing is in the order of keys: entries oldest first.
    drop(info for info in log.store.list(log.key("log/")) if seq_of(info.key[len(log.run) + 1 :]) is not None)
    crash_point("rm.after_log")
    for _ in range(_ROUNDS):
        # IMPORTANT: the barrier stands while data goes. A writer that read the log before it may have put its own HINT.
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
    """Put the barrier; raises `StoreFull` when there is no room even without the copies."""
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
    """The first entry of the log behind a slot; None: there is none."""
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
    """Of the log first: should HINT be lost, entries without data are worse than data without entries."""
    for folder in sorted(RESERVED, key=lambda name: (name != "log", name)):
        yield from log.store.list(log.key(f"{folder}/"))


def _all_but_hint(log: RunLog) -> Iterator[ObjectInfo]:
    return (info for info in _all_objects(log) if info.key != log.key("log/HINT"))
