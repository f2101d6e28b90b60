"""Loader position and randomness of the batch that was *delivered*, so that a resumed run sees the next one.

`Checkpointer.wrap` puts a `WrappedLoader` between the loader and the training loop. It counts what the loop was
handed, never what workers fetched ahead. Three kinds of loader are understood:

- *stateful*: has `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader and its like): its own state is
  saved, and loaded before the resumed iteration begins;
- *counted*: a torch DataLoader, or any re-iterable: the position is (epoch, batches delivered). A resumed iteration
  skips that many: through the index sampler of a map-style DataLoader (`skip="sampler"`, nothing is fetched), else
  by drawing and dropping (`skip="replay"`);
- *callable*: `factory(epoch, start)` gives the iterable of an epoch from batch `start` on.

A shuffled epoch is drawn from the random state at the epoch's *first* instant, so that state is kept with the
position: the resumed iteration is created under it (same permutation, same worker seeds), skips, and only then is
the random state of the cut put back, because creating an iterator draws from the default generator and skipping may.
From there on the next batch, and the dropout after it, draw what the lost process would have drawn.

A batch delivered after the last `step()` belongs to the next step. Its delivery notes where the loader stood before,
so that `close()` after a `break` cuts the position and the randomness of the step boundary. Loops that pull batches
ahead of use through the wrapper (TorchRec's train pipelines) say `pipelined=True`: then each `step()` consumes one.

Limits: worker processes that draw random numbers in the dataset resume exactly only with `skip="replay"`, or with a
stateful loader. With `persistent_workers` a DataLoader does not resume exactly after its first epoch, shuffling
included: later epochs go on with the workers' own state and draw no seed, the resumed process must start workers and
draws one. `wrap` says so; torchdata's stateful loader, whose state holds the order, is exact.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset

from deltashard.errors import CheckpointMismatch, StateError
from deltashard.rngs import apply_globals, apply_own, capture_globals, capture_own

log = logging.getLogger("deltashard")

Skip = Literal["sampler", "replay"]


@runtime_checkable
class Stateful(Protocol):
    """The `state_dict` protocol."""

    def state_dict(self) -> dict[str, Any]:
        """The object's state."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take a state back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the training loop stands: `delivered` batches of epoch `epoch` were handed to it."""

    epoch: int
    delivered: int
    start: Mapping[str, Any] | None = None
    """Random state when this epoch's iterator was created; None before that."""
    inner: Any = None
    """A stateful loader's own state."""

    def tree(self) -> dict[str, Any]:
        """As plain data."""
        return {"epoch": self.epoch, "delivered": self.delivered, "start": self.start, "inner": self.inner}


