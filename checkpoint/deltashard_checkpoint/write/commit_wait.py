"""When a process that waits for the commit of a cut looks again: at the log often, at the ranks' reports seldom."""

from __future__ import annotations

import math
from dataclasses import replace

from deltashard_checkpoint.backoff import RetryBudget

FOLLOWERS_WAIT_S = 0.25
"""Before a pod without rank 0 looks: of pods that finish together, that of rank 0 commits."""
FOLLOWERS_RELIST_FROM = 8
"""Looks of such a pod before it lists reports a second time; any pod lists at looks whose number is a power of two."""
MAX_POLL_S = 9.0
"""Between looks at the log, at most, while a cut of this kind is not usually committed yet."""
_FAST_COMMIT_S = 2.0
"""When it usually is so soon, looks follow one another as if nothing were known."""


class CommitLatency:
    """How long after its beginning a cut was committed the last time, per kind (baseline or not); of one run.

    What ranks upload differs little from cut to cut, so the slowest needs about as long as it did. A wrong guess does
    no harm: the process that finishes last looks at once and commits, the others find the entry `MAX_POLL_S` later at
    most.
    """

    def __init__(self) -> None:
        self._usual_s: dict[bool, float] = {}  # each value is replaced as a whole: no lock

    def typical_s(self, baseline: bool) -> float:
        """Seconds from the beginning of a cut to its entry; 0 when none was seen yet."""
        return self._usual_s.get(baseline, 0.0)

    def observe(self, baseline: bool, seconds: float) -> None:
        self._usual_s[baseline] = seconds


class CommitWait:
    """The looks of one process for the commit of one cut."""

    def __init__(
        self,
        retry_budget: RetryBudget,
        latency: CommitLatency,
        *,
        is_leader: bool,
        baseline: bool,
        since_s: float,
    ) -> None:
        """`is_leader`: it is rank 0's process. `since_s`: seconds since the cut began."""
        self._retry_budget = retry_budget
        self._latency = latency
        # A little late: it is not a second later than usual, as a rule, and pods must not ask in step.
        typical_s = latency.typical_s(baseline)
        self._expected_s = typical_s * (1 + (1 + retry_budget.clocks.uniform()) / 32)
        first_s = max(retry_budget.backoff.first_s, typical_s / 32)  # how much later still is not known
        retry_budget.backoff = replace(retry_budget.backoff, first_s=first_s)
        self._leads = is_leader
        self._baseline = baseline
        self._since_s = since_s - retry_budget.spent_s
        self._polls = 0
        self._last_miss_s = 0.0
        """Of the cut, when it was looked for last and not there yet."""
        self._polls_slowly = False

    @property
    def _now_s(self) -> float:
        return self._since_s + self._retry_budget.spent_s

    def begin(self) -> None:
        if not self._leads:
            self._retry_budget.sleep(FOLLOWERS_WAIT_S * (0.5 + 0.5 * self._retry_budget.clocks.uniform()))

    def should_list(self) -> bool:
        """Whether this look, which did not find the entry, lists reports."""
        self._last_miss_s = self._now_s
        if not self._retry_budget.left_s:
            return True
        if self._polls_slowly:
            return False
        self._polls += 1
        again = self._leads or self._polls >= FOLLOWERS_RELIST_FROM
        return self._polls == 1 or (again and self._polls & (self._polls - 1) == 0)

    def pause(self) -> None:
        """Until the next look: when the cut is usually committed, in case that lies far ahead."""
        ahead_s = self._expected_s - self._now_s
        pauses = math.ceil(ahead_s / MAX_POLL_S) if ahead_s > _FAST_COMMIT_S else 0
        self._polls_slowly = pauses > 1
        if pauses:
            self._retry_budget.sleep(ahead_s / pauses)
        else:
            self._retry_budget.pause()

    def record_commit(self, ago_s: float) -> None:
        """The entry was made `ago_s` ago, by two clocks that may disagree: it was after the last look without it."""
        self._latency.observe(self._baseline, min(self._now_s, max(self._last_miss_s, self._now_s - ago_s)))
