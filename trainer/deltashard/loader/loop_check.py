"""What deliveries and steps show of the loop: batches fetched ahead of it, epochs that it ends by its own count."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
