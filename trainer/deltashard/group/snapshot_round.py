"""An order: all ranks of a group cut at one step, without a collective. Pure: a store and threads are others' business.

    proposal   some rank asks for a cut (its sidecar wants one, a person does, a pod ends); the first word counts
    ack        each rank answers: ready or not, and a *limit*, the last step it ends before it has read the verdict
    verdict    go S, where S is the greatest limit, once all ranks are ready; or off, because one is not, or is missing
               past the deadline. It is one compare-and-set: whoever settles it, all read the same

Nobody has passed its limit, and S is no smaller than any limit, so every rank still reaches S: the cut is taken at the
first boundary from S on. A limit lies so many steps ahead that the verdict is there, as a rule, before the step is:
training waits for nothing then. Whoever proposed may die: any rank settles an order that is overdue.

A rank that *stays* (it waits for a save, or closes) ends no step beyond its limit at all, so that an order which would
go beyond is off. An *exact* proposal means one step and no other: a limit beyond it makes it off.

Order n is cut n of the attempt. An order that is off uses its number up; the rows are still marked, and the next cut
holds them.
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
"""What an order takes, from the proposal to the verdict at every rank, if all goes well: so far ahead lies a limit."""
MAX_AHEAD_STEPS = 1 << 10
"""Steps. A loop that takes microseconds a step waits for the verdict instead: its steps may become longer, and would be
that many until the cut."""


class JsonText:
    """What lies in the store: the fields' values in their order, as JSON."""

    __slots__ = ()

    def text(self) -> bytes:
        return json.dumps(dataclasses.astuple(self)).encode()  # type: ignore[call-overload]  # of dataclasses only

    @classmethod
    def of(cls, text: bytes) -> Self:
        names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]  # as above
        return cls(**dict(zip(names, json.loads(text), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(JsonText):
    """A cut is wanted."""

    reason: str
    urgent: bool = False
    at: int = 0
    """Not before the end of this step."""
    exact: bool = False
    """Of that step or of none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(JsonText):
    """What a rank answers."""

    limit: int
    """It does not pass the end of this step before it has read the verdict."""
    not_ready_reason: str = ""
    """Why it cannot cut now, for people; empty: it is ready."""
    holds_step: bool = False
    """It does not pass its limit whatever the verdict is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVerdict(JsonText):
    """What becomes of an order."""

    at: int | None
    """All cut at the first boundary from this step on; None: nobody does."""
    cancel_reason: str = ""
    rank: int | None = None
    """The one because of which it is off."""


def limit_after(step: int, step_time_s: float, lead_s: float = 0.0) -> int:
    """The limit of a rank that has ended `step` and takes `step_time_s` a step, 0: not known; always beyond `step`.

    `lead_s`: it lies so much further ahead than it had to.
    """
    ahead = 1 if step_time_s <= 0 else math.ceil(min((AHEAD_S + lead_s) / step_time_s, MAX_AHEAD_STEPS))
    return step + max(1, ahead)


def decide(
    proposal: Proposal, acks: Mapping[int, Ack], world_size: int, *, overdue: bool
) -> RoundVerdict | None:
    """The verdict that these acks, by rank, allow; None: wait for more."""
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
            stands = f"rank {rank} stands at step {acks[rank].limit}"
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
    """One rank's place in the orders of an attempt. The order thread writes it; the training thread asks, and takes.

    What the other thread may change is read once in each question: read twice, it may be two different things.

    `limit` is published before an ack says it: the training thread looks at it at every boundary, so from the moment
    that a step below the limit was still seen afterwards, the limit holds.
    """

    def __init__(self) -> None:
        self.number = 1
        """Of the order that is awaited, or under way."""
        self.limit: int | None = None
        """Promised for the order under way; None: there is none, or its verdict is known."""
        self.due: tuple[int, int] | None = None
        """(cut, step) of the newest order that goes; cut at the first boundary from that step on. None: taken."""
        self.missed: int | None = None
        """A cut that was due, and never taken: a newer one is."""

    def promise(self, limit: int) -> None:
        """Publish a limit; a higher one may follow as long as no ack has said this one."""
        self.limit = limit

    def withdraw(self) -> None:
        """No ack has said the published limit, and none will."""
        self.limit = None

    def limit_holds(self, step: int) -> bool:
        """Whether the published limit holds, seen that the trainer stands at `step` now, after it was published."""
        limit = self.limit
        return limit is not None and step < limit

    def must_wait(self, step: int) -> bool:
        limit = self.limit
        return limit is not None and step >= limit

    def apply_verdict(self, verdict: RoundVerdict) -> None:
        """The verdict of the order under way is known: the promise ends, the next order is awaited."""
        if verdict.at is not None:
            if self.limit is not None and verdict.at < self.limit:
                raise InternalBug(
                    f"order {self.number} goes at step {verdict.at}, before the limit {self.limit}"
                )
            before = self.due
            if before is not None:
                self.missed = before[0]
            self.due = self.number, verdict.at
        self.limit = None
        self.number += 1

    def due_at(self, step: int) -> int | None:
        """Number of the cut to take at the boundary of `step`; None: none is due."""
        due = self.due
        return due[0] if due is not None and step >= due[1] else None

    def mark_taken(self, cut: int) -> None:
        due = self.due
        if due is not None and due[0] == cut:
            self.due = None
