"""Polling schedule of a process that waits for a commit: frequent log reads, rare listings of the ranks' reports."""

from __future__ import annotations

import math
from dataclasses import replace

from deltashard_checkpoint.backoff import RetryBudget

FOLLOWERS_WAIT_S = 0.25
"""Initial wait of a pod without rank 0: of pods that finish together, rank 0's commits."""
FOLLOWERS_RELIST_FROM = 8
"""Polls of a pod without rank 0 before it lists again. Every pod lists only at polls whose number is a power of two."""
MAX_POLL_S = 9.0
"""Longest pause between log reads while a snapshot of this kind is usually not committed yet."""
_FAST_COMMIT_S = 2.0
"""If commits usually take no longer than this, the typical latency is ignored."""


class CommitLatency:
    """Seconds from the beginning to the commit of the last snapshot of each kind (baseline or not) of one run.

    Uploads differ little between snapshots, so the slowest rank needs about as long as last time. A wrong estimate does
    no harm: the last process to finish commits at once, and the others find the entry within `MAX_POLL_S`.
    """

    def __init__(self) -> None:
        self._usual_s: dict[bool, float] = {}  # each value is replaced as a whole: no lock

    def typical_s(self, baseline: bool) -> float:
        """Return the seconds from the beginning of a snapshot to its entry; 0 if none was observed."""
        return self._usual_s.get(baseline, 0.0)

    def observe(self, baseline: bool, seconds: float) -> None:
        self._usual_s[baseline] = seconds


class CommitWait:
    """Polling state of one process for the commit of one snapshot."""

    def __init__(
        self,
        retry_budget: RetryBudget,
        latency: CommitLatency,
        *,
        is_leader: bool,
        baseline: bool,
        since_s: float,
    ) -> None:
        """`is_leader`: this is rank 0's process. `since_s`: seconds since the snapshot began."""
        self._retry_budget = retry_budget
        self._latency = latency
        # Aim slightly late: commits are rarely a second later than usual, and pods must not poll in step.
        typical_s = latency.typical_s(baseline)
        self._expected_s = typical_s * (1 + (1 + retry_budget.clocks.uniform()) / 32)
        first_s = max(retry_budget.backoff.first_s, typical_s / 32)  # the remaining delay is not known
        retry_budget.backoff = replace(retry_budget.backoff, first_s=first_s)
        self._leads = is_leader
        self._baseline = baseline
        self._since_s = since_s - retry_budget.spent_s
        self._polls = 0
        self._last_miss_s = 0.0
        """Age of the snapshot at the last poll that did not find its entry."""
        self._polls_slowly = False

    @property
    def _now_s(self) -> float:
        return self._since_s + self._retry_budget.spent_s

    def begin(self) -> None:
        if not self._leads:
            self._retry_budget.sleep(FOLLOWERS_WAIT_S * (0.5 + 0.5 * self._retry_budget.clocks.uniform()))

    def should_list(self) -> bool:
        """Return whether this poll, which did not find the entry, lists the reports."""
        self._last_miss_s = self._now_s
        if not self._retry_budget.left_s:
            return True
        if self._polls_slowly:
            return False
        self._polls += 1
        again = self._leads or self._polls >= FOLLOWERS_RELIST_FROM
        return self._polls == 1 or (again and self._polls & (self._polls - 1) == 0)

    def pause(self) -> None:
        """Sleep until the next poll: the typical commit time if that is far ahead, else the back-off."""
        ahead_s = self._expected_s - self._now_s
        pauses = math.ceil(ahead_s / MAX_POLL_S) if ahead_s > _FAST_COMMIT_S else 0
        self._polls_slowly = pauses > 1
        if pauses:
            self._retry_budget.sleep(ahead_s / pauses)
        else:
            self._retry_budget.pause()

    def record_commit(self, ago_s: float) -> None:
        """Record the latency of a commit made `ago_s` ago; clock skew is bounded by the last poll without the entry."""
        self._latency.observe(self._baseline, min(self._now_s, max(self._last_miss_s, self._now_s - ago_s)))
