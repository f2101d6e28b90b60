"""Conditions of a run, in the Kubernetes format. Pure.

`Ready` is True while new checkpoints are committed. Every other type is a problem: True while it lasts, and absent
until its first occurrence. `lastTransitionTime` changes only when the status changes, so `kubectl wait` and the age of
a condition both work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

READY = "Ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Condition of a run, as stored in the API."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str
    message: str = ""
    since_s: float = 0.0


def updated(before: Iterable[Condition], facts: Iterable[Condition], now_s: float) -> tuple[Condition, ...]:
    """Merge `facts` into the conditions `before`. A known problem that is not in `facts` becomes False."""
    known = {each.type: each for each in before}
    over = {
        type_: each if each.status == "False" else replace(each, status="False", reason="Over")
        for type_, each in known.items()
    }
    found = over | {each.type: each for each in facts}
    moved = {
        type_ for type_, each in found.items() if type_ not in known or known[type_].status != each.status
    }
    return tuple(
        replace(each, since_s=now_s if type_ in moved else known[type_].since_s)
        for type_, each in found.items()
    )
