"""An order: all ranks of a group cut at one step, without a collective. Pure: a store and threads are others' business.

    proposal   some rank asks for a cut (its sidecar wants one, a person does, a pod ends); the first word counts
    ack        each rank answers: ready or not, and a *limit*, the last step it ends before it has read the verdict
    verdict    go S, where S is the greatest limit, once all ranks are ready; or off, because one is not, or is missing
               past the deadline. It is one compare-and-set: whoever settles it, all read the same

Nobody has passed its limit, and S is no smaller than any limit, so every rank still reaches S: the cut is taken at the
first boundary from S on. A limit lies so many steps ahead that the verdict is there, as a rule, before the step is:
training waits for nothing then. Whoever proposed may die: any rank settles an order that is overdue.

Order n is cut n of the attempt. An order that is off uses its number up; the rows are still marked, and the next cut
holds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from deltashard_checkpoint.errors import InternalBug

AHEAD_S = 0.1
"""What an order takes, from the proposal to the verdict at every rank, if all goes well: so far ahead lies a limit."""
MOST_AHEAD = 1 << 16
"""Steps: of a loop that takes microseconds a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A cut is wanted."""

    reason: str
    urgent: bool = False
    full: bool = False
    """Every rank takes all its rows."""

    def text(self) -> bytes:
        """As it lies in the store."""
        return json.dumps([self.reason, self.urgent, self.full]).encode()

    @classmethod
    def of(cls, text: bytes) -> Proposal:
        """From the store."""
        reason, urgent, full = json.loads(text)
        return cls(reason=str(reason), urgent=bool(urgent), full=bool(full))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """What a rank answers."""

    limit: int
    """It does not pass the end of this step before it has read the verdict."""
    why_not: str = ""
    """Why it cannot cut now, for people; empty: it is ready."""

    def text(self) -> bytes:
        """As it lies in the store."""
        return json.dumps([self.limit, self.why_not]).encode()

    @classmethod
    def of(cls, text: bytes) -> Ack:
        """From the store."""
        limit, why_not = json.loads(text)
        return cls(limit=int(limit), why_not=str(why_not))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of an order."""

    at: int | None
    """All cut at the first boundary from this step on; None: nobody does."""
    why_off: str = ""

    def text(self) -> bytes:
        """As it lies in the store."""
        return json.dumps([self.at, self.why_off]).encode()

    @classmethod
    def of(cls, text: bytes) -> Verdict:
        """From the store."""
        at, why_off = json.loads(text)
        return cls(at=None if at is None else int(at), why_off=str(why_off))


def limit_after(step: int, step_time_s: float) -> int:
    """The limit of a rank that has ended `step` and takes `step_time_s` a step; always beyond `step`."""
    ahead = MOST_AHEAD if step_time_s <= 0 else math.ceil(min(AHEAD_S / step_time_s, MOST_AHEAD))
    return step + max(1, ahead)


def settled(acks: Mapping[int, Ack], world_size: int, *, overdue: bool) -> Verdict | None:
    """The verdict that these acks, by rank, allow; None: wait for more."""
    for rank in sorted(acks):
        if acks[rank].why_not:
            return Verdict(at=None, why_off=f"rank {rank}: {acks[rank].why_not}")
    if len(acks) == world_size:
        return Verdict(at=max(ack.limit for ack in acks.values()))
    if not overdue:
        return None
    missing = sorted(set(range(world_size)) - acks.keys())
    some = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
    return Verdict(at=None, why_off=f"no answer of ranks {some} in time")


class Orders:
    """One rank's place in the orders of an attempt. The order thread writes it; the training thread asks `held`.

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

    def promise(self, limit: int) -> None:
        """Publish a limit; a higher one may follow as long as no ack has said this one."""
        self.limit = limit

    def kept(self, step: int) -> bool:
        """Whether the published limit holds, seen that the trainer stands at `step` now, after it was published."""
        return self.limit is not None and step < self.limit

    def held(self, step: int) -> bool:
        """Whether the boundary of `step` has to wait for the verdict."""
        return self.limit is not None and step >= self.limit

    def read(self, verdict: Verdict) -> None:
        """The verdict of the order under way is known: the promise ends, the next order is awaited."""
        if verdict.at is not None:
            if self.limit is not None and verdict.at < self.limit:
                raise InternalBug(
                    f"order {self.number} goes at step {verdict.at}, before the limit {self.limit}"
                )
            self.due = self.number, verdict.at
        self.limit = None
        self.number += 1

    def cut_at(self, step: int) -> int | None:
        """The cut to take at the boundary of `step`; None: none is due."""
        return self.due[0] if self.due is not None and step >= self.due[1] else None

    def taken(self, cut: int) -> None:
        """The cut was taken, or could not be: it is not due any more."""
        if self.due is not None and self.due[0] == cut:
            self.due = None
