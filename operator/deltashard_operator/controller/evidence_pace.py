"""When a run's decider is told what was seen of its failures: rarely, and never all runs at once. Pure.

It is told at first, when a rate has doubled or halved since it was told last, and when it is another pod than then. Of
a changed rate a run hears once an hour at most, and the fleet shares a bucket of `BURST` messages that fills by
`PER_S` a second, so that a controller that starts anew, or a zone that fails, makes no wave of messages. What does not
get through now does with a later judgement: every run is judged every few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltashard_checkpoint.deciding.evidence import Rates
from deltashard_checkpoint.deciding.interval import EVIDENCE_RATIO

RUN_S = 3600.0
BURST = 100.0
PER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Informed:
    """What a run's decider was told last."""

    rates: Rates
    at_s: float
    pods: frozenset[str]
    """UIDs of the pods that were told; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Messages that the fleet may be sent."""

    left: float = BURST
    at_s: float = float("-inf")

    def filled(self, now_s: float) -> Bucket:
        """The bucket now; a clock that was set back fills nothing."""
        return Bucket(left=min(BURST, self.left + PER_S * max(now_s - self.at_s, 0.0)), at_s=now_s)

    def taken(self) -> Bucket | None:
        """With one message less; None when there is none."""
        return Bucket(left=self.left - 1, at_s=self.at_s) if self.left >= 1 else None


def due(before: Informed | None, rates: Rates, pods: frozenset[str], now_s: float) -> bool:
    """Whether a run's decider is to be told.

    Args:
        before: what it was told last; None: nothing, by this controller.
        rates: as believed now.
        pods: UIDs of the pods that decide; empty: not known.
        now_s: now.
    """
    if before is None:
        return True
    if before.pods and not pods <= before.pods:
        return True  # another pod decides; those that were told are not asked again
    news = (
        rates.lossy.mean_between_s / before.rates.lossy.mean_between_s,
        rates.restores.mean_between_s / before.rates.restores.mean_between_s,
    )
    changed = any(not 1 / EVIDENCE_RATIO < each < EVIDENCE_RATIO for each in news)
    return changed and not 0 <= now_s - before.at_s < RUN_S
