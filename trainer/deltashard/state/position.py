"""Where a pass over a loader stands, and how another pass gets there: through the index sampler, or by replaying.

A pass is one iteration over a loader. Its random numbers are drawn at two instants: at `iter()` (a DataLoader's seed
of its workers), and at the first `next()` (without workers: the permutation), between which a program may draw for
itself, or begin another pass. Both states are part of the position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset

from deltashard.errors import CheckpointMismatch
from deltashard.state.rng import apply_globals, apply_own, capture_globals, capture_own

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
    """Random state and belongings when this epoch's iterator was created; None while there is no pass."""
    first: Mapping[str, Any] | None = None
    """The same when its first batch was asked for."""
    inner: Any = None
    """A stateful loader's own state."""
    warm: bool = False
    """Whether persistent workers lived when the pass began: then it drew no seed."""
    ahead: bool | None = None
    """Whether the pass drew its order when its iterator was created, as workers have it, and not when its first batch
    was asked for. None: an older version did not say."""
    again: Mapping[str, Any] | None = None
    """The loop still uses the batch after `delivered` (passes over another loader within it): random state and
    belongings when that batch was asked for. It is delivered once more."""
    dealt: Mapping[str, int] | None = None
    """Another number of ranks, or batches of another size, began this epoch: from batch `at` on, what its order had
    left after `used` samples."""
    order: Mapping[str, Any] | None = None
    """Of the epoch, where its samples' order is known (`loader.deal.order_of`). Saved where it is a ResumableSampler's:
    what batches of one size have used up of it says where a loader goes on whose batches have another size."""

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Position:
        """From plain data; what an older version did not write is None."""
        return cls(
            epoch=tree["epoch"],
            delivered=tree["delivered"],
            start=tree["start"],
            inner=tree["inner"] if has_own_state(tree) else None,
            first=tree.get("first"),
            warm=bool(tree.get("warm")),
            ahead=tree.get("ahead"),
            again=tree.get("again"),
            dealt=tree.get("dealt"),
            order=tree.get("order"),
        )

    @property
    def begun(self) -> bool:
        """Whether a batch of the epoch was asked for."""
        return self.delivered > 0 or self.again is not None

    def tree(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "epoch": self.epoch,
            "delivered": self.delivered,
            "start": self.start,
            # A build that does not know `dealt` takes this for a loader's own state, and refuses: it would count wrong.
            "inner": self.inner if self.dealt is None else "dealt out anew",
            "first": self.first,
            "warm": self.warm,
            "ahead": self.ahead,
            "again": self.again,
            "dealt": self.dealt,
        }


def has_own_state(tree: Mapping[str, Any]) -> bool:
    """Whether a saved position is that of a stateful loader."""
    return tree["inner"] is not None and not tree.get("dealt")


Print = Callable[[Any], str]


class PassedSampler:
    """An index sampler without its first `skip` entries; the dropped ones are drawn, so its randomness agrees.

    The loader asks for the first index when it likes: at once with workers, at the first batch without. `advance`
    makes sure that all that skipping draws is drawn before the random state of the cut is put back. Drawing in
    `__iter__` would be too early: a loader's own seed comes before the sampler's.

    `prints` gets a fingerprint of the 1st, 2nd, 4th, 8th ... entry drawn. `before` is done before the first is.
    """

    def __init__(
        self,
        sampler: Any,
        skip: int,
        prints: dict[int, str] | None = None,
        to_print: Print = repr,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.sampler = sampler
        self.skip = skip
        self._indices: Iterator[Any] = iter(())
        self._left = skip
        self._drawn = 0
        self._prints = prints
        self._print = to_print
        self._before = before

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self.sampler)
        self._left = self.skip
        self._drawn = 0
        return self

    def __next__(self) -> Any:
        self.advance()
        return self._draw()

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.skip)

    def advance(self) -> None:
        """Pass over the skipped entries now, if that has not happened yet."""
        while self._left:
            self._left -= 1
            try:
                self._draw()
            except StopIteration:
                self._left = 0

    def _draw(self) -> Any:
        before, self._before = self._before, None
        if before is not None:
            before()
        entry = next(self._indices)
        self._drawn += 1
        if self._prints is not None and is_printed(self._drawn):
            self._prints[self._drawn] = self._print(entry)
        return entry


