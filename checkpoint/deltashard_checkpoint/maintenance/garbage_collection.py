"""Garbage collection: delete objects that `retire` entries name, after a grace period, and no others.

The log decides, not the listing: an object is deleted only if a retire entry names its prefix and that entry is older
than the grace period. Its age is its Last-Modified against the store's clock; the local clock is not used. No entry may
reference a retired prefix again, so a deletion that is allowed once stays allowed: gc can be killed and restarted, run
twice concurrently, and use an old state. The grace period protects readers that restore a checkpoint retired since.

Once enough retired prefixes are empty, gc appends a `reclaim` entry and readers forget them, so that a run's retired
prefixes do not accumulate in every reader. One entry covers at least `MIN_RECLAIM_PREFIXES` prefixes.

Markers of interrupted saves (`closing/`) are deleted when they are old or their attempt is fenced. So are files left
half written by killed writers (a sidecar, a copy), if the store is a directory.

A full store accepts no retire entry. There gc starts with objects that are safe to delete without one (`unretired`):
parts of snapshots that can never be committed. No reader reads them, and no entry may reference them.

A dry run writes nothing, and therefore uses the local clock: some stores need a write to report their time.

A log that cannot be followed to its end blocks gc, because an unreadable entry may still reference an object.
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
"""A compaction without a commit after this time is abandoned, and its entry is rejected from then on."""
MIN_RECLAIM_PREFIXES = 64
"""Minimum number of empty retired prefixes for a reclaim entry."""
_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectResult:
    """Result of one collection or dry run."""

    objects: int
    bytes: int
    prefixes: tuple[str, ...]
    """Prefixes that were, or would be, emptied."""
    waiting: tuple[str, ...]
    """Prefixes with objects in their grace period."""
    dry_run: bool
    unfinished: int = 0
    """Half-written files of killed writers (only in directory stores)."""

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
    """Delete the objects under retired prefixes after their grace period, and reclaim empty prefixes. Idempotent.

    `unretired` are orphaned prefixes (see `orphaned_prefixes`); those of snapshots are deleted at once without an
    entry.
    Raises `LogStopped` if an entry is unreadable, `LogGap`, `StoreUnavailable`.
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
        # IMPORTANT: only prefixes of a retire entry, and only after its grace period. No live checkpoint can read them:
        # the log rejects an entry that references a retired prefix, and a retire entry that names a live one.
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
        # Waiting prefixes must stay recorded; a second retirement would restart their grace period.
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
    """Return the prefixes of snapshots that no checkpoint reads and that can never be committed."""
    snapshots = {prefix: snapshot_of(prefix) for prefix in prefixes}
    found = {
        prefix for prefix, place in snapshots.items() if place is not None and is_uncommittable(state, *place)
    }
    return frozenset(found - live_prefixes(state) if found else found)


class GracePeriods:
    """Remaining grace periods of retire entries; each entry's age is read once."""

    def __init__(self, log: RunLog, state: RunState, *, now_s: float, grace_s: float) -> None:
        self._log = log
        self._tip = state.tip
        self._now_s = now_s
        self._grace_s = grace_s
        self._left_s: dict[int, float] = {}

    def left_s(self, named_by: int) -> float:
        """Return the seconds of grace left for the retire entry at this slot; 0 or less: deletion is allowed."""
        if named_by not in self._left_s:
            self._left_s[named_by] = self._grace_s - (
                self._now_s - _written_at_s(self._log, named_by, self._tip)
            )
        return self._left_s[named_by]


def _written_at_s(log: RunLog, seq: int, tip: int) -> float:
    """Return when an entry was put, by the store's clock; for a lost entry (`folded_state`), an upper bound."""
    for slot in range(seq, tip):
        with suppress(ObjectNotFound):
            return log.store.head(log.key(entry_key(slot))).modified_at_s
    return log.store.head(log.key(entry_key(tip))).modified_at_s


def _append_reclaim(log: RunLog, through: int, *, min_reclaim_prefixes: int, deadline_s: float) -> None:
    """Append a reclaim entry for everything retired up to slot `through`, if it covers enough prefixes."""
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
    """Yield (deletable prefix, object) for all objects of snapshots and compactions under `data/`."""
    for info in log.store.list(log.key("data/")):
        try:
            yield prefix_of(info.key[len(log.run) + 1 :]), info
        except CorruptObject:
            continue


def expired_markers(log: RunLog, state: RunState, *, now_s: float) -> list[str]:
    """Return the store keys of markers that no opener waits for: their attempt is fenced, or they are old.

    `now_s` is by the store's clock. An opener honours a marker for `CLOSING_WAIT_S`; older ones are left from killed
    pods. Other objects under the prefix are never returned.
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
    """Return prefixes in the store that no live checkpoint reads, no retire entry names, and that may be retired.

    These are prefixes of snapshots that can never be committed, and of compactions whose newest object is older than
    `compaction_timeout_s` by the store's clock. `read_only` uses the local clock: a directory store's needs a write.
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
    """Return why an unread prefix may still be committed and must not be retired; None if it may be retired. Pure.

    `quiet_s`: seconds since the last put under the prefix of a compaction.
    """
    if is_protected(state, prefix):
        return "it may belong to a voided log entry: kept until the next attempt"
    place = snapshot_of(prefix)
    if place is None:
        if quiet_s >= timeout_s:
            return None
        return f"a compaction that may be in progress: orphaned {timeout_s:.0f} s after its last object"
    if is_uncommittable(state, *place):
        return None
    return f"attempt {place[0]} may still commit snapshot {place[1]}"
