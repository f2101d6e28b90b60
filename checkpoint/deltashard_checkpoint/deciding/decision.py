"""A decision as people and machines see it: what is in force, what the rule says, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Subject = Literal["interval", "bits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision of a run."""

    subject: Subject
    goal: str
    """In the user's words."""
    value: str
    """What is in force."""
    would: str
    """What the rule says: `value`, where the rule is in force and nothing bounds it; empty while saves are measured."""
    why: str
    """A sentence."""
    bound: str = ""
    """Which bound binds; empty: none."""
    evidence: str = ""
    """Counts that it rests on."""
    unreachable: str = ""
    """Why the goal cannot be had; empty: it can."""
