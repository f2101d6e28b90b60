# ruff: noqa: NPY002 - numpy's global generator is what is tested
"""A minimal training process around wrapped loaders that is interrupted at a step and resumed from a snapshot."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from deltashard.loader.registry import LoaderRegistry, OnChange
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.state.rng import apply_globals
from deltashard.state.value import decode_value, encode_value, sources

from tests.support.trainer.step_count import StepCount


class RunEnded(Exception):
    """The run reached its last step."""


class LoaderSnapshot(NamedTuple):
    """The encoded content of a SimulatedTrainer's checkpoint."""

    step: int
    rng: bytes
    positions: bytes
    state: bytes


class SimulatedTrainer:
    """The `wrap` and `step` of a Checkpointer for a program, and a record of the batches."""

    def __init__(
        self,
        seed: int,
        *,
        snapshot_at: int,
        end: int,
        snapshot: LoaderSnapshot | None = None,
        on_change: OnChange = "restart",
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.end = end
        self.snapshot_at = snapshot_at
        self.steps = StepCount()
        self.state: dict[str, Any] = {}
        self.log: list[Any] = []
        self.snapshot: LoaderSnapshot | None = None
        self.notes: list[str] = []
        self.resumed = snapshot is not None
        self._held = snapshot
        self._on_change = on_change
        self.registry = LoaderRegistry(self.steps)

    def restore(self, state: Mapping[str, Any] | None = None) -> None:
        """Restore as a Checkpointer does with this `state=`. `wrap` calls it without an argument."""
        if self.registry.loaders:
            return
        self.state = dict(state or {})
        self.registry = LoaderRegistry(self.steps, state=self.state, sources=sources(self.state))
        if self._held is None:
            return
        held, self._held = self._held, None
        for source in sources(self.state):
            source.set(decode_value(held.state)[source.name])
        rng = decode_value(held.rng)
        self.notes = self.registry.resume(
            decode_value(held.positions), rng, step=held.step, on_change=self._on_change
        )
        self.steps.now = held.step
        apply_globals(rng)

    def wrap(self, loader: Any, name: str = "loader", **options: Any) -> WrappedLoader:
        if not self.registry.loaders and self.registry.snapshot_rng is None:
            self.restore(self.state)
        return self.registry.wrap(loader, name=name, **options)

    def step(self, *seen: Any) -> None:
        """Train a step that draws from all global generators, as dropout would."""
        drawn = float(torch.rand(())), random.random(), float(np.random.rand())
        self.log.append((*(plain(each) for each in seen), drawn))
        self.steps.now += 1
        self.registry.stepped()
        if self.steps.now == self.snapshot_at and self.snapshot is None and not self.resumed:
            self.save()
        if self.steps.now >= self.end:
            raise RunEnded

    def save(self) -> None:
        state = {source.name: source.get() for source in sources(self.state)}
        rng, positions = self.registry.capture()
        self.snapshot = LoaderSnapshot(
            self.steps.now,
            encode_value(rng).to_bytes(),
            encode_value(positions).to_bytes(),
            encode_value(state).to_bytes(),
        )


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(plain(each) for each in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(np.asarray(value).reshape(-1).tolist())
    return value


class CapturedWarnings(logging.Handler):
    """Collects the library's warnings inside its context."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        self.infos: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        (self.texts if record.levelno >= logging.WARNING else self.infos).append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("deltashard").addHandler(self)
        logging.getLogger("deltashard").setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("deltashard").removeHandler(self)
        logging.getLogger("deltashard").setLevel(logging.NOTSET)


class ResumeResult(NamedTuple):
    """The result of a program that was interrupted and resumed."""

    wanted: list[Any]
    """The batches of the lost process after the snapshot."""
    seen: list[Any]
    """The batches of the resumed process."""
    warnings: list[str]
    """Warnings of both processes, and notes of the restore."""
    infos: list[str]
    delivered: list[int]
    """The batches that each loader delivered in its epoch before the snapshot."""

    @property
    def exact(self) -> bool:
        return self.seen == self.wanted


LoaderProgram = Callable[[SimulatedTrainer], None]


def resumed(
    program: LoaderProgram,
    at: int,
    end: int,
    *,
    after: LoaderProgram | None = None,
    on_change: OnChange = "restart",
) -> ResumeResult:
    """Train `program` until `end`, and resume it (or `after`, if given) from a snapshot of step `at`."""
    with CapturedWarnings() as captured:
        lost = SimulatedTrainer(4, snapshot_at=at, end=end)
        run(program, lost)
        assert lost.snapshot is not None
        again = SimulatedTrainer(99, snapshot_at=at, end=end, snapshot=lost.snapshot, on_change=on_change)
        run(after or program, again)
    for world in (lost, again):
        world.registry.close()  # otherwise the collector ends their workers, and torch waits 5 s for each
    delivered = [tree["delivered"] for tree in decode_value(lost.snapshot.positions).values()]
    return ResumeResult(lost.log[at:], again.log, captured.texts + again.notes, captured.infos, delivered)


def run(program: LoaderProgram, world: SimulatedTrainer) -> None:
    try:
        program(world)
    except RunEnded:
        return
    raise AssertionError("the program ended by itself")
