"""Decides whether a restore is partial, and what it costs in samples. Pure functions of the ranks' reports.

Recovery is partial only if nothing is unclear; otherwise a sentence gives the reason. A rank without a staged part is
*lost*: its rows return to the checkpoint. A part that exists but cannot be used has an unknown cause, so all ranks
return to the checkpoint.

A lost rank's loader advances to the position of the others, because all ranks take batches in step.

PLS, the portion of lost samples (CPR, MLSys 2021): sum over ranks of (steps lost / steps planned) x share of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTerms:
    """Limits of partial recovery, set by the user."""

    pls_target: float
    """Upper bound of the run's PLS."""
    planned_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedMetadata:
    """Metadata of a staged part."""

    run: str
    """URL and name of the run."""
    attempt: int
    rank: int
    world_size: int
    layout: str
    lineage: str
    """Lineage of the run, in addition to its name, as recorded in its commits."""
    covers: int
    """Seq of the checkpoint since which the part holds every changed row."""
    step: int
    """Last step that ended on this rank."""
    clean: bool
    """Whether no optimizer of the dense part has stepped, or begun to, since that step."""
    ahead: bool
    """Whether rows were updated since that step: some hold one step more."""
    pls: float
    """PLS of the run before this part is used."""
    recoveries: int
    """Partial recoveries of the run before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """One rank's report about its staged part."""

    staged: StagedMetadata | None
    """None: there is no readable part."""
    unusable: str = ""
    """Why the existing part cannot be used; empty: there is none, or it can."""
    disabled_reason: str = ""
    """Why this rank takes no part in partial recovery."""
    location: str = ""
    """Identifies the staging directory: another pod or machine has another location."""
    shared_bytes: int = 0
    """Bytes that others take if this part is the donor's: all except rows of sharded tables."""
    misplaced_ranks: Sequence[int] = ()
    """Ranks whose parts are at this rank's location, while its own part is not."""
    rows: float = 0.0
    """Rows of sharded tables on this rank; a column shard counts by its share of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryInputs:
    """What is resumed, according to the log at the slot of the new attempt."""

    run: str
    world_size: int
    layout: str
    lineage: str
    """Lineage in the chosen checkpoint."""
    previous_attempt: int | None
    """The attempt before the one that was opened; None: unknown."""
    seq: int
    step: int
    """Step of the chosen checkpoint."""
    attempt: int
    """Attempt that committed the chosen checkpoint."""
    pls: float
    """PLS of the run in the chosen checkpoint."""
    recoveries: int
    rows: float
    unusual: str = ""
    """Why this is more than a restart (`which=`, a takeover, a fallback); empty: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """The decision that all ranks follow."""

    full_reason: str = ""
    """Why recovery is full; empty: it is partial."""
    step: int = 0
    """Training continues after this step."""
    donor: int = 0
    """The rank whose dense part all ranks take."""
    steps: Sequence[int] = ()
    own: Sequence[bool] = ()
    """By rank: whether it continues with its own state, generators and loaders."""
    lost: Sequence[int] = ()
    """Ranks whose rows come from the checkpoint."""
    locations: Sequence[int] = ()
    """By rank: number of its staging location, equal for ranks that share one; set for full recovery, too."""
    added_pls: float = 0.0
    pls: float = 0.0
    """PLS of the run including this recovery."""
    recoveries: int = 0
    """Partial recoveries of the run including this one."""

    @property
    def partial(self) -> bool:
        return not self.full_reason

    def remote_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that stage at another location than `rank` and cannot read there."""
        return tuple(
            other for other, location in enumerate(self.locations) if location != self.locations[rank]
        )


def pls_of(steps_lost: Sequence[int], rows: Sequence[float], *, all_rows: float, planned_steps: int) -> float:
    """Return the portion of lost samples: rank r's `rows[r]` of `all_rows` lost `steps_lost[r]` steps."""
    if not all_rows:
        return 0.0
    return sum(n * share for n, share in zip(steps_lost, rows, strict=True)) / all_rows / planned_steps


def unusable_reason(staged: StagedMetadata, now: RecoveryInputs, rank: int) -> str:
    """Return why a part cannot be applied on top of the resumed checkpoint; empty: it can."""
    if staged.run != now.run:
        return "it belongs to another run"
    if staged.rank != rank:
        return f"it belongs to rank {staged.rank}"
    if not now.lineage or staged.lineage != now.lineage:
        return "the checkpoint was not made under partial recovery, or by another run of this name"
    if now.previous_attempt is None:
        return "the sidecar does not report the previous attempt: it is older than this library"
    if staged.attempt != now.previous_attempt:
        return f"it is of attempt {staged.attempt}, but the previous attempt was {now.previous_attempt}"
    if staged.world_size != now.world_size:
        return f"it is of {staged.world_size} ranks, but there are {now.world_size}"
    if staged.layout != now.layout:
        return "tables were sharded differently"
    if now.seq < staged.covers:
        return f"it builds on checkpoint {staged.covers}, but {now.seq} is resumed"
    if now.attempt != staged.attempt and now.seq != staged.covers:
        return f"checkpoint {now.seq} was not committed by its attempt"
    if staged.step < now.step:
        return f"it is of step {staged.step}, but the checkpoint is of step {now.step}"
    return ""


