"""A snapshot round: all ranks of a group agree on one step for a snapshot, without a collective. Pure logic.

    proposal   a rank requests a snapshot (for its sidecar, a user, or a pod that ends); the first proposal counts
    ack        each rank answers whether it is ready, and with a *limit*: the last step it ends before it has read the
               verdict
    verdict    the snapshot step S, the greatest limit, once all ranks are ready; or cancelled, because a rank is not
               ready or is missing past the deadline. The verdict is one compare-and-set, so all ranks read the same

No rank has passed its limit, and S is not smaller than any limit, so every rank still reaches S and takes the snapshot
at
its first boundary from S on. Limits are far enough ahead that the verdict normally arrives before the step, so that
training does not wait. If the proposer dies, any rank decides an overdue round.

A rank that *holds its step* (it waits for a save, or closes) ends no step beyond its limit, so that a round that would
go beyond is cancelled. An *exact* proposal is bound to one step; a limit beyond it cancels the round.

Round n is snapshot n of the attempt. A cancelled round uses up its number; its rows stay marked for the next snapshot.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from deltashard_checkpoint.errors import InternalBug

from deltashard.state.replica import format_ranks

AHEAD_S = 0.15
"""Typical seconds from the proposal until every rank has the verdict, by which limits are ahead."""
MAX_AHEAD_STEPS = 1 << 10
"""Longest limit in steps.

A loop with microsecond steps waits for the verdict instead, because its steps may become
longer and that many would then pass until the snapshot."""


class JsonText:
    """A dataclass stored as the JSON list of its field values."""

    __slots__ = ()

    def text(self) -> bytes:
        return json.dumps(dataclasses.astuple(self)).encode()  # type: ignore[call-overload]  # dataclasses only

    @classmethod
    def of(cls, text: bytes) -> Self:
        names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]  # as above
        return cls(**dict(zip(names, json.loads(text), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(JsonText):
    """Request for a snapshot."""

    reason: str
    urgent: bool = False
    at: int = 0
    """Earliest step for the snapshot."""
    exact: bool = False
    """Whether `at` is the only acceptable step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(JsonText):
    """Answer of a rank."""

    limit: int
    """Last step that the rank ends before it has read the verdict."""
    not_ready_reason: str = ""
    """Reason why the rank cannot take a snapshot now, for people; empty if it is ready."""
    holds_step: bool = False
    """Whether the rank ends no step beyond its limit, whatever the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVerdict(JsonText):
    """Decision of a round."""

    at: int | None
    """All ranks take the snapshot at their first boundary from this step on; None if the round is cancelled."""
    cancel_reason: str = ""
    rank: int | None = None
    """The rank that caused the cancellation."""


def limit_after(step: int, step_time_s: float, lead_s: float = 0.0) -> int:
    """Return the limit of a rank that has ended `step`, always beyond `step`.

    Args:
        step: Last ended step.
        step_time_s: Seconds per step; 0 if unknown.
        lead_s: Seconds by which the limit is later than necessary.
    """
    ahead = 1 if step_time_s <= 0 else math.ceil(min((AHEAD_S + lead_s) / step_time_s, MAX_AHEAD_STEPS))
    return step + max(1, ahead)


def decide(
    proposal: Proposal, acks: Mapping[int, Ack], world_size: int, *, overdue: bool
) -> RoundVerdict | None:
    """Return the verdict that these acks (by rank) allow, or None if more are needed."""
    for rank in sorted(acks):
        if acks[rank].not_ready_reason:
            return RoundVerdict(
                at=None, cancel_reason=f"rank {rank}: {acks[rank].not_ready_reason}", rank=rank
            )
    furthest = max(acks, key=lambda rank: acks[rank].limit, default=0)
    at = acks[furthest].limit if acks else 0
    if proposal.exact and at > proposal.at:
        return RoundVerdict(
            at=None, cancel_reason=f"rank {furthest} may be past step {proposal.at}", rank=furthest
        )
    for rank in sorted(acks):
        if acks[rank].holds_step and acks[rank].limit < at:
            stands = f"rank {rank} is held at step {acks[rank].limit}"
            return RoundVerdict(
                at=None, cancel_reason=f"{stands}, rank {furthest} continues to step {at}", rank=furthest
            )
    if len(acks) == world_size:
        return RoundVerdict(at=at)
    if not overdue:
        return None
    missing = sorted(set(range(world_size)) - acks.keys())
    cancel_reason = f"no answer of ranks {format_ranks(missing, 8)} in time"
    return RoundVerdict(at=None, cancel_reason=cancel_reason, rank=missing[0])


class SnapshotRounds:
    """One rank's state in the rounds of an attempt, written by the rounds' thread and read by the training thread.

    Each method reads a field that the other thread may change only once, since a second read may differ.

    `limit` is published before an ack contains it. The training thread checks it at every boundary, so the limit is
    binding once a step below the limit was observed after the publication.
    """

    def __init__(self) -> None:
        self.number = 1
        """Number of the current or next round."""
        self.limit: int | None = None
        """Limit promised in the current round, until its verdict is known."""
        self.due: tuple[int, int] | None = None
        """(snapshot_id, step) of the newest ordered snapshot until it is taken, at the first boundary from it on."""
        self.missed: int | None = None
        """An ordered snapshot that was never taken because a newer one became due."""

    def promise(self, limit: int) -> None:
        """Publish a limit; a higher one may follow until an ack contains this one."""
        self.limit = limit

    def withdraw(self) -> None:
        """Withdraw a limit that no ack contains."""
        self.limit = None

    def limit_holds(self, step: int) -> bool:
        """Whether the published limit is binding, given that the trainer was at `step` after the publication."""
        limit = self.limit
        return limit is not None and step < limit

    def must_wait(self, step: int) -> bool:
        limit = self.limit
        return limit is not None and step >= limit

    def apply_verdict(self, verdict: RoundVerdict) -> None:
        """Apply the verdict of the current round: end the promise and await the next round."""
        if verdict.at is not None:
            if self.limit is not None and verdict.at < self.limit:
                raise InternalBug(
                    f"round {self.number} goes at step {verdict.at}, before the limit {self.limit}"
                )
            before = self.due
            if before is not None:
                self.missed = before[0]
            self.due = self.number, verdict.at
        self.limit = None
        self.number += 1

    def due_at(self, step: int) -> int | None:
        """Return the number of the snapshot to take at the boundary of `step`, if one is due."""
        due = self.due
        return due[0] if due is not None and step >= due[1] else None

    def mark_taken(self, snapshot_id: int) -> None:
        due = self.due
        if due is not None and due[0] == snapshot_id:
            self.due = None
