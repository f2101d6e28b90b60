"""Every object of a run, and why it is kept or goes: the rules of retention and gc, asked object by object.

Nothing is decided here. Which checkpoints stay and why is `retention`'s, what may be named and what may be deleted is
`garbage_collection`'s; this only asks them, so that what a dry run says is what a run does.
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
from deltashard_checkpoint.maintenance.garbage_collection import Graces, spent_markers, why_not_debris
from deltashard_checkpoint.maintenance.retention import Retention, reasons, retire
from deltashard_checkpoint.stores.abc import ObjectInfo
from deltashard_checkpoint.write.closing import marked_attempt


class Fate(StrEnum):
    """What becomes of an object."""

    KEPT = "kept"
    WAITS = "waits"
    """It is retired, or would be now, and its grace is not over."""
    GOES = "goes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One object."""

    key: str
    """Relative to the run's root."""
    bytes: int
    fate: Fate
    reason: str


def inventory(
    log: RunLog, state: RunState, retention: Retention, dead: Iterable[str], *, grace_s: float
) -> Iterator[Item]:
    """Every object under the run's name, in key order; writes nothing, and goes by our clock.

    `dead` are the prefixes that `debris` found. Only of a log that is not stopped.
    """
    found = list(log.store.list(f"{log.run}/"))
    now_s = log.clocks.wall_s()
    rule = _Rule(log, state, retention, tuple(dead), grace_s=grace_s, now_s=now_s)
    youngest_s: dict[str, float] = {}
    for info in found:
        if (prefix := _prefix(info.key[len(log.run) + 1 :])) is not None:
            youngest_s[prefix] = max(info.modified_at_s, youngest_s.get(prefix, 0.0))
    for info in found:
        key = info.key[len(log.run) + 1 :]
        prefix = _prefix(key)
        fate, reason = (
            rule.other(key, info) if prefix is None else rule.data(prefix, now_s - youngest_s[prefix])
        )
        yield Item(key=key, bytes=info.size_bytes, fate=fate, reason=reason)


class _Rule:
    """What retention and gc say now."""

    def __init__(
        self,
        log: RunLog,
        state: RunState,
        retention: Retention,
        dead: tuple[str, ...],
        *,
        grace_s: float,
        now_s: float,
    ) -> None:
        self._state = state
        self._graces = Graces(log, state, now_s=now_s, grace_s=grace_s)
        self._spent = frozenset(spent_markers(log, state, now_s=now_s))
        self._dead = frozenset(dead)
        plan = retire(state, retention, dead)
        self._named = frozenset() if plan is None else frozenset(plan.prefixes)
        self._gone = frozenset() if plan is None else frozenset(plan.checkpoints)
        self._readers: dict[str, list[str]] = {}
        why = reasons(state, retention)
        for seq in state.checkpoints.keys() - self._gone:
            for prefix in prefixes_of(state, seq):
                said = f"checkpoint {seq}: {', '.join(why.get(seq, ('live',)))}"
                self._readers.setdefault(prefix, []).append(said)
        self._owners = {prefix: seq for seq in self._gone for prefix in prefixes_of(state, seq)}
        self._layouts = {layout_key(each.layout) for each in state.attempts.values() if each.layout}

    def data(self, prefix: str, quiet_s: float) -> tuple[Fate, str]:
        """Of an object under this prefix, in which nothing was written for so long."""
        if (named_by := self._state.retired.get(prefix)) is not None:
            left_s = self._graces.left_s(named_by)
            said = f"retired by log entry {named_by}"
            return (
                (Fate.GOES, said)
                if left_s <= 0
                else (Fate.WAITS, f"{said}, {left_s:.0f} s of its grace are left")
            )
        if prefix in self._readers:
            return Fate.KEPT, "; ".join(self._readers[prefix])
        if prefix in self._named:
            if prefix in self._owners:
                return Fate.WAITS, f"checkpoint {self._owners[prefix]} would be retired now"
            if prefix in self._state.superseded:
                return Fate.WAITS, "a compaction has replaced it"
            return Fate.WAITS, "of a save that failed, or was given up"
        if prefix in self._state.superseded:
            return Fate.KEPT, f"a trainer of attempt {self._state.attempt} may be loading it"
        return Fate.KEPT, why_not_debris(self._state, prefix, quiet_s=quiet_s) or "named by nothing yet"

    def other(self, key: str, info: ObjectInfo) -> tuple[Fate, str]:
        """Of an object that is no data."""
        if seq_of(key) is not None:
            return Fate.KEPT, "the log: entries are never deleted"
        if key == "log/HINT":
            return Fate.KEPT, "the log: where it ends"
        if fold_of(key) is not None:
            return Fate.KEPT, "a folded state of the log: the newest two stay"
        if key in self._layouts:
            return Fate.KEPT, "layout of an attempt: never deleted"
        if marked_attempt(key) is not None:
            if info.key in self._spent:
                return Fate.GOES, "mark of a save that has ended"
            return (
                Fate.KEPT,
                f"attempt {marked_attempt(key)} may still be uploading a save while its pod ends",
            )
        return Fate.KEPT, "unknown: not ours"


def _prefix(key: str) -> str | None:
    """The deletable prefix of an object; None of one that is no data."""
    try:
        return prefix_of(key)
    except CorruptObject:
        return None
