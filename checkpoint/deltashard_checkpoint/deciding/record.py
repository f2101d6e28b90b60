"""The decider's record in every commit's metadata, from which the next process continues. Pure.

It extends the profile's document with `held`, `evidence` and `closing`, and is written only under a goal. If image,
node type or world size differ (`Profile.key`), the measurements are ignored, and only the evidence is kept: failures
belong to the run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from deltashard_checkpoint.deciding import cost
from deltashard_checkpoint.deciding.cost import KEY, MAX_TEXT, BadProfile, Profile, not_negative, number
from deltashard_checkpoint.deciding.evidence import Evidence
from deltashard_checkpoint.deciding.interval import MIN_SAVES, Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentChoice:
    """The current choice."""

    basis: Basis
    goal: str
    """Key of the goal and bounds it was chosen under."""


def cost_of(profile: Profile, held: CurrentChoice | None) -> float:
    """Return the trainer seconds per save: as measured, or right after a change as assumed for the choice."""
    if held is not None and profile.save.n < MIN_SAVES:
        return held.basis.cost_s
    return profile.save.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The decider's state at one commit."""

    profile: Profile
    held: CurrentChoice | None = None
    """The newest choice, if any."""
    evidence: Evidence = field(default_factory=Evidence)
    closing: bool = False
    """Whether the trainer's shutdown requested this save: a restart from it loses nothing."""

    @property
    def cost_s(self) -> float | None:
        """`cost_of` its profile and choice; None: nothing was measured yet."""
        known = self.held is not None or self.profile.save.n
        return cost_of(self.profile, self.held) if known else None

    def text(self) -> str:
        document = json.loads(self.profile.text()) | {
            "held": None if self.held is None else {"goal": self.held.goal, **asdict(self.held.basis)},
            "evidence": asdict(self.evidence),
            "closing": self.closing,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def parse_metadata(text: str) -> Record:
    """Parse the record in a commit's metadata, which is untrusted; raises `BadProfile`."""
    profile = cost.parse_metadata(text)
    try:
        found: Any = json.loads(text[: MAX_TEXT + 1])
        choice = found["held"]
        held = None
        if choice is not None:
            basis = Basis(
                seconds=_positive(choice["seconds"]),
                cost_s=number(choice["cost_s"]),
                mtbf_s=_positive(choice["mtbf_s"]),
            )
            held = CurrentChoice(basis=basis, goal=str(choice["goal"]))
        counts = {name: not_negative(found["evidence"][name]) for name in ("exposure_s", "lossy", "restores")}
        return Record(
            profile=profile,
            held=held,
            evidence=Evidence(**counts),
            closing=found["closing"] is True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise BadProfile("the recorded decision cannot be read", where=KEY) from None


def _positive(value: object) -> float:
    if (found := number(value)) <= 0:
        raise ValueError(value)
    return found
