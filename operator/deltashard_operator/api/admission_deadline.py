"""How long an admission may take: one deadline, from the first byte read to the answer, that every look shares.

The API server gives up after the configuration's `timeoutSeconds`, and under failurePolicy Fail that refuses the
workload without a word of ours. So an answer is given `BUDGET_S` after the request came at the latest, whatever the
API does meanwhile: each look gets what is left, and what is not known by then is answered as not known.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from deltashard_operator.kube.webhook_configuration import TIMEOUT_S

BUDGET_S = TIMEOUT_S - 1.0
"""The last second is for the way here and back."""


class Deadline:
    """The end of an admission; its time begins when this is made."""

    def __init__(
        self, budget_s: float = BUDGET_S, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._end_s = monotonic() + budget_s

    def left_s(self) -> float:
        """Seconds left, more than none; raises `TimeoutError` when there are none."""
        left_s = self._end_s - self._monotonic()
        if left_s <= 0:
            raise TimeoutError("the admission's time is over")
        return left_s
