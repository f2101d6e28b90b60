"""How many rows an increment holds: the share of rows that training touches within some time. Pure.

Few rows are touched all the time and most hardly ever, so the share grows ever more slowly:

    touched(t) = 1 - exp(-k t^p)

Check-N-Run (NSDI'22) reports 26 % within 30 minutes, and increments that grow to 46 % within 210: p = 0.37 goes through
both, and is within 1.5 points of each increment between. One point that is known gives k; two give p, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAPER = (1800.0, 0.26)
"""Seconds, and the share touched within them."""
EXPONENT = 0.37
_EXPONENTS = (0.05, 1.0)
"""1: every row is as likely as every other."""
_APART = 1.5
"""By so much the longest time must exceed the shortest for an exponent to be fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The two parameters."""

    scale: float
    """k: of t in seconds."""
    exponent: float = EXPONENT
    """p."""

    def touched(self, seconds: float) -> float:
        """Share of rows touched within so many seconds of training, from 0 to 1."""
        return -math.expm1(-self.scale * max(seconds, 0.0) ** self.exponent)


def fitted(points: Sequence[tuple[float, float]]) -> Growth:
    """Through one point (seconds, share), or by least squares through more; shares lie between 0 and 1."""
    known = [
        (math.log(seconds), math.log(-math.log1p(-min(max(share, 1e-9), 1 - 1e-9))))
        for seconds, share in points
        if seconds > 0
    ] or [(math.log(PAPER[0]), math.log(-math.log1p(-PAPER[1])))]
    mean_x, mean_y = (sum(pair[at] for pair in known) / len(known) for at in (0, 1))
    exponent = EXPONENT
    if max(x for x, _ in known) - min(x for x, _ in known) >= math.log(_APART):
        squares = sum((x - mean_x) ** 2 for x, _ in known)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in known) / squares
        exponent = min(max(slope, _EXPONENTS[0]), _EXPONENTS[1])
    return Growth(scale=math.exp(mean_y - exponent * mean_x), exponent=exponent)
