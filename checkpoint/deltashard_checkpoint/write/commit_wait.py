"""When a process that waits for the commit of a cut looks again: at the log often, at the ranks' reports seldom."""

from __future__ import annotations

import math
from dataclasses import replace

from deltashard_checkpoint.backoff import Patience

FOLLOWERS_WAIT_S = 0.25
"""Before a pod without rank 0 looks: of pods that finish together, that of rank 0 commits."""
FOLLOWERS_LIST_AGAIN_FROM = 8
"""Looks of such a pod before it lists reports a second time; any pod lists at looks whose number is a power of two."""
SELDOM_S = 9.0
"""Between looks at the log, at most, while a cut of this kind is not usually committed yet."""
_SOON_S = 2.0
"""When it usually is so soon, looks follow one another as if nothing were known."""


class CommitPace:
    """How long after its beginning a cut was committed the last time, per kind (baseline or not); of one run.

    What ranks upload differs little from cut to cut, so the slowest needs about as long as it did. A wrong guess does
    no harm: the process that finishes last looks at once and commits, the others find the entry `SELDOM_S` later at
    most.
    """

    def __init__(self) -> None:
        self._usual_s: dict[bool, float] = {}  # each value is replaced as a whole: no lock

    def usual_s(self, baseline: bool) -> float:
        """Seconds from the beginning of a cut to its entry; 0 when none was seen yet."""
        return self._usual_s.get(baseline, 0.0)

    def learn(self, baseline: bool, seconds: float) -> None:
        self._usual_s[baseline] = seconds


class CommitWait:
    """The looks of one process for the commit of one cut."""

    def __init__(
        self, patience: Patience, pace: CommitPace, *, leads: bool, baseline: bool, since_s: float
    ) -> None:
        """`leads`: it is rank 0's process. `since_s`: seconds since the cut began."""
        self._patience = patience
        self._pace = pace
        # A little late: it is not a second later than usual, as a rule, and pods must not ask in step.
        usual_s = pace.usual_s(baseline)
        self._expected_s = usual_s * (1 + (1 + patience.clocks.uniform()) / 32)
        first_s = max(patience.backoff.first_s, usual_s / 32)  # how much later still is not known
        patience.backoff = replace(patience.backoff, first_s=first_s)
        self._leads = leads
        self._baseline = baseline
        self._since_s = since_s - patience.spent_s
        self._looks = 0
        self._missed_s = 0.0
        """Of the cut, when it was looked for last and not there yet."""
        self._seldom = False

    @property
    def _now_s(self) -> float:
        return self._since_s + self._patience.spent_s

    def begin(self) -> None:
        if not self._leads:
            self._patience.rest(FOLLOWERS_WAIT_S * (0.5 + 0.5 * self._patience.clocks.uniform()))

    def lists(self) -> bool:
        """Whether this look, which did not find the entry, lists reports."""
        self._missed_s = self._now_s
        if not self._patience.left_s:
            return True
        if self._seldom:
            return False
        self._looks += 1
        again = self._leads or self._looks >= FOLLOWERS_LIST_AGAIN_FROM
        return self._looks == 1 or (again and self._looks & (self._looks - 1) == 0)

    def pause(self) -> None:
        """Until the next look: when the cut is usually committed, in case that lies far ahead."""
        ahead_s = self._expected_s - self._now_s
        rests = math.ceil(ahead_s / SELDOM_S) if ahead_s > _SOON_S else 0
        self._seldom = rests > 1
        if rests:
            self._patience.rest(ahead_s / rests)
        else:
            self._patience.pause()

    def ended(self, ago_s: float) -> None:
        """The entry was made `ago_s` ago, by two clocks that may disagree: it was after the last look without it."""
        self._pace.learn(self._baseline, min(self._now_s, max(self._missed_s, self._now_s - ago_s)))
