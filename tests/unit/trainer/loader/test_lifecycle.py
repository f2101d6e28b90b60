"""The lifecycle of a loader pass: what a snapshot saves, and what a resumed pass delivers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from deltashard.loader.registry import LoaderRegistry
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer.step_count import StepCount

LENGTH = 4
ACTIONS = ["iter", "next", "drop", "step"]


class LoaderLoop:
    """A loop of single steps. A batch is its number in an epoch of four."""

    def __init__(self, step: int = 0) -> None:
        self.steps = StepCount(step)
        self.registry = LoaderRegistry(self.steps)
        self.loader = self.registry.wrap(list(range(LENGTH)))
        self.iterator: Iterator[Any] | None = None

    def do(self, action: str) -> None:
        getattr(self, action)()

    def iter(self) -> None:
        self.iterator = iter(self.loader)

    def next(self) -> None:
        if self.iterator is not None and next(self.iterator, None) is None:
            self.iterator = None

    def drop(self) -> None:
        self.iterator = None

    def step(self) -> None:
        self.steps.now += 1


def tree(loop: LoaderLoop) -> dict[str, Any]:
    return loop.registry.capture()[1]["loader"]


@pytest.mark.slow
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=25))
def test_snapshot_captures_the_last_step_boundary(actions: list[str]) -> None:
    """A batch that is delivered but not trained on does not count: a resumed pass delivers it again."""
    loop = LoaderLoop()
    at_step = tree(loop)
    for action in actions:
        loop.do(action)
        now = tree(loop)
        if action == "step":
            at_step = now
        elif action == "next" and loop.loader.batch_requested:
            assert (now["epoch"], now["delivered"]) >= (at_step["epoch"], at_step["delivered"])
            assert now["delivered"] in (at_step["delivered"], 0)
        resumed = LoaderLoop(loop.steps.now)
        resumed.registry.resume({"loader": now}, None, step=loop.steps.now)
        assert tree(resumed)["delivered"] == now["delivered"]
        assert resumed.loader.epoch == now["epoch"]
        assert list(resumed.loader) == list(range(now["delivered"], LENGTH))
