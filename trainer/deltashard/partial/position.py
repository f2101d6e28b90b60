"""A lost rank's loader goes to where the others' are: all ranks take batches in step. Pure, on plain trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def moved_on(positions: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`positions` of loaders by name, moved on to where `others` are, of a rank further on; and notes.

    Within an epoch the loader draws the batches between and drops them; none of them is compared.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for name, mine in positions.items():
        other = others.get(name)
        if other is None or (mine["epoch"], mine["delivered"]) >= (other["epoch"], other["delivered"]):
            found[name] = mine
        elif mine["epoch"] == other["epoch"] and mine["delivered"]:
            found[name] = {**mine, **_place(other)}
        elif "stateful" in (mine["kind"], other["kind"]) and other["delivered"]:
            found[name] = mine
            notes.append(
                f"loader {name!r} has a state of its own, and gives what came after the checkpoint once more"
            )
        else:
            # It was in another epoch then, whose beginning was not seen on this rank: as it was on the other.
            found[name] = {
                **other,
                **_place(other),
                "own": mine["own"],
                "seeds": mine["seeds"],
                "first": None,
            }
            if other["order"] or not other["delivered"]:
                continue  # of seed and epoch alone, and its sampler gives this rank its own share
            notes.append(f"loader {name!r} resumes in epoch {other['epoch']} in another rank's random order")
    return found, notes


def _place(other: Mapping[str, Any]) -> dict[str, Any]:
    """Where it stands, and that its last batch was not this rank's."""
    kept = ("delivered", "samples", "last_samples", "over", "order", "base", "unchecked")
    nothing = {"fingerprint": None, "indices": None, "before": None, "in_use": False}
    return {**{name: other[name] for name in kept}, **nothing}
