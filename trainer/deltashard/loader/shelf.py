"""The wrapped loaders of one Checkpointer, and restored positions of those that are not wrapped yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deltashard.errors import CheckpointMismatch, UserError
from deltashard.loader.company import Company
from deltashard.loader.wrapped_loader import WrappedLoader
from deltashard.state.position import Skip


class LoaderShelf:
    """Loaders by name; on the training thread only."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` returns the number of `step()` calls so far."""
        self._company = Company(clock)
        self._loaders: dict[str, WrappedLoader] = {}
        self._waiting: dict[str, Any] = {}
        self._rng: Any = None

    @property
    def loaders(self) -> Mapping[str, WrappedLoader]:
        """The wrapped ones by name."""
        return self._loaders

    @property
    def waiting(self) -> Mapping[str, Any]:
        """Restored positions of loaders that were not wrapped yet."""
        return self._waiting

    @property
    def moved(self) -> bool:
        """Whether a batch was taken since the last `step()`."""
        return any(loader.moved for loader in self._loaders.values())

    def wrap(self, loader: Any, *, name: str, skip: Skip, pipelined: bool, shared: bool) -> WrappedLoader:
        """See `Checkpointer.wrap`."""
        old = self._loaders.get(name)
        if old is not None and not old.iterated:
            raise UserError(
                f"a loader {name!r} is wrapped already", where="wrap()", remedy="give it another name="
            )
        if isinstance(loader, WrappedLoader):
            raise UserError(
                "this loader is wrapped already: its position would be resumed twice",
                where="wrap()",
                remedy="wrap the loader itself, once",
            )
        wrapped = WrappedLoader(
            loader,
            clock=self._company.clock,
            skip=skip,
            pipelined=pipelined,
            shared=shared,
            name=name,
            company=self._company,
        )
        if old is not None:
            wrapped.take_over(old)
        self._loaders[name] = wrapped
        if name in self._waiting:
            wrapped.resume(self._waiting.pop(name), self._rng)
        return wrapped

    def misfits(self, positions: Mapping[str, Any]) -> dict[str, CheckpointMismatch]:
        """Of the wrapped ones, those that cannot go on at their positions in another world, by name."""
        found = {
            name: loader.why_not(positions[name])
            for name, loader in self._loaders.items()
            if name in positions
        }
        return {name: why for name, why in found.items() if why is not None}

    def resume(self, positions: Mapping[str, Any], rng: Any) -> None:
        """Restored positions by name, under the random state of the cut: now, or when such a loader is wrapped."""
        for name, tree in positions.items():
            if name in self._loaders:
                self._loaders[name].resume(tree, rng)
            else:
                self._waiting[name] = tree
        self._rng = rng

    def close(self) -> None:
        """No position is asked for any more: each loader is its program's alone, and ends with it."""
        self._loaders.clear()
