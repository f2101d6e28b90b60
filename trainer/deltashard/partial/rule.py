"""Which road a restore takes, and what it costs in samples. Pure: every answer follows from what the ranks said.

Partial only where nothing is unclear; the reason for anything else is a sentence. A rank whose part is not there is
*lost*: its rows go back to the checkpoint. A part that is there and cannot be used is no lost rank: something happened
that nobody understands, so all go back.

A lost rank's loader goes to where the others' are: all ranks take batches in step.

PLS, the portion of lost samples (CPR, MLSys 2021): sum over ranks of (steps lost / steps planned) x share of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTerms:
    """What the user agreed to."""

    pls_target: float
    """The run's PLS may come to so much, never beyond."""
    planned_steps: int
    """Of the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedMetadata:
    """What a staged part says of itself."""

    run: str
    """URL and name of the run."""
    attempt: int
    rank: int
    world_size: int
    layout: str
    """Digest of the attempt's layout."""
    lineage: str
    """Of the run, beside its name: what its commits say of themselves."""
    covers: int
    """Seq of the checkpoint since which it holds every changed row."""
    step: int
    """Last step that ended on this rank."""
    clean: bool
    """Whether no optimizer of the dense part has stepped, or begun to, since that step."""
    ahead: bool
    """Whether rows were updated since that step: some hold one step more."""
    pls: float
    """Of the run, before this part is used."""
    recoveries: int
    """Of the run that were partial, before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What one rank says of the part that it found."""

    staged: StagedMetadata | None
    """None: there is none, or none that can be read."""
    unusable: str = ""
    """Why what is there cannot be used; empty: nothing is there, or it can."""
    disabled_reason: str = ""
    """Why this rank takes no part in partial recovery at all."""
    location: str = ""
    """Tells where its staged parts lie from other such places: another pod, another machine."""
    shared_bytes: int = 0
    """Of its part, what others take where it is the donor's: all but rows of sharded tables."""
    misplaced_ranks: Sequence[int] = ()
    """Ranks whose parts are at its place, while its own is not."""
    rows: float = 0.0
    """Rows of sharded tables that this rank holds; of a column shard its share of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryInputs:
    """What is to be resumed, as the log said at the slot of the new attempt."""

    run: str
    world_size: int
    layout: str
    lineage: str
    """As the checkpoint that was chosen says it."""
    previous_attempt: int | None
    """The attempt right before the one that was opened; None: not known."""
    seq: int
    step: int
    """Of the checkpoint that was chosen."""
    attempt: int
    """That committed it."""
    pls: float
    """Of the run, as this checkpoint says."""
    recoveries: int
    rows: float
    """Of all tables."""
    unusual: str = ""
    """What makes this more than a restart (`which=`, a takeover, a fallback); empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """The road that all ranks take."""

    full_reason: str = ""
    """Empty: partial."""
    step: int = 0
    """Training goes on after this one."""
    donor: int = 0
    """The rank whose dense part all take."""
    steps: Sequence[int] = ()
    """By rank: the step that its rows are of."""
    own: Sequence[bool] = ()
    """By rank: whether it goes on with its own state, generators and loaders."""
    lost: Sequence[int] = ()
    """Ranks whose rows come from the checkpoint."""
    locations: Sequence[int] = ()
    """By rank: a number of the place where it stages, the same for ranks of one place; partial or not."""
    added_pls: float = 0.0
    """PLS of this recovery."""
    pls: float = 0.0
    """Of the run with it."""
    recoveries: int = 0
    """Of the run that were partial, with this one."""

    @property
    def partial(self) -> bool:
        return not self.full_reason

    def remote_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that stage at another place than `rank` does, and cannot read there."""
        return tuple(
            other for other, location in enumerate(self.locations) if location != self.locations[rank]
        )


def pls_of(steps_lost: Sequence[int], rows: Sequence[float], *, all_rows: float, planned_steps: int) -> float:
    """Portion of lost samples: rank r's `rows[r]` of `all_rows` lost `steps_lost[r]` of `planned_steps`."""
    if not all_rows:
        return 0.0
    return sum(n * share for n, share in zip(steps_lost, rows, strict=True)) / all_rows / planned_steps


def unusable_reason(staged: StagedMetadata, now: RecoveryInputs, rank: int) -> str:
    """Why a part cannot be applied on top of what is resumed; empty: it can."""
    if staged.run != now.run:
        return "it is another run's"
    if staged.rank != rank:
        return f"it is rank {staged.rank}'s"
    if not now.lineage or staged.lineage != now.lineage:
        return "the checkpoint was not made under partial recovery, or by another run of this name"
    if now.previous_attempt is None:
        return "the sidecar does not say which attempt came before: it is older than this library"
    if staged.attempt != now.previous_attempt:
        return f"it is of attempt {staged.attempt}, and {now.previous_attempt} was the one before this"
    if staged.world_size != now.world_size:
        return f"it is of {staged.world_size} ranks, and there are {now.world_size}"
    if staged.layout != now.layout:
        return "tables were sharded otherwise"
    if now.seq < staged.covers:
        return f"it builds on checkpoint {staged.covers}, and {now.seq} is resumed"
    if now.attempt != staged.attempt and now.seq != staged.covers:
        return f"checkpoint {now.seq} is not of its attempt"
    if staged.step < now.step:
        return f"it is of step {staged.step}, and the checkpoint of {now.step}"
    return ""


