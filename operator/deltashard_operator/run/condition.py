"""A run's conditions, as Kubernetes has them: what is so, since when, why, in a sentence. Pure.

`Ready` says whether newer checkpoints keep coming. Every other type is a trouble: True while it lasts, with the
sentence of who told it; it is absent until it first happens. `lastTransitionTime` moves with the status alone, so that
waiting for a condition and counting its age both work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

READY = "Ready"
STALE = "Stale"
SAVES_FAILING = "SavesFailing"
CREDENTIALS_MISSING = "CredentialsMissing"
STORE_UNAVAILABLE = "StoreUnavailable"
STUCK = "StuckOnLostNode"
FENCED = "Fenced"
TRACKING_FAULT = "TrackingFault"
FELL_BACK = "FellBack"
RUN_ID_TAKEN = "RunIdTaken"
CRASH_LOOPING = "CrashLooping"
GOAL_UNREACHABLE = "GoalUnreachable"
TROUBLES = (
    STALE,
    SAVES_FAILING,
    CREDENTIALS_MISSING,
    STORE_UNAVAILABLE,
    STUCK,
    FENCED,
    TRACKING_FAULT,
    FELL_BACK,
    RUN_ID_TAKEN,
    CRASH_LOOPING,
    GOAL_UNREACHABLE,
)
UNSAFE = frozenset(
    {STALE, SAVES_FAILING, CREDENTIALS_MISSING, STORE_UNAVAILABLE, FENCED, TRACKING_FAULT, RUN_ID_TAKEN}
)
"""Troubles that make a run that trains Degraded."""
STALE_INTERVALS = 3
STALE_FLOOR_S = 120.0
"""Never stale before: a restart of the controller and a slow save are no trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Condition of a run, as the API keeps it."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str
    message: str = ""
    since_s: float = 0.0


def fact(type_: str, reason: str, message: str = "", *, status: str = "True") -> Condition:
    """A trouble that is so now, unless `status` says otherwise; long messages are cut."""
    return Condition(type=type_, status=status, reason=reason, message=message[:32768])


def updated(
    before: Iterable[Condition], facts: Iterable[Condition], now_s: float
) -> tuple[tuple[Condition, ...], tuple[Condition, ...]]:
    """The conditions now, and those of them whose status changed.

    A trouble that no fact mentions is over; one that never was is not listed.
    """
    known = {each.type: each for each in before}
    found = {each.type: each for each in facts}
    result: list[Condition] = []
    changed: list[Condition] = []
    for type_ in (READY, *TROUBLES):
        old, new = known.get(type_), found.get(type_)
        if new is None:
            if old is None:
                continue
            new = old if old.status == "False" else replace(old, status="False", reason="Over")
        stays = old is not None and old.status == new.status
        moved = replace(new, since_s=old.since_s if old is not None and stays else now_s)
        result.append(moved)
        if not stays and (old is not None or new.status == "True"):
            changed.append(moved)
    return tuple(result), tuple(changed)


def stale_after_s(interval_s: float, durable_s: float) -> float | None:
    """How old the newest checkpoint of a run that trains may be; None when no timer promises any.

    Args:
        interval_s: between checkpoints.
        durable_s: what the last one took.
    """
    if interval_s <= 0:
        return None
    return max(STALE_INTERVALS * interval_s + durable_s, STALE_FLOOR_S)
