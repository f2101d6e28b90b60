"""Random number generators that a pass over a loader may draw from.

They are the global generators, generators in `state=`, and direct attributes of the loader, its dataset (through
`.dataset`), its samplers and its `collate_fn`. Generators are found by type. Counters, closures and module globals are
not captured.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from deltashard.state.rng import apply_globals, apply_own, capture_globals, capture_own, is_generator

_MAX_WRAPPERS = 4
"""Maximum depth of nested datasets (such as Subset) that are searched."""

Generators = Mapping[str, Any]
"""{"globals": see `capture_globals`, "own": {location: state} of all other generators}."""


def own_generators(loader: object, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return {location: generator} for a loader and `state=`, each generator once."""
    found: dict[str, Any] = {}

    def look(place: str, values: Iterable[tuple[Any, Any]]) -> None:
        for name, value in values:
            usable = is_generator(value) and not isinstance(value, random.SystemRandom)
            if usable and not any(value is known for known in found.values()):
                found[f"{place}.{name}"] = value

    look("state", state.items())
    for name, value in state.items():
        if isinstance(value, Mapping):
            look(f"state.{name}", value.items())
        elif isinstance(value, (list, tuple)):
            look(f"state.{name}", enumerate(value))
    batches, data = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    owners = {"loader": loader, "sampler": getattr(loader, "sampler", None), "batch_sampler": batches}
    owners["batch_sampler.sampler"] = getattr(batches, "sampler", None)
    owners["collate_fn"] = getattr(loader, "collate_fn", None)
    for depth in range(_MAX_WRAPPERS):
        owners["dataset" + ".dataset" * depth], data = data, getattr(data, "dataset", None)
    for place, owner in owners.items():
        look(place, list(getattr(owner, "__dict__", {}).items()))
    return found


def capture(own: Mapping[str, Any]) -> dict[str, Any]:
    return {"globals": capture_globals(), "own": capture_each(own)}


def capture_each(own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: capture_own(generator) for name, generator in own.items()}


def apply(held: Generators, own: Mapping[str, Any]) -> None:
    """Restore what `capture` returned, except own generators that no longer exist."""
    apply_globals(held["globals"])
    apply_each(held["own"], own)


def apply_each(held: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name, state in held.items():
        if name in own and capture_own(own[name])["kind"] == state["kind"]:
            apply_own(own[name], state)


def seeds(own: Mapping[str, Any]) -> dict[str, int]:
    return {name: g.initial_seed() for name, g in own.items() if isinstance(g, torch.Generator)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)