MAX_SHARED_BYTES = 1 << 30
"""It goes over the store of the process group, which one process serves, once for each rank that cannot read it."""


def _none_staged_reason(words: Sequence[RecoveryReport]) -> str:
    for rank, word in enumerate(words):
        if word.misplaced_ranks:
            return (
                f"no rank has staged anything; rank {rank} finds what rank {word.misplaced_ranks[0]} staged: a pod or machine "
                "must have the same ranks when it comes back"
            )
    return "no rank has staged anything"


def decide(words: Sequence[RecoveryReport], now: RecoveryInputs, terms: RecoveryTerms) -> RecoveryDecision:
    locations = [word.location for word in words]
    return replace(_decide(words, now, terms), locations=tuple(map(locations.index, locations)))


def _decide(words: Sequence[RecoveryReport], now: RecoveryInputs, terms: RecoveryTerms) -> RecoveryDecision:
    why = now.unusual or next(
        (f"rank {r}: {w.disabled_reason}" for r, w in enumerate(words) if w.disabled_reason), ""
    )
    if why:
        return RecoveryDecision(full_reason=why)
    for rank, word in enumerate(words):
        unusable = "" if word.staged is None else unusable_reason(word.staged, now, rank)
        unusable = unusable or word.unusable
        if unusable:
            return RecoveryDecision(full_reason=f"rank {rank}'s staged part: {unusable}")
    survivors = {rank: word.staged for rank, word in enumerate(words) if word.staged is not None}
    if not survivors:
        return RecoveryDecision(full_reason=_none_staged_reason(words))
    able = {rank: staged.step for rank, staged in survivors.items() if staged.clean}
    if not able:
        return RecoveryDecision(
            full_reason="the optimizers of every survivor had stepped since its last step()"
        )
    donor = max(able, key=lambda rank: (able[rank], -rank))
    step = able[donor]
    if any(staged.step > step for staged in survivors.values()):
        return RecoveryDecision(full_reason="the survivor that was ahead had begun its next optimizer step")
    apart = any(word.location != words[donor].location for word in words)
    if apart and words[donor].shared_bytes > MAX_SHARED_BYTES:
        return RecoveryDecision(
            full_reason=f"what all would take of rank {donor} (dense part, optimizers, tables on every rank) is "
            f"{words[donor].shared_bytes >> 20} MiB, more than the {MAX_SHARED_BYTES >> 20} that ranks of several "
            "machines or pods give one another"
        )
    lost = tuple(rank for rank in range(len(words)) if rank not in survivors)
    steps = tuple(survivors[rank].step if rank in survivors else now.step for rank in range(len(words)))
    behind = [  # who was within a step has part of it, whether the others train it again or not
        max(step - reached, 1 if rank in survivors and survivors[rank].ahead else 0)
        for rank, reached in enumerate(steps)
    ]
    added_pls = pls_of(
        behind, [word.rows for word in words], all_rows=now.rows, planned_steps=terms.planned_steps
    )
    pls = max(now.pls, *(staged.pls for staged in survivors.values())) + added_pls
    if pls > terms.pls_target:
        return RecoveryDecision(
            full_reason=f"the run's PLS would come to {pls:.3g}, beyond its target of {terms.pls_target:.3g}"
        )
    return RecoveryDecision(
        step=step,
        donor=donor,
        steps=steps,
        own=tuple(
            rank in survivors and survivors[rank].step == step and survivors[rank].clean
            for rank in range(len(words))
        ),
        lost=lost,
        added_pls=added_pls,
        pls=pls,
        recoveries=1 + max(now.recoveries, *(staged.recoveries for staged in survivors.values())),
    )


def advance_positions(
    positions: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
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
            found[name] = {**mine, **_peer_position(other)}
        elif "stateful" in (mine["kind"], other["kind"]) and other["delivered"]:
            found[name] = mine
            notes.append(
                f"loader {name!r} has a state of its own, and gives what came after the checkpoint once more"
            )
        else:
            # It was in another epoch then, whose beginning was not seen on this rank: as it was on the other.
            found[name] = {
                **other,
                **_peer_position(other),
                "own": mine["own"],
                "seeds": mine["seeds"],
                "first": None,
            }
            if other["order"] or not other["delivered"]:
                continue  # of seed and epoch alone, and its sampler gives this rank its own share
            notes.append(f"loader {name!r} resumes in epoch {other['epoch']} in another rank's random order")
    return found, notes


def _peer_position(other: Mapping[str, Any]) -> dict[str, Any]:
    """Where it stands, and that its last batch was not this rank's."""
    kept = ("delivered", "samples", "last_samples", "over", "order", "base", "unchecked")
    nothing = {"fingerprint": None, "indices": None, "before": None, "in_use": False}
    return {**{name: other[name] for name in kept}, **nothing}
