"""Steps of a program in miniature, as the clock of its loaders."""

from __future__ import annotations


class StepCount:
    """Called, it gives the steps so far.

    A program that held its loaders and was itself their clock would be in a cycle with them. Its workers would be ended
    by the garbage collector, in some other test, and torch waits 5 s for each then.
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now
