"""A lost rank's loader goes to where the others' are: all ranks take batches in step. Pure, on plain trees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltashard.state.position import has_own_state


def moved_on(positions: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`positions` of loaders by name, moved on to where `others` are, of a rank further on; and notes.

    A loader with a state of its own cannot be moved from outside: it stays.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for name, mine in positions.items():
        other = others.get(name)
        if other is None or (mine["epoch"], mine["delivered"]) >= (other["epoch"], other["delivered"]):
            found[name] = mine
        elif has_own_state(mine) or has_own_state(other):
            found[name] = mine
            notes.append(
                f"loader {name!r} has a state of its own, and gives what came after the checkpoint once more"
            )
        elif mine["epoch"] == other["epoch"] and mine["start"] is not None:
            found[name] = {**mine, **_place(other), "again": None}
        else:
            # It was in another epoch then, whose beginning nobody saw on this rank: as it was on the other.
            found[name] = {
                **other,
                "start": _bare(other["start"]),
                "first": _bare(other.get("first")),
                "again": None,
                "things": mine.get("things"),
                "prints": {},
            }
            if mine.get("order") or other.get("order"):
                continue  # of seed and epoch alone, and its sampler deals this rank its own share
            notes.append(f"loader {name!r} goes on in epoch {other['epoch']} in another rank's random order")
    return found, notes


def _place(other: Mapping[str, Any]) -> dict[str, Any]:
    """Where it stands, and what of an order that all ranks share was used up there."""
    shared = ("dealt", "deal", "order") if other.get("order") is not None else ()
    return {name: other.get(name) for name in ("delivered", *shared)}


def _bare(moment: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Without what belongs to the other rank's data."""
    return None if moment is None else {**moment, "things": {}}
