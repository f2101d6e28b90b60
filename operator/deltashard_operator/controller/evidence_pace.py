"""When a run's decider is told what was seen of its failures: rarely, and never all runs at once. Pure.

A process of a sidecar is told when it begins to decide, and all that decide when a rate has doubled or halved since
they were told together; nobody before the interruption that it comes after is counted (`Run.deciders`), and then at
once. What it hears replaces its own counts, so it is always counted at that moment and never an
older word said again: since then it has gone on counting by itself, and a new process has read newer counts in the
newest commit. A stream that is renewed is the same process, and hears nothing; only a word told so shortly before a
stream's end that it may be lost (`LOST_S`) is told anew.

Of a changed rate a run hears once an hour at most, and the fleet shares a bucket of `BURST` messages that fills by
`PER_S` a second, so that a controller that starts anew, or a zone that fails, makes no wave of messages. What does not
get through now does with a later judgement: every run is judged every few seconds. Where every pod is a run of its own
and decides, those that come are told and not all of them anew: of thousands of pods some always come.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from deltashard_checkpoint.deciding.evidence import Rates
from deltashard_checkpoint.deciding.interval import EVIDENCE_RATIO

RUN_S = 3600.0
BURST = 100.0
PER_S = 20.0
LOST_S = 60.0
"""A stream that broke is noticed by three heartbeats' silence, or half a minute of a message that nobody takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Informed:
    """What a run's deciders were told."""

    rates: Rates
    """As they were when all were told."""
    at_s: float
    """When that was."""
    newest_s: float
    """When any was told last."""
    told: Mapping[str, str]
    """Who heard it or a later word, pod UID -> process."""

    def also(self, hearers: Mapping[str, str], *, here: Container[str], now_s: float) -> Informed:
        """These were told, too; of the others those whose pods are still `here` count as told."""
        kept = {uid: process for uid, process in self.told.items() if uid in here}
        return replace(self, told={**kept, **hearers}, newest_s=now_s)


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


def due(
    before: Informed | None, rates: Rates, deciders: Mapping[str, str], now_s: float
) -> Mapping[str, str]:
    """Which of a run's deciders are to be told now.

    Args:
        before: what they were told; None: nothing, by this controller.
        rates: as believed now.
        deciders: the processes that may be told, by pod UID; empty: none at the moment.
        now_s: now.
    """
    if before is None:
        return deciders
    news = (
        rates.lossy.mean_between_s / before.rates.lossy.mean_between_s,
        rates.restores.mean_between_s / before.rates.restores.mean_between_s,
    )
    changed = any(not 1 / EVIDENCE_RATIO < each < EVIDENCE_RATIO for each in news)
    if changed and not 0 <= now_s - before.at_s < RUN_S:
        return deciders
    return {uid: process for uid, process in deciders.items() if before.told.get(uid) != process}


def cut_off(before: Informed | None, pod_uid: str, process: str, now_s: float) -> Informed | None:
    """After the stream of a process ended: a word told just before may not have arrived, and does not count."""
    if before is None or before.told.get(pod_uid) != process or now_s - before.newest_s >= LOST_S:
        return before
    return replace(before, told={uid: each for uid, each in before.told.items() if uid != pod_uid})