def is_printed(number: int) -> bool:
    """Whether the fingerprint of this batch (from 1) is kept: few, and the first ones."""
    return number & (number - 1) == 0


def own_generators(loader: object) -> list[torch.Generator]:
    """Generators a DataLoader draws its order from, in a fixed order, each once."""
    found: list[torch.Generator] = []
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for owner in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
            found.append(generator)
    return found


def capture_draws(loader: object) -> dict[str, Any]:
    """The global generators and the loader's own."""
    own = [capture_own(generator) for generator in own_generators(loader)]
    return {"globals": capture_globals(), "own": own}


def apply_draws(loader: object, held: Mapping[str, Any]) -> None:
    """Put `capture_draws` back; raises `CheckpointMismatch` when the loader draws from other generators."""
    generators = own_generators(loader)
    if len(generators) != len(held["own"]):
        raise CheckpointMismatch(
            f"the loader draws from {len(generators)} generators, the saved one from {len(held['own'])}",
            where="wrap()",
            remedy="construct the loader as in the run that saved",
        )
    apply_globals(held["globals"])
    for generator, state in zip(generators, held["own"], strict=True):
        apply_own(generator, state)


def samples_by_index(loader: object) -> bool:
    """Whether a pass can be entered through the index sampler: a DataLoader of a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def own_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the order is drawn by the user's code: torch's own samplers draw when they begin, and then no more."""
    samplers = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(s is not None and not type(s).__module__.startswith("torch.utils.data") for s in samplers)


def through_sampler(
    loader: DataLoader[Any],
    skip: int,
    *,
    warm: bool,
    prints: dict[int, str] | None = None,
    to_print: Print = repr,
    instead: Iterable[Any] | None = None,
    before: Callable[[], None] | None = None,
) -> tuple[Iterator[Any], PassedSampler]:
    """A pass from batch `skip` on: its iterator, and the sampler to `advance`.

    `instead`: entries of this pass, in the place of those of the loader's own sampler. `before`: see `PassedSampler`.
    `warm`: the workers are persistent and lived before, so that the pass draws no seed. Workers that are new here are
    started with a seed that is not the lost ones', and the random state is put back.
    """
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    entries = loader.__dict__[name] if instead is None else instead
    live: Any = getattr(loader, "_iterator", None)
    if warm and live is None:
        draws = capture_draws(loader)
        iter(loader)
        apply_draws(loader, draws)
        live = getattr(loader, "_iterator", None)
    if warm and live is not None:
        sampler = PassedSampler(entries, skip, prints, to_print, before)
        live._index_sampler = sampler  # noqa: SLF001 - persistent workers take their indices from here
        try:
            return iter(loader), sampler
        finally:
            _at_next_pass(live, loader.__dict__[name])
    # A shallow clone for this one pass: DataLoader guards its samplers against assignment.
    clone = copy.copy(loader)
    clone.__dict__[name] = sampler = PassedSampler(entries, skip, prints, to_print, before)
    clone.__dict__["_iterator"] = None
    iterator = iter(clone)
    if loader.persistent_workers and loader.num_workers:
        loader.__dict__["_iterator"] = clone.__dict__["_iterator"]
        _at_next_pass(clone.__dict__["_iterator"], loader.__dict__[name])
    return iterator, sampler


def _at_next_pass(iterator: Any, sampler: Any) -> None:
    """Persistent workers begin their next pass with the loader's own sampler again; this one has its iterator."""
    iterator._index_sampler = sampler  # noqa: SLF001 - as above