MAX_SHARED_BYTES = 1 << 30
"""Limit for the store of the process group, which one process serves, once per rank that cannot read the part."""


def _none_staged_reason(reports: Sequence[RecoveryReport]) -> str:
    for rank, report in enumerate(reports):
        if report.misplaced_ranks:
            return (
                f"no rank has staged anything; rank {rank} finds the part of rank {report.misplaced_ranks[0]}: a "
                "pod or machine must have the same ranks after a restart"
            )
    return "no rank has staged anything"


def decide(reports: Sequence[RecoveryReport], now: RecoveryInputs, terms: RecoveryTerms) -> RecoveryDecision:
    locations = [report.location for report in reports]
    return replace(_decide(reports, now, terms), locations=tuple(map(locations.index, locations)))


def _decide(reports: Sequence[RecoveryReport], now: RecoveryInputs, terms: RecoveryTerms) -> RecoveryDecision:
    why = now.unusual or next(
        (f"rank {r}: {w.disabled_reason}" for r, w in enumerate(reports) if w.disabled_reason), ""
    )
    if why:
        return RecoveryDecision(full_reason=why)
    for rank, report in enumerate(reports):
        unusable = "" if report.staged is None else unusable_reason(report.staged, now, rank)
        unusable = unusable or report.unusable
        if unusable:
            return RecoveryDecision(full_reason=f"rank {rank}'s staged part: {unusable}")
    survivors = {rank: report.staged for rank, report in enumerate(reports) if report.staged is not None}
    if not survivors:
        return RecoveryDecision(full_reason=_none_staged_reason(reports))
    able = {rank: staged.step for rank, staged in survivors.items() if staged.clean}
    if not able:
        return RecoveryDecision(
            full_reason="the optimizers of every survivor had stepped since its last step()"
        )
    donor = max(able, key=lambda rank: (able[rank], -rank))
    step = able[donor]
    if any(staged.step > step for staged in survivors.values()):
        return RecoveryDecision(full_reason="the survivor that was ahead had begun its next optimizer step")
    apart = any(report.location != reports[donor].location for report in reports)
    if apart and reports[donor].shared_bytes > MAX_SHARED_BYTES:
        return RecoveryDecision(
            full_reason=f"the data that ranks take from rank {donor} (dense part, optimizers, tables on every rank) "
            f"is {reports[donor].shared_bytes >> 20} MiB, more than the limit of {MAX_SHARED_BYTES >> 20} MiB between "
            "machines or pods"
        )
    lost = tuple(rank for rank in range(len(reports)) if rank not in survivors)
    steps = tuple(survivors[rank].step if rank in survivors else now.step for rank in range(len(reports)))
    behind = [  # a rank within a step has applied part of it, whether or not the others train it again
        max(step - reached, 1 if rank in survivors and survivors[rank].ahead else 0)
        for rank, reached in enumerate(steps)
    ]
    added_pls = pls_of(
        behind, [report.rows for report in reports], all_rows=now.rows, planned_steps=terms.planned_steps
    )
    pls = max(now.pls, *(staged.pls for staged in survivors.values())) + added_pls
    if pls > terms.pls_target:
        return RecoveryDecision(
            full_reason=f"the run's PLS would be {pls:.3g}, above its target of {terms.pls_target:.3g}"
        )
    return RecoveryDecision(
        step=step,
        donor=donor,
        steps=steps,
        own=tuple(
            rank in survivors and survivors[rank].step == step and survivors[rank].clean
            for rank in range(len(reports))
        ),
        lost=lost,
        added_pls=added_pls,
        pls=pls,
        recoveries=1 + max(now.recoveries, *(staged.recoveries for staged in survivors.values())),
    )


def advance_positions(
    positions: Mapping[str, Any], others: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return `positions` of loaders by name, advanced to `others` of a rank that is further on, and notes.

    Within an epoch the loader draws the batches between and drops them without comparing.
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
            notes.append(f"loader {name!r} has its own state, and repeats the batches after the checkpoint")
        else:
            # The other rank is in another epoch, whose beginning this rank did not see, so its position is copied.
            found[name] = {
                **other,
                **_peer_position(other),
                "own": mine["own"],
                "seeds": mine["seeds"],
                "first": None,
            }
            if other["order"] or not other["delivered"]:
                continue  # depends only on seed and epoch, and the sampler gives this rank its own share
            notes.append(f"loader {name!r} resumes in epoch {other['epoch']} in another rank's random order")
    return found, notes


def _peer_position(other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of `other`, marked so that its last batch is not compared on this rank."""
    kept = ("delivered", "samples", "last_samples", "ended", "order", "base", "unchecked")
    nothing = {"fingerprint": None, "indices": None, "before": None, "in_use": False}
    return {**{name: other[name] for name in kept}, **nothing}
