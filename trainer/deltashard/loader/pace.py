"""Whether a loop takes one batch per step: then what was delivered is what was trained on, else it is said.

Several batches per step (gradient accumulation) are fine: all of them were used when the step is done. A pipeline that
fetches ahead is not, unless `pipelined=True` said so, nor are several steps on one batch: the position would name
batches that were not trained on, or forget the rest of the steps. Both show in how deliveries and steps alternate.
"""

from __future__ import annotations

import threading

from deltashard.loader.company import Company, Member

_REMEDY = (
    "if something fetches ahead between the loader and the loop, say wrap(..., pipelined=True); call step() once per "
    "batch"
)


class Pace:
    """Of one loader; costs some integer comparisons per batch."""

    def __init__(self, company: Company, member: Member) -> None:
        self._company = company
        self._member = member
        self._thread = threading.get_ident()
        self.most = 1
        """Batches of one step, at most."""
        self._first: list[int] = []
        self._count = 0
        self._last = -1
        self._events = 0
        self._ended_at: int | None = None
        self._lead = 0
        """Batches that the first step of the ended pass took beyond those of each following one: fetched ahead."""

    def began(self) -> None:
        """A pass begins."""
        self._first.clear()
        self._count, self._last, self._ended_at = 0, -1, None
        self._lead = 0

    def delivering(self, now: int) -> None:
        """A batch is about to be handed over, after step `now`; the company has counted it."""
        company = self._company
        if self._last == -1:
            self._last, self._events = now, company.events
            if threading.get_ident() != self._thread:
                self._say("thread", "is asked for batches by another thread than the one that wrapped it")
        if now == self._last:
            self._count += 1
            return
        self.most = max(self.most, self._count)
        if now > self._last + 1 and company.events == self._events + 1:
            self._say("several", "gave one batch for %d steps", now - self._last)
        if len(self._first) < 3:
            self._first.append(self._count)
            if len(self._first) == 3 and self._first[0] > 1 and self._first[1:] == [1, 1]:
                self._say(
                    "ahead", "gave %d batches before the first step, and one per step since", self._first[0]
                )
        self._last, self._count, self._events = now, 1, company.events

    def ended(self, now: int) -> None:
        """The pass is exhausted."""
        self._ended_at, self._events = now, self._company.events
        if not -1 < self._last < now:
            return  # no step was taken, or batches are left for one: the end of gradient accumulation takes them
        groups = [*self._first, self._count][:3]
        if len(groups) > 1 and len(set(groups[1:])) == 1:
            self._lead = groups[0] - groups[1]

    def cutting(self, now: int) -> None:
        """A cut asks for the position."""
        self.most = max(self.most, self._count)
        # Steps beyond those that the lead accounts for are something else: a phase without the loader, say.
        behind = 0 if self._ended_at is None else now - self._ended_at
        if 0 < behind <= self._lead and self._company.events == self._events:
            self._say("drained", "was exhausted %d steps ago, and training went on", behind)

    def _say(self, key: str, what: str, *arguments: object) -> None:
        self._company.say(
            f"{key} {self._member.name}",
            f"the loader %r {what}: a resume goes on after the batches that were handed over, which need not be those "
            f"that were trained on. {_REMEDY}",
            self._member.name,
            *arguments,
        )
