"""The step counter of a small program, as the clock of its loaders."""

from __future__ import annotations


class StepCount:
    """A callable that returns the steps so far.

    A program that held its loaders and was itself their clock would be in a cycle with them. The garbage collector
    would end its workers, in some other test, and torch waits 5 s for each then.
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now
