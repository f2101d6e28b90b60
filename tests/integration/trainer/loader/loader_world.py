# ruff: noqa: NPY002 - numpy's global generator is what is tested
"""A training process in miniature, around wrapped loaders only: it is cut at a step and begun anew from the cut."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deltashard.errors import UserError
from deltashard.loader.company import Company
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.state.rng import apply_globals, capture_globals
from deltashard.state.value import decode_value, encode_value

from tests.support.trainer.step_count import StepCount


class Over(Exception):
    """The run is over."""


class World:
    """What a program may use: `wrap` and `step`, as of a Checkpointer, and what it saw."""

    def __init__(self, seed: int, *, cut_at: int, end: int, held: tuple[bytes, bytes] | None = None) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.end = end
        self.cut_at = cut_at
        self.steps = StepCount(cut_at if held else 0)
        self.company = Company(self.steps)
        self.loaders: dict[str, WrappedLoader] = {}
        self.log: list[Any] = []
        self.cut: tuple[bytes, bytes] | None = None
        self._held: dict[str, Any] = {}
        self._rng: Any = None
        if held is not None:
            self._held, self._rng = decode_value(held[0]), decode_value(held[1])
            apply_globals(self._rng)

    def wrap(self, loader: Any, name: str = "loader", **options: Any) -> WrappedLoader:
        old = self.loaders.get(name)
        if old is not None and not old.iterated:
            raise UserError("wrapped already")
        wrapped = WrappedLoader(loader, clock=self.company.clock, name=name, company=self.company, **options)
        if old is not None:
            wrapped.take_over(old)
        self.loaders[name] = wrapped
        if name in self._held:
            wrapped.resume(self._held.pop(name), self._rng)
        return wrapped

    def step(self, *seen: Any) -> None:
        """A training step: draws as dropout would, of all global generators."""
        drawn = float(torch.rand(())), random.random(), float(np.random.rand())
        self.log.append((*(plain(each) for each in seen), drawn))
        self.steps.now += 1
        if self.steps.now == self.cut_at and self.cut is None:
            self._take()
        if self.steps.now >= self.end:
            raise Over

    def _take(self) -> None:
        rng: Any = capture_globals()
        moved = [r for r in (loader.boundary_rng() for loader in self.loaders.values()) if r is not None]
        trees = {name: loader.capture() for name, loader in self.loaders.items()}
        apply_globals(rng)
        self.cut = encode_value(trees).to_bytes(), encode_value(moved[0] if moved else rng).to_bytes()


def plain(value: Any) -> Any:
    """Comparable."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(each) for each in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(np.asarray(value).reshape(-1).tolist())
    return value


class Said(logging.Handler):
    """Warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def resumed(program: Callable[[World], None], at: int, end: int) -> tuple[list[Any], list[Any], list[str]]:
    """(what the lost process would have seen after step `at`, what the resumed one saw, what was said on the way)."""
    said = Said()
    logger = logging.getLogger("deltashard")
    logger.addHandler(said)
    try:
        lost = World(4, cut_at=at, end=end)
        _run(program, lost)
        assert lost.cut is not None
        again = World(99, cut_at=at, end=end, held=lost.cut)
        _run(program, again)
    finally:
        logger.removeHandler(said)
    return lost.log[at:], again.log, said.texts


def _run(program: Callable[[World], None], world: World) -> None:
    try:
        program(world)
    except Over:
        return
    raise AssertionError("the program ended by itself")
