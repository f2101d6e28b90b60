"""The step counter of a small program, as the clock of its loaders."""

from __future__ import annotations


class StepCount:
    """A callable that returns the steps so far.

    A program that is itself its loaders' clock forms a reference cycle with them. The garbage collector then ends their
    workers during some other test, and torch waits 5 s for each.
    """

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now
