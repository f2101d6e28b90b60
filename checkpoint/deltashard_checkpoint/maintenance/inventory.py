"""List every object of a run, with the reason why it is kept or deleted, by the rules of retention and gc.

This module only queries `retention` (which checkpoints stay, and why) and `garbage_collection` (what may be retired and
deleted), so a dry run reports exactly what a run does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.format.layout import layout_key
from deltashard_checkpoint.log.chain import prefixes_of
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import prefix_of, seq_of
from deltashard_checkpoint.log.folded_state import fold_of
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.maintenance.garbage_collection import (
    GracePeriods,
    expired_markers,
    not_orphaned_reason,
)
from deltashard_checkpoint.maintenance.retention import Retention, keep_reasons, retire
from deltashard_checkpoint.stores.abc import ObjectInfo
from deltashard_checkpoint.write.closing import attempt_of_marker


class GcStatus(StrEnum):
    """What happens to an object."""

    KEPT = "kept"
    IN_GRACE = "in grace"
    """Retired, or due to be, and in its grace period."""
    DELETABLE = "deletable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object."""

    key: str
    """Key relative to the run's root."""
    bytes: int
    status: GcStatus
    reason: str


def inventory(
    log: RunLog, state: RunState, retention: Retention, orphaned: Iterable[str], *, grace_s: float
) -> Iterator[Item]:
    """Yield every object under the run's name, in key order; write nothing, and use the local clock.

    `orphaned` are the prefixes found by `orphaned_prefixes`. Requires a log that is not stopped.
    """
    found = list(log.store.list(f"{log.run}/"))
    now_s = log.clocks.wall_s()
    classifier = _Classifier(log, state, retention, tuple(orphaned), grace_s=grace_s, now_s=now_s)
    youngest_s: dict[str, float] = {}
    for info in found:
        if (prefix := _prefix(info.key[len(log.run) + 1 :])) is not None:
            youngest_s[prefix] = max(info.modified_at_s, youngest_s.get(prefix, 0.0))
    for info in found:
        key = info.key[len(log.run) + 1 :]
        prefix = _prefix(key)
        status, reason = (
            classifier.other(key, info)
            if prefix is None
            else classifier.data(prefix, now_s - youngest_s[prefix])
        )
        yield Item(key=key, bytes=info.size_bytes, status=status, reason=reason)


class _Classifier:
    """Current verdicts of retention and gc."""

    def __init__(
        self,
        log: RunLog,
        state: RunState,
        retention: Retention,
        orphaned: tuple[str, ...],
        *,
        grace_s: float,
        now_s: float,
    ) -> None:
        self._state = state
        self._graces = GracePeriods(log, state, now_s=now_s, grace_s=grace_s)
        self._expired_markers = frozenset(expired_markers(log, state, now_s=now_s))
        self._orphaned = frozenset(orphaned)
        plan = retire(state, retention, orphaned)
        self._named = frozenset() if plan is None else frozenset(plan.prefixes)
        self._gone = frozenset() if plan is None else frozenset(plan.checkpoints)
        self._readers: dict[str, list[str]] = {}
        why = keep_reasons(state, retention)
        for seq in state.checkpoints.keys() - self._gone:
            for prefix in prefixes_of(state, seq):
                text = f"checkpoint {seq}: {', '.join(why.get(seq, ('live',)))}"
                self._readers.setdefault(prefix, []).append(text)
        self._owners = {prefix: seq for seq in self._gone for prefix in prefixes_of(state, seq)}
        self._layouts = {layout_key(each.layout) for each in state.attempts.values() if each.layout}

    def data(self, prefix: str, quiet_s: float) -> tuple[GcStatus, str]:
        """Return the status and reason of an object under this prefix, whose last write was `quiet_s` seconds ago."""
        if (named_by := self._state.retired.get(prefix)) is not None:
            left_s = self._graces.left_s(named_by)
            text = f"retired by log entry {named_by}"
            return (
                (GcStatus.DELETABLE, text)
                if left_s <= 0
                else (GcStatus.IN_GRACE, f"{text}, {left_s:.0f} s of its grace period are left")
            )
        if prefix in self._readers:
            return GcStatus.KEPT, "; ".join(self._readers[prefix])
        if prefix in self._named:
            if prefix in self._owners:
                return GcStatus.IN_GRACE, f"checkpoint {self._owners[prefix]} would be retired now"
            if prefix in self._state.superseded:
                return GcStatus.IN_GRACE, "replaced by a compaction"
            return GcStatus.IN_GRACE, "of a failed or aborted save"
        if prefix in self._state.superseded:
            return GcStatus.KEPT, f"a trainer of attempt {self._state.attempt} may be loading it"
        return GcStatus.KEPT, not_orphaned_reason(
            self._state, prefix, quiet_s=quiet_s
        ) or "orphaned, not retired yet"

    def other(self, key: str, info: ObjectInfo) -> tuple[GcStatus, str]:
        """Return the status and reason of an object that is not data."""
        if seq_of(key) is not None:
            return GcStatus.KEPT, "the log: entries are never deleted"
        if key == "log/HINT":
            return GcStatus.KEPT, "the log: its end"
        if fold_of(key) is not None:
            return GcStatus.KEPT, "a folded state of the log: the newest two are kept"
        if key in self._layouts:
            return GcStatus.KEPT, "layout of an attempt: never deleted"
        if attempt_of_marker(key) is not None:
            if info.key in self._expired_markers:
                return GcStatus.DELETABLE, "marker of a finished save"
            return (
                GcStatus.KEPT,
                f"attempt {attempt_of_marker(key)} may still be uploading a save while its pod terminates",
            )
        return GcStatus.KEPT, "unknown object: not created by deltashard"


def _prefix(key: str) -> str | None:
    """Return the deletable prefix of an object; None if it is not data."""
    try:
        return prefix_of(key)
    except CorruptObject:
        return None
