"""A whole run, removed: in an order in which a removal that was killed leaves nothing that restores.

1. `log/HINT` says that the log goes on to a slot that no log has: from here on every reader finds its newest entries
   gone (`LogGap`) and restores, commits and deletes nothing. A living trainer finds the log changed under it.
2. The folded states, then the entries, oldest first: should HINT be lost, a gap is left at the beginning, not a shorter
   log that looks whole.
3. Data, layouts and all else that is a run's, then once more what somebody may have written into the log meanwhile, who
   had read it before (and HINT again, which he wrote over); last of all HINT.

Begun again it goes on: HINT says what this is. Only folders that every run has are touched, so a run whose name begins
with this one's (`a/b` beside `a`) keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.format.object_key import RESERVED
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import seq_of
from deltashard_checkpoint.stores.abc import ObjectInfo, ObjectNotFound

END = 10**14
"""The slot that HINT of a run under removal names: 15 digits, and beyond any log."""
_BATCH = 1000
_SWEEPS = 8
"""Of what others write into the log meanwhile; who goes on longer is a trainer that should have been ended."""
_BARRIER = b'{"fold":-1,"seq":%d}' % END


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What lies under a run's name."""

    objects: int
    bytes: int
    removing: bool
    """A removal of it was begun."""


def content(log: RunLog) -> Content:
    """Everything that a removal would delete; reads only."""
    objects = size = 0
    for info in _every(log):
        objects, size = objects + 1, size + info.size_bytes
    return Content(objects=objects, bytes=size, removing=removing(log))


def removing(log: RunLog) -> bool:
    """Whether a removal of this run was begun."""
    try:
        return log.store.get(log.key("log/HINT")) == _BARRIER
    except ObjectNotFound:
        return False


def remove(log: RunLog, *, advance: Callable[[int], None] = lambda _bytes: None) -> Content:
    """Remove the run; what was deleted. May be killed at any instant and run again. Raises store errors.

    The caller has asked whether anyone holds the run (`holder`).
    """
    was = removing(log)
    # IMPORTANT: before anything goes. From here on nobody takes what is left for a run.
    log.leave_hint(fold_seq=-1, seq=END)
    crash_point("rm.after_barrier")
    objects = size = 0

    def drop(found: Iterator[ObjectInfo]) -> None:
        nonlocal objects, size
        batch: list[ObjectInfo] = []
        for info in found:
            batch.append(info)
            if len(batch) >= _BATCH:
                _delete(log, batch, advance)
                objects, size = objects + len(batch), size + sum(each.size_bytes for each in batch)
                batch = []
        _delete(log, batch, advance)
        objects, size = objects + len(batch), size + sum(each.size_bytes for each in batch)

    hint = log.key("log/HINT")
    drop(log.store.list(log.key("log/fold-")))
    crash_point("rm.after_folds")
    # A listing is in the order of keys: entries oldest first.
    drop(info for info in log.store.list(log.key("log/")) if seq_of(info.key[len(log.run) + 1 :]) is not None)
    crash_point("rm.after_log")
    # IMPORTANT: the barrier stands while data goes. A writer that read the log before it may have put its own HINT.
    for _ in range(_SWEEPS):
        if not removing(log):
            log.leave_hint(fold_seq=-1, seq=END)
        late = [info for info in log.store.list(log.key("log/")) if info.key != hint]
        if not late:
            break
        drop(iter(late))
    drop(info for info in _every(log, last="log") if info.key != hint)
    crash_point("rm.before_hint")
    log.store.delete([hint])
    crash_point("rm.after_hint")
    return Content(objects=objects + 1, bytes=size, removing=was)


def _delete(log: RunLog, batch: list[ObjectInfo], advance: Callable[[int], None]) -> None:
    if not batch:
        return
    keys = [info.key for info in batch]
    half = len(keys) // 2
    log.store.delete(keys[:half])
    crash_point("rm.during_delete")
    log.store.delete(keys[half:])
    advance(sum(info.size_bytes for info in batch))


def _every(log: RunLog, *, last: str = "") -> Iterator[ObjectInfo]:
    for folder in sorted(RESERVED, key=lambda name: (name == last, name)):
        yield from log.store.list(log.key(f"{folder}/"))
