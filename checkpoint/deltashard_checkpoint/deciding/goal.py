"""Goals of a run's saves, as written in policies, annotations, settings and `plan`. Pure.

auto                the fewest saves within 0.1 % of training time of the optimum (the default)
overhead=1%         saves cost at most this share of training (CheckFreq, FAST'21)
lost-work=5m        a failure loses at most this much training
pls=0.02            portion of lost samples, under partial recovery (CPR, MLSys'21)
fixed               as set by the interval and the steps
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from deltashard_checkpoint.errors import UserError

Aim = Literal["auto", "overhead", "lost-work", "pls", "fixed"]
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", re.ASCII)
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)


class BadGoal(UserError):
    """A goal or duration cannot be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal that the interval is chosen for."""

    aim: Aim
    amount: float = 0.0
    """overhead and pls: a share; lost-work: seconds; otherwise unused."""

    def __str__(self) -> str:
        match self.aim:
            case "overhead":
                return f"overhead={_plain(Decimal(repr(self.amount)) * 100)}%"
            case "lost-work":
                return f"lost-work={_plain(Decimal(repr(self.amount)))}s"
            case "pls":
                return f"pls={_plain(Decimal(repr(self.amount)))}"
            case _:
                return self.aim


def _plain(value: Decimal) -> str:
    """Format without rounding and exponent, so that parsing returns the same number."""
    return f"{value.normalize():f}"


AUTO = Goal(aim="auto")
FIXED = Goal(aim="fixed")


def goal(text: str, *, where: str = "goal") -> Goal:
    """Parse a goal; raises `BadGoal`."""
    name, has_amount, amount = text.strip().partition("=")
    if not has_amount and name in ("auto", "fixed"):
        return Goal(aim=name)  # type: ignore[arg-type]  # one of these
    value = 0.0
    if name == "overhead" and (found := _SHARE.fullmatch(amount)):
        value = float(Decimal(found[1]) / 100)
        known = 0 < value <= 0.5
    elif name == "lost-work" and _DURATION.fullmatch(amount):
        value = duration_s(amount, where=where)
        known = 0 < value <= 7 * 86400
    elif name == "pls" and _NUMBER.fullmatch(amount):
        value = float(amount)
        known = 0 < value <= 1
    else:
        known = False
    if not known or not math.isfinite(value):
        raise BadGoal(
            f"invalid goal {text[:40]!r}",
            where=where,
            remedy="auto, overhead=1% (at most 50%), lost-work=5m (at most 7d), pls=0.02 or fixed",
        )
    return Goal(aim=name, amount=value)  # type: ignore[arg-type]  # one of the above


def duration_s(text: str, *, where: str) -> float:
    """Return the seconds of a duration such as 250ms, 90s, 5m, 2h or 1d; raises `BadGoal`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise BadGoal(f"{text[:40]!r} is not a duration", where=where, remedy="such as 90s, 5m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def duration(value_s: float) -> str:
    """Format seconds for display: three significant digits in a suitable unit."""
    if not math.isfinite(value_s):
        return "never"
    if value_s == 0:
        return "0 s"
    for unit, length, most in (("ms", 0.001, 1), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if abs(value_s) < most:
            return f"{value_s / length:.3g} {unit}"
    return f"{value_s / 86400:.3g} d"
