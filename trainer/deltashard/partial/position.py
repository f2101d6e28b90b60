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
            found[name] = {**mine, "delivered": other["delivered"], "again": None}
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
            notes.append(f"loader {name!r} goes on in epoch {other['epoch']} in another rank's random order")
    return found, notes


def _bare(moment: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Without what belongs to the other rank's data."""
    return None if moment is None else {**moment, "things": {}}
