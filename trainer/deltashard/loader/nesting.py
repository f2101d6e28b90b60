"""Passes over several loaders at a time: within one batch of a loader, or in turns with it.

Of nested ones it matters whether the batch of the outer one is still in use at a cut. Of those in turns (a `zip`), one
may end before the other: where steps continue on batches that it delivered before (`zip(one, cycle(other))`), no
checkpoint says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deltashard.loader.position import LoaderPass


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
