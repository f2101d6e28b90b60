"""Garbage collection: deletes what `retire` entries have named, after a grace, and nothing else.

The log decides, not the listing: an object goes only if its prefix is named by a retire entry of the log, and that
entry is older than the grace by the store's own clock (its Last-Modified against the store's now): our clock has no
say. Because no entry may reference a retired prefix any more, what gc may delete once it may delete for ever: it can
be killed and run again, run twice at once, and run on an old state. The grace is for readers that still restore a
checkpoint which was live when they began.

When enough of what was named is gone, gc says so in the log (`reclaim`), and nobody remembers those prefixes any
longer: what a run has retired in its life must not add up in every reader. That is one entry for `MIN_RECLAIM_PREFIXES` prefixes.

Markers of saves that pods had on their way when they ended (`closing/`) go when they are old or their attempt is; and
what writers that were killed left half written (a sidecar, a copy), where the store is a directory.

On a full store nothing can be named, and naming is a write. There gc begins with what is safe to delete without one
(`unretired`): parts of cuts that can never be committed any more. No reader reads them, and no entry may reference them.

A dry run writes nothing at all, not even what some stores need to be asked for their time: it goes by our clock.

A log that cannot be followed to its end blocks gc: what cannot be read might say that something is still needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from deltashard_checkpoint.crash_point import crash_point
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.log.chain import live_prefixes
from deltashard_checkpoint.log.commit_log import DEFAULT_DEADLINE_S, RunLog
from deltashard_checkpoint.log.entry import Entry, Reclaimed, entry_key, prefix_of, snapshot_of
from deltashard_checkpoint.log.log_error import stopped
from deltashard_checkpoint.log.replay import is_protected, is_uncommittable, reclaimable
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.abc import ObjectInfo, ObjectNotFound
from deltashard_checkpoint.write.closing import CLOSING_WAIT_S, attempt_of_marker

DEFAULT_GRACE_S = 600.0
COMPACTION_TIMEOUT_S = 24 * 3600.0
"""A compaction that has not been committed for so long is given up (its entry would be refused from then on)."""
MIN_RECLAIM_PREFIXES = 64
"""So many retired prefixes whose objects are gone make a reclaim entry worth its slot."""
_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectResult:
    """What one collection did, or would do."""

    objects: int
    bytes: int
    prefixes: tuple[str, ...]
    """Prefixes that were (or would be) emptied."""
    waiting: tuple[str, ...]
    """Prefixes with objects whose grace is not over yet."""
    dry_run: bool
    unfinished: int = 0
    """Files that writers which died left half written (of a directory; no other store has any)."""

    def merged_with(self, later: CollectResult) -> CollectResult:
        return replace(
            later,
            objects=self.objects + later.objects,
            bytes=self.bytes + later.bytes,
            prefixes=tuple(sorted({*self.prefixes, *later.prefixes})),
            unfinished=self.unfinished + later.unfinished,
        )


def collect(
    log: RunLog,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    min_reclaim_prefixes: int = MIN_RECLAIM_PREFIXES,
    dry_run: bool = False,
    unretired: Collection[str] = (),
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> CollectResult:
    """Delete the objects under retired prefixes whose grace is over, and forget those that are empty. Idempotent.

    `unretired`: debris (see `orphaned_prefixes`) that goes at once although no entry names it, as far as it is of cuts.
    Raises `LogStopped` when an entry is unreadable, `LogGap`, `StoreUnavailable`.
    """
    state = log.refresh(deadline_s=deadline_s)
    if state.stopped is not None:
        raise stopped(state)
    now_s = log.clocks.wall_s() if dry_run else log.store.now_s()
    graces = GracePeriods(log, state, now_s=now_s, grace_s=grace_s)
    never = _uncommittable_prefixes(state, unretired)
    doomed: list[str] = []
    prefixes: set[str] = set()
    waiting: set[str] = set()
    objects = size_bytes = 0
    for prefix, info in data_objects(log):
        # IMPORTANT: only what a retire entry names, and only after its grace. No live checkpoint can read it: the law
        # of the log refuses an entry that references a retired prefix, and a retire entry that names a live one.
        named_by = state.retired.get(prefix)
        if named_by is None and prefix not in never:
            continue
        if named_by is not None and graces.left_s(named_by) > 0:
            waiting.add(prefix)
            continue
        prefixes.add(prefix)
        objects += 1
        size_bytes += info.size_bytes
        doomed.append(info.key)
        if len(doomed) >= _BATCH:
            _delete(log, doomed, dry_run=dry_run)
            doomed = []
    _delete(log, doomed, dry_run=dry_run)
    unfinished = 0
    if not dry_run:
        log.store.delete(expired_markers(log, state, now_s=now_s))
        unfinished = log.store.sweep(log.key(""))
        # What waits must be remembered, or it would be named anew, and its grace begin anew, again and again.
        still = min((state.retired[prefix] for prefix in waiting), default=state.tip + 1)
        _append_reclaim(log, still - 1, min_reclaim_prefixes=min_reclaim_prefixes, deadline_s=deadline_s)
    return CollectResult(
        objects=objects,
        bytes=size_bytes,
        prefixes=tuple(sorted(prefixes)),
        waiting=tuple(sorted(waiting)),
        dry_run=dry_run,
        unfinished=unfinished,
    )


def _uncommittable_prefixes(state: RunState, prefixes: Collection[str]) -> frozenset[str]:
    """Those of them that are of cuts which no checkpoint reads, and which can never be committed any more."""
    snapshots = {prefix: snapshot_of(prefix) for prefix in prefixes}
    found = {
        prefix for prefix, place in snapshots.items() if place is not None and is_uncommittable(state, *place)
    }
    return frozenset(found - live_prefixes(state) if found else found)


class GracePeriods:
    """How long what retire entries named must still wait; each entry is asked for once."""

    def __init__(self, log: RunLog, state: RunState, *, now_s: float, grace_s: float) -> None:
        self._log = log
        self._tip = state.tip
        self._now_s = now_s
        self._grace_s = grace_s
        self._left_s: dict[int, float] = {}

    def left_s(self, named_by: int) -> float:
        """Seconds of grace left of what the retire entry at this slot named; 0 or less: it may be deleted."""
        if named_by not in self._left_s:
            self._left_s[named_by] = self._grace_s - (
                self._now_s - _written_at_s(self._log, named_by, self._tip)
            )
        return self._left_s[named_by]


def _written_at_s(log: RunLog, seq: int, tip: int) -> float:
    """When an entry was put, by the store's clock; of one that is lost (`folded_state`), no earlier than it was."""
    for slot in range(seq, tip):
        with suppress(ObjectNotFound):
            return log.store.head(log.key(entry_key(slot))).modified_at_s
    return log.store.head(log.key(entry_key(tip))).modified_at_s