class _SkippingSampler:
    """An index sampler without its first `skip` entries; the dropped ones are drawn, so its randomness agrees.

    The loader asks for the first index when it likes: at once with workers, at the first batch without. `advance`
    makes sure that all that skipping draws is drawn before the random state of the cut is put back. Drawing in
    `__iter__` would be too early: a loader's own seed comes before the sampler's.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self.sampler = sampler
        self.skip = skip
        self._indices: Iterator[Any] = iter(())
        self._left = skip

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self.sampler)
        self._left = self.skip
        return self

    def __next__(self) -> Any:
        self.advance()
        return next(self._indices)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.skip)

    def advance(self) -> None:
        """Pass over the skipped entries now, if that has not happened yet."""
        while self._left:
            self._left -= 1
            next(self._indices, None)


def _own_generators(loader: object) -> list[torch.Generator]:
    """Generators a DataLoader draws its order from, in a fixed order, each once."""
    found: list[torch.Generator] = []
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for owner in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
            found.append(generator)
    return found


class WrappedLoader:
    """Iterates `loader` and knows what was delivered. Made by `Checkpointer.wrap`; attributes pass through."""

    def __init__(
        self, loader: Any, *, clock: Callable[[], int], skip: Skip = "sampler", pipelined: bool = False
    ) -> None:
        """`clock` returns the number of `step()` calls so far."""
        if isinstance(loader, Iterator):
            raise StateError(
                f"{type(loader).__name__} is an iterator, which can only be consumed once",
                where="wrap()",
                remedy="give the loader itself, a re-iterable, or a callable factory(epoch, start)",
            )
        if not callable(loader) and not isinstance(loader, Iterable):
            raise StateError(
                f"{type(loader).__name__} cannot be iterated",
                where="wrap()",
                remedy="give an iterable, or a callable factory(epoch, start)",
            )
        self.loader = loader
        self._clock = clock
        self._skip = skip
        self._pipelined = pipelined
        self._stateful = isinstance(loader, Stateful)
        self._factory = callable(loader) and not isinstance(loader, Iterable)
        self._torch = isinstance(loader, DataLoader)
        if self._torch and not self._stateful and loader.persistent_workers:
            log.warning(
                "a DataLoader with persistent_workers=True resumes where it was, but not with the same order and "
                "random numbers: leave it out, or wrap torchdata's StatefulDataLoader, for a bit-exact resume"
            )
        self._position = Position(epoch=0, delivered=0)
        self._resume: Position | None = None
        self._resume_rng: Mapping[str, Any] | None = None
        self._resumed_at = -1
        # Pipelined: every delivery not yet consumed, oldest first, after the position that is.
        self._ahead: deque[Position] = deque([self._position])
        self._consumed_at = clock()
        # The boundary: where loader and randomness stood when a batch was first asked for after step `_moved_at`.
        self._moved_at = -1
        self._boundary = self._position
        self._boundary_rng: Mapping[str, Any] | None = None
        # Fetching in this process may draw from the global generators; fetching in workers does not.
        self._fetch_draws = not (self._torch and loader.num_workers > 0)

    @property
    def epoch(self) -> int:
        """Index of the epoch the next batch belongs to: resume with `for epoch in range(loader.epoch, epochs)`."""
        return (self._resume or self._position).epoch

    @property
    def delivered(self) -> int:
        """Batches of this epoch the loop was handed."""
        return (self._resume or self._position).delivered

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not constructed yet (copy, pickle)
            raise AttributeError(name)
        return getattr(self.loader, name)

    # What a checkpoint takes and gives back

    def capture(self) -> dict[str, Any]:
        """The position of the last step boundary, as plain data."""
        if self._resume is not None:
            return self._resume.tree()
        now = self._clock()
        if self._pipelined:
            while self._consumed_at < now and len(self._ahead) > 1:
                self._ahead.popleft()
                self._consumed_at += 1
            self._consumed_at = now
            return self._ahead[0].tree()
        if self._moved_at != now:
            return self._with_inner(self._position).tree()
        if self._stateful and self._boundary.delivered:
            log.warning(
                "the batch delivered after the last step() is counted as used: a stateful loader cannot be put back "
                "by one batch; call step() once per batch"
            )
            return self._with_inner(self._position).tree()
        return self._boundary.tree()

    def boundary_rng(self) -> Mapping[str, Any] | None:
        """Global random state of the last step boundary if batches were delivered since, else None (it is now)."""
        return self._boundary_rng if not self._pipelined and self._moved_at == self._clock() else None

    @property
    def moved(self) -> bool:
        """Whether a batch was asked for since the last `step()`."""
        return not self._pipelined and self._moved_at == self._clock()

    def resume(self, tree: Mapping[str, Any], rng: Mapping[str, Any] | None) -> None:
        """Make the next iteration go on from `tree`, under the random state `rng` of the cut."""
        position = Position(
            epoch=tree["epoch"], delivered=tree["delivered"], start=tree["start"], inner=tree["inner"]
        )
        if position.inner is not None and not self._stateful:
            raise CheckpointMismatch(
                f"the checkpoint holds the state of a stateful loader, {type(self.loader).__name__} has none",
                where="wrap()",
                remedy="wrap the same kind of loader as the run that saved",
            )
        if position.inner is None and self._stateful and position.delivered:
            raise CheckpointMismatch(
                f"the checkpoint counted batches of a loader without state, {type(self.loader).__name__} keeps its own",
                where="wrap()",
                remedy="wrap the same kind of loader as the run that saved",
            )
        self._resume, self._resume_rng, self._resumed_at = position, rng, self._clock()
        self._moved_at = -1

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        resume, rng = self._resume, self._resume_rng
        self._resume = self._resume_rng = None
        self._note_move()
        if resume is not None:
            iterator, start = self._resumed(resume, rng)
            epoch, delivered = resume.epoch, resume.delivered
        else:
            # A broken-off epoch is over; an iteration that delivered nothing is the same epoch begun anew.
            epoch = self._position.epoch + (1 if self._position.delivered else 0)
            delivered = 0
            start = self._capture_start()
            iterator = self._begin(epoch, 0)
        self._position = Position(epoch=epoch, delivered=delivered, start=start)
        if resume is not None:
            self._ahead = deque([resume])
            self._consumed_at = self._clock()
        return self._run(iterator, epoch, delivered, start)

    def _run(
        self, iterator: Iterator[Any], epoch: int, delivered: int, start: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        while True:
            self._note_move()
            try:
                batch = next(iterator)
            except StopIteration:
                inner = self.loader.state_dict() if self._stateful else None
                self._position = Position(epoch=epoch + 1, delivered=0, inner=inner)
                return
            delivered += 1
            inner = self.loader.state_dict() if self._pipelined and self._stateful else None
            self._position = Position(epoch=epoch, delivered=delivered, start=start, inner=inner)
            if self._pipelined:
                self._ahead.append(self._position)
            yield batch

    def _note_move(self) -> None:
        now = self._clock()
        if self._moved_at != now:
            self._moved_at = now
            self._boundary = self._position
            first = self._position.delivered == 0
            self._boundary_rng = capture_globals() if self._fetch_draws or first else None

    def _with_inner(self, position: Position) -> Position:
        if not self._stateful or position.inner is not None or not position.delivered:
            return position
        return Position(
            epoch=position.epoch,
            delivered=position.delivered,
            start=position.start,
            inner=self.loader.state_dict(),
        )

    def _capture_start(self) -> dict[str, Any]:
        own = [capture_own(generator) for generator in _own_generators(self.loader)]
        return {"globals": capture_globals(), "own": own}

    def _apply_start(self, start: Mapping[str, Any]) -> None:
        generators = _own_generators(self.loader)
        if len(generators) != len(start["own"]):
            raise CheckpointMismatch(
                f"the loader draws from {len(generators)} generators, the saved one from {len(start['own'])}",
                where="wrap()",
                remedy="construct the loader as in the run that saved",
            )
        apply_globals(start["globals"])
        for generator, state in zip(generators, start["own"], strict=True):
            apply_own(generator, state)

    def _begin(self, epoch: int, skip: int) -> Iterator[Any]:
        if self._factory:
            made: Iterator[Any] = iter(self.loader(epoch, skip))
            return made
        if (
            skip
            and self._torch
            and self._skip == "sampler"
            and not isinstance(self.loader.dataset, IterableDataset)
        ):
            # A shallow clone for this one epoch: DataLoader guards its samplers against assignment.
            clone = copy.copy(self.loader)
            name = "batch_sampler" if self.loader.batch_sampler is not None else "sampler"
            clone.__dict__[name] = sampler = _SkippingSampler(self.loader.__dict__[name], skip)
            clone.__dict__["_iterator"] = None
            resumed: Iterator[Any] = iter(clone)
            sampler.advance()
            return resumed
        iterator: Iterator[Any] = iter(self.loader)
        for _ in range(skip):
            if next(iterator, self) is self:
                break
        return iterator

    def _resumed(
        self, resume: Position, rng: Mapping[str, Any] | None
    ) -> tuple[Iterator[Any], Mapping[str, Any] | None]:
        """The iterator of a resumed epoch, and the random state that epoch began under."""
        # A loader first used later than the restore (evaluation) must not turn the clock back: whatever creating and
        # skipping draws is undone instead.
        after = rng if rng is not None and self._clock() == self._resumed_at else capture_globals()
        begun = resume.delivered > 0 and resume.start is not None
        if begun:
            self._apply_start(resume.start or {})
        else:
            apply_globals(after)
        start = resume.start if begun else self._capture_start()
        if self._stateful:
            if resume.inner is not None:
                self.loader.load_state_dict(resume.inner)
            iterator = iter(self.loader)
        else:
            iterator = self._begin(resume.epoch, resume.delivered)
        if begun:
            apply_globals(after)
        return iterator, start
