"""What is told of what lies below a loader: neither what only making a dataset draws, nor a cache that fills."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from deltashard.loader.belonging import Belongings, Walk, draws


def _labels(n: int) -> torch.Tensor:
    return torch.randint(0, 2, (n,))


class DrawnOnce:
    """Draws while it is made."""

    def __init__(self) -> None:
        self.labels = _labels(4) + torch.rand(4)

    def __getitem__(self, i: int) -> float:
        return float(self.labels[i])


class DrawnEach(DrawnOnce):
    """Draws for each sample, too."""

    def __getitem__(self, i: int) -> float:
        return float(_labels(1)) + i


def test_what_only_making_a_dataset_draws_is_not_drawn_in_workers() -> None:
    """Nor what a function does that only its constructor calls."""
    assert not draws(Walk({"dataset": DrawnOnce()}))
    assert draws(Walk({"dataset": DrawnEach()}))


class Cached:
    """Keeps what it read."""

    def __init__(self) -> None:
        self.cache: list[Any] = [None] * 8

    def __getitem__(self, i: int) -> Any:
        if self.cache[i] is None:
            self.cache[i] = np.full(20_000, i)
        return self.cache[i]


def test_a_list_that_fills_is_a_cache_until_a_value_in_it_changes() -> None:
    """Too large to be taken: a cache needs no word, a window does."""
    data = Cached()
    below = Belongings(lambda: {"dataset": data})
    for i in (3, 5):
        assert data[i][0] == i
        assert below.capture() == {}
    data.cache[3] = data[4]
    assert below.capture().keys() == {"dataset.cache"}
    assert below.apply(below.capture()) == []
    fresh = Belongings(lambda: {"dataset": Cached()})
    assert fresh.apply(below.capture()) == ["dataset.cache"]


history: dict[str, int] = {}
position = {"at": 0}


class Named:
    """Has an attribute by the name of a global of the script, and uses another global."""

    def __init__(self) -> None:
        self.history = {"mine": 1}

    def __getitem__(self, i: int) -> int:
        return self.history["mine"] + position["at"] + i


def test_a_global_by_the_name_of_an_attribute_is_none_of_the_loaders() -> None:
    """It would be written over at a restore; the one that the code names is the loader's."""
    slots = Walk({"dataset": Named()}).slots
    assert any(path.endswith(":position") for path in slots)
    assert not any(path.endswith(":history") for path in slots)