def _append_reclaim(log: RunLog, through: int, *, min_reclaim_prefixes: int, deadline_s: float) -> None:
    """Say that what was retired up to slot `through` is gone, when that is worth an entry."""
    if len(reclaimable(log.state, through)) < min_reclaim_prefixes:
        return

    def build(state: RunState, seq: int, writer: str) -> Entry | None:
        if len(reclaimable(state, through)) < min_reclaim_prefixes:
            return None
        return Reclaimed(seq=seq, previous="", writer=writer, at_s=0.0, through=through)

    log.append(build, before="gc.before_reclaim", after="gc.after_reclaim", deadline_s=deadline_s, frees=True)


def _delete(log: RunLog, keys: list[str], *, dry_run: bool) -> None:
    if dry_run or not keys:
        return
    log.store.delete(keys[: len(keys) // 2])
    crash_point("gc.during_delete")
    log.store.delete(keys[len(keys) // 2 :])
    crash_point("gc.after_delete")


def data_objects(log: RunLog) -> Iterator[tuple[str, ObjectInfo]]:
    """(deletable prefix, object) of all that lies under `data/` and is a cut's or a compaction's."""
    for info in log.store.list(log.key("data/")):
        try:
            yield prefix_of(info.key[len(log.run) + 1 :]), info
        except CorruptObject:
            continue


def expired_markers(log: RunLog, state: RunState, *, now_s: float) -> list[str]:
    """Store keys of the markers that no opener waits for any more: their attempt is fenced, or they are old.

    `now_s` by the store's clock. An opener looks at a marker for `CLOSING_WAIT_S`; what is older was left by a pod that
    was killed. Nothing but a marker is named, whatever else lies there.
    """
    expired = []
    for info in log.store.list(log.key("closing/")):
        attempt = attempt_of_marker(info.key[len(log.run) + 1 :])
        if attempt is None:
            continue
        fenced = state.attempt is not None and attempt < state.attempt
        if fenced or now_s - info.modified_at_s >= CLOSING_WAIT_S:
            expired.append(info.key)
    return expired


def orphaned_prefixes(
    log: RunLog,
    state: RunState,
    *,
    compaction_timeout_s: float = COMPACTION_TIMEOUT_S,
    read_only: bool = False,
) -> tuple[str, ...]:
    """Prefixes in the store that no live checkpoint reads and no retire entry names yet, and that may be named.

    Of cuts: those that can never be committed any more. Of compactions: those whose youngest object is older
    than `compaction_timeout_s` by the store's clock; by ours when `read_only`: to ask a directory for its time is to
    write into it.
    """
    youngest_s: dict[str, float] = {}
    for prefix, info in data_objects(log):
        youngest_s[prefix] = max(info.modified_at_s, youngest_s.get(prefix, 0.0))
    live = live_prefixes(state)
    now_s = log.clocks.wall_s() if read_only else log.store.now_s()
    found = []
    for prefix, modified_at_s in sorted(youngest_s.items()):
        if prefix in live or prefix in state.retired:
            continue
        if (
            not_orphaned_reason(state, prefix, quiet_s=now_s - modified_at_s, timeout_s=compaction_timeout_s)
            is None
        ):
            found.append(prefix)
    return tuple(found)


def not_orphaned_reason(
    state: RunState, prefix: str, *, quiet_s: float, timeout_s: float = COMPACTION_TIMEOUT_S
) -> str | None:
    """Why a prefix that nothing live reads may not be named: it may yet be committed; None: it may be named. Pure.

    `quiet_s`: seconds since the last object was put there, of a compaction.
    """
    if is_protected(state, prefix):
        return "it may be of a log entry that was given up: kept until the next attempt"
    place = snapshot_of(prefix)
    if place is None:
        if quiet_s >= timeout_s:
            return None
        return f"a compaction that may be under way: given up {timeout_s:.0f} s after its last object"
    if is_uncommittable(state, *place):
        return None
    return f"attempt {place[0]} may still commit cut {place[1]}"
