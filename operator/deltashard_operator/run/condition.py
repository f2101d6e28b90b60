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


def updated(
    before: Iterable[Condition], facts: Iterable[Condition], now_s: float
) -> tuple[tuple[Condition, ...], tuple[Condition, ...]]:
    """The conditions now, and those of them whose status changed.

    A trouble that no fact mentions is over; one that never was is not listed.
    """
    known = {each.type: each for each in before}
    over = {
        type_: each if each.status == "False" else replace(each, status="False", reason="Over")
        for type_, each in known.items()
    }
    found: list[Condition] = []
    changed: list[Condition] = []
    for type_, each in (over | {each.type: each for each in facts}).items():
        old = known.get(type_)
        stays = old is not None and old.status == each.status
        found.append(replace(each, since_s=old.since_s if old is not None and stays else now_s))
        if not stays and (old is not None or each.status == "True"):
            changed.append(found[-1])
    return tuple(found), tuple(changed)
