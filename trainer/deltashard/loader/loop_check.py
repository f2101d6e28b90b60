"""What deliveries and steps show of the loop: batches fetched ahead of it, epochs that it ends by its own count.

And passes over several loaders at a time: within one batch of a loader, or in turns with it. Of nested ones it matters
whether the batch of the outer one is still in use at a cut. Of those in turns (a `zip`), one may end before the other:
where steps continue on batches that it delivered before (`zip(one, cycle(other))`), no checkpoint says which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from deltashard.loader.position import LoaderPass


class LoopCheck:
    """Of one loader; some comparisons of integers per batch."""

    def __init__(self, report: Callable[..., None], *, pipelined: bool) -> None:
        self._report = report
        self._pipelined = pipelined
        self._thread = threading.get_ident()
        self._most, self._count = 1, 0
        self._step = -1
        """The step after which the batches of `_count` were delivered."""
        self._before_first = 0
        """Batches before the first step of the pass, where there were several."""
        self.total: tuple[int, int] | None = None
        """Epochs that the loop ended itself: after so many batches, so many running."""
        self._resumed_length = 0

    def shorter_than_step(self, count: int) -> bool:
        return count < self._most

    @property
    def per_step(self) -> int:
        return max(self._most, self._count)

    def resume(self, per_step: int, total: tuple[int, int] | None) -> None:
        self._most, self.total = max(1, per_step), total

    def delivered(self, made: LoaderPass, step: int) -> None:
        first, same_step = made.handed == 1, step == self._step
        if first and not self._pipelined and threading.get_ident() != self._thread:
            self._report("thread")
        if not same_step:
            self._most = max(self._most, self._count)
        if first:
            self._before_first = 0
        elif not same_step and self._before_first == 0:
            self._before_first = self._count if self._count > 1 and made.handed == self._count + 1 else -1
        elif not same_step and self._before_first > 1 and not self._pipelined:
            if self._count == 1 and step == self._step + 1:
                self._report("ahead", batches=self._before_first)
            self._before_first = -1
        self._count = self._count + 1 if same_step and not first else 1
        self._step = step
        if made.resumed:
            self._resumed_length = made.mark.delivered
            self._compare()

    def epoch_ended(self, made: LoaderPass, *, by_loop: bool) -> None:
        """Another pass begins after `made`, in which steps were taken; `by_loop`: it was not exhausted."""
        if made.resumed:
            self._resumed_length = made.mark.delivered
        elif by_loop:
            batches, epochs = self.total or (made.mark.delivered, 0)
            self.total = (made.mark.delivered, epochs + 1 if batches == made.mark.delivered else 1)
        self._compare()

    def _compare(self) -> None:
        if self.total is not None and self.total[1] > 1 and self._resumed_length > self.total[0]:
            self._report("count", batches=self.total[0], resumed=self._resumed_length)


class Nesting:
    """Of one loader.

    A pass begun within a batch, still open, is nested if it delivered more than once, or if each earlier batch had one.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self.inner: set[str] | None = None
        """Loaders that make one pass for each batch of this one; None: not seen yet."""
        self._begun: dict[str, int] = {}
        """Passes of others since the last delivery."""
        self._delivered_event = 0
        self._handed: dict[int, int] = {}
        """Batches of other open passes when this one's began."""
        self._in_turns: list[LoaderPass] = []
        """Other passes that this one, which has ended, took turns with."""

    def begun(self, others: Iterable[LoaderPass]) -> None:
        """A pass over this loader begins; `others` are open."""
        self._handed = {id(other): other.handed for other in others}
        self._in_turns = []

    def ended(self, made: LoaderPass, others: Iterable[LoaderPass]) -> None:
        """`made` found its end, after steps were taken in it; `others` are open."""
        self._in_turns = [
            other
            for other in others
            if other.handed - self._handed.get(id(other), 0) >= max(1, made.handed - 1)
        ]

    def is_behind(self, other: LoaderPass) -> bool:
        """Whether `other`, which took turns with a pass of this loader, delivers a batch after that pass ended."""
        return any(other is each for each in self._in_turns)

    def other_begun(self, name: str) -> None:
        self._begun[name] = self._begun.get(name, 0) + 1

    def delivered(self, made: LoaderPass, event: int, open_names: set[str]) -> None:
        """`made` delivered a batch; `open_names`: other loaders with a pass under way."""
        if made.handed > 1:
            ended = self._begun.keys() - open_names or not self._begun
            self.inner = {name for name, passes in self._begun.items() if passes == 1} if ended else set()
        self._begun, self._delivered_event = {}, event

    def in_use(self, made: LoaderPass, others: Iterable[tuple[str, LoaderPass | None]]) -> bool:
        """Whether the last batch of `made` is still in use; `others`: the newest passes of open loaders, by name."""
        for name, inner in others:
            if inner is None or inner.begun_event < self._delivered_event or not inner.handed:
                continue
            if inner.handed > 1 or name in (self.inner or ()):
                return True
            if made.mark.delivered == 1 and self.inner is None:
                self._report("first", other=name)
        return False
