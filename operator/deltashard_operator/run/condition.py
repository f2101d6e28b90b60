"""A run's conditions, as Kubernetes has them: what is so, since when, why, in a sentence. Pure.

`Ready` says whether newer checkpoints keep coming. Every other type is a trouble: True while it lasts; it is absent
until it first happens. `lastTransitionTime` moves with the status alone, so that waiting for a condition and counting
its age both work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

READY = "Ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Condition of a run, as the API keeps it."""

    type: str
    status: str
    """True, False or Unknown."""
    reason: str
    message: str = ""
    since_s: float = 0.0


def updated(before: Iterable[Condition], facts: Iterable[Condition], now_s: float) -> tuple[Condition, ...]:
    """The conditions now. A trouble that no fact mentions is over; one that never was is not listed."""
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
