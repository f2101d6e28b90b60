"""Detects how the loop uses a loader: batches fetched ahead, epochs ended by the loop's own count, nested passes.

Passes over several loaders are nested (within one batch of another loader) or interleaved (`zip`). For nested passes, a
snapshot needs to know whether the outer batch is still in use. One of two interleaved passes may end before the other.
If steps then continue on batches that it delivered earlier (`zip(one, cycle(other))`), no checkpoint records which
batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from deltashard.loader.position import LoaderPass


class LoopCheck:
    """Checks of one loader; costs a few integer comparisons per batch."""

    def __init__(self, report: Callable[..., None], *, pipelined: bool) -> None:
        self._report = report
        self._pipelined = pipelined
        self._thread = threading.get_ident()
        self._max_count, self._count = 1, 0
        self._step = -1
        self._before_first = 0
        """Batches before the first step of the pass, if more than one."""
        self.total: tuple[int, int] | None = None
        """(batches per epoch, consecutive epochs) of epochs that the loop ended itself."""
        self._resumed_length = 0

    def shorter_than_step(self, count: int) -> bool:
        return count < self._max_count

    @property
    def per_step(self) -> int:
        return max(self._max_count, self._count)

    def resume(self, per_step: int, total: tuple[int, int] | None) -> None:
        self._max_count, self.total = max(1, per_step), total

    def delivered(self, loader_pass: LoaderPass, step: int) -> None:
        first, same_step = loader_pass.delivered_here == 1, step == self._step
        if first and not self._pipelined and threading.get_ident() != self._thread:
            self._report("thread")
        if not same_step:
            self._max_count = max(self._max_count, self._count)
        if first:
            self._before_first = 0
        elif not same_step and self._before_first == 0:
            self._before_first = (
                self._count if self._count > 1 and loader_pass.delivered_here == self._count + 1 else -1
            )
        elif not same_step and self._before_first > 1 and not self._pipelined:
            if self._count == 1 and step == self._step + 1:
                self._report("ahead", batches=self._before_first)
            self._before_first = -1
        self._count = self._count + 1 if same_step and not first else 1
        self._step = step
        if loader_pass.resumed:
            self._resumed_length = loader_pass.mark.delivered
            self._compare()

    def epoch_ended(self, loader_pass: LoaderPass, *, by_loop: bool) -> None:
        """Record the end of `loader_pass`, in which steps were taken; `by_loop`: it was not exhausted."""
        if loader_pass.resumed:
            self._resumed_length = loader_pass.mark.delivered
        elif by_loop:
            batches, epochs = self.total or (loader_pass.mark.delivered, 0)
            self.total = (
                loader_pass.mark.delivered,
                epochs + 1 if batches == loader_pass.mark.delivered else 1,
            )
        self._compare()

    def _compare(self) -> None:
        if self.total is not None and self.total[1] > 1 and self._resumed_length > self.total[0]:
            self._report("count", batches=self.total[0], resumed=self._resumed_length)


class Nesting:
    """Nested and interleaved passes of one loader.

    An open pass that began within a batch is nested if it delivered several batches, or if each earlier batch had one.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self.inner: set[str] | None = None
        """Loaders that make one pass per batch of this loader; None: not known yet."""
        self._other_passes: dict[str, int] = {}
        self._delivered_event = 0
        self._delivered_at_start: dict[int, int] = {}
        """Batches that other open passes had delivered when this one began, by id of the pass."""
        self._interleaved: list[LoaderPass] = []
        """Other passes that were interleaved with this loader's ended pass."""

    def pass_started(self, others: Iterable[LoaderPass]) -> None:
        self._delivered_at_start = {id(other): other.delivered_here for other in others}
        self._interleaved = []

    def pass_ended(self, loader_pass: LoaderPass, others: Iterable[LoaderPass]) -> None:
        """Record that `loader_pass` was exhausted after steps in it, while `others` are open."""
        self._interleaved = [
            other
            for other in others
            if other.delivered_here - self._delivered_at_start.get(id(other), 0)
            >= max(1, loader_pass.delivered_here - 1)
        ]

    def was_interleaved_with(self, other: LoaderPass) -> bool:
        """Whether `other` was interleaved with a pass of this loader that has ended."""
        return any(other is each for each in self._interleaved)

    def other_pass_started(self, name: str) -> None:
        self._other_passes[name] = self._other_passes.get(name, 0) + 1

    def delivered(self, loader_pass: LoaderPass, event: int, open_names: set[str]) -> None:
        """Record a batch of `loader_pass`; `open_names`: other loaders with an open pass."""
        if loader_pass.delivered_here > 1:
            all_ended = self._other_passes.keys() - open_names or not self._other_passes
            self.inner = (
                {name for name, passes in self._other_passes.items() if passes == 1} if all_ended else set()
            )
        self._other_passes, self._delivered_event = {}, event

    def in_use(self, loader_pass: LoaderPass, others: Iterable[tuple[str, LoaderPass | None]]) -> bool:
        """Whether the last batch of `loader_pass` is in use; `others`: newest passes of open loaders, by name."""
        for name, inner in others:
            if inner is None or inner.start_event < self._delivered_event or not inner.delivered_here:
                continue
            if inner.delivered_here > 1 or name in (self.inner or ()):
                return True
            if loader_pass.mark.delivered == 1 and self.inner is None:
                self._report("first", other=name)
        return False
