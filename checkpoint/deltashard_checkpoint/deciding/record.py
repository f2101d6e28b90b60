"""What of the decider rides in every commit's metadata, beside the directive: who starts next goes on from there. Pure.

It is the profile's document with three names more: `held`, `evidence` and `closing`. Only under a goal is anything
written. Where image, node type or world size differ (`Profile.key`), what was measured counts for nothing, and
only the evidence goes on: failures are the run's.
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
    """A choice in force."""

    basis: Basis
    goal: str
    """Name of the terms that it was chosen under."""


def cost_of(profile: Profile, held: CurrentChoice | None) -> float:
    """What a save costs, in trainer seconds: as measured, and right after a change as it was measured for that."""
    if held is not None and profile.save.n < MIN_SAVES:
        return held.basis.cost_s
    return profile.save.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """As of one commit."""

    profile: Profile
    held: CurrentChoice | None = None
    """The newest choice; None: none yet."""
    evidence: Evidence = field(default_factory=Evidence)
    closing: bool = False
    """Whether the trainer's end asked for this save: a restart from it lost nothing."""

    @property
    def cost_s(self) -> float | None:
        """`cost_of` what it has; None: nothing was measured yet."""
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
    """The record in a commit's metadata; raises `BadProfile`: whoever can write the bucket wrote it."""
    profile = cost.parse_metadata(text)
    try:
        found: Any = json.loads(text[: MAX_TEXT + 1])
        said = found["held"]
        held = None
        if said is not None:
            basis = Basis(
                seconds=_positive(said["seconds"]),
                cost_s=number(said["cost_s"]),
                mtbf_s=_positive(said["mtbf_s"]),
            )
            held = CurrentChoice(basis=basis, goal=str(said["goal"]))
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
