"""Cuts of several ranks: what one rank wishes for becomes an order of all, and the boundary that it names takes it.

    boundary   hold for a verdict that was promised to be waited for -> cut what is due -> wish for what is asked
    exact      a save that means this very step holds the boundary until all ranks have answered: all must ask for it

Replicas are looked at with every cut: if they are not the same on all ranks, one rank's would be saved for all, so that
nothing is saved any more, and it is said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from deltashard.attach.attachment import RunMember
from deltashard.errors import RanksDiffer
from deltashard.group.conductor import ANSWER_S, Conductor
from deltashard.group.order import Proposal
from deltashard.program import TrainingLoop
from deltashard.restore.assembly import refuse_differing
from deltashard.save.records import SaveRecords
from deltashard.state.replica import sums

log = logging.getLogger("deltashard")

EXACT_S = 2 * ANSWER_S
"""A boundary that an exact save means waits so long for the other ranks at most."""


class OrderBook:
    """What several ranks do about cuts, for one of them; on the training thread only."""

    def __init__(
        self,
        conductor: Conductor,
        loop: TrainingLoop,
        member: RunMember,
        records: SaveRecords,
    ) -> None:
        self.conductor = conductor
        self._program = loop.program
        self._clock = loop.clock
        self._requests = records.requests
        self._setbacks = records.setbacks
        self._listener = member.listener
        self._off = 0
        self._said = False

    @property
    def why_off(self) -> str:
        """Why there was no cut; empty: there was none asked for, or one is due."""
        return self.conductor.down or self.conductor.why_off

    def ordered(self) -> int | None:
        """Number of the cut that is due at this boundary, once it may be passed; None: none is."""
        self.conductor.hold(self._clock.step)
        self._say_off()
        self._refuse_differing()
        return self.conductor.cut_at(self._clock.step)

    def wish(self, *, reason: str, urgent: bool) -> None:
        """Have a cut ordered, as soon as all ranks can."""
        if self.conductor.down:
            self._setbacks.skipped("no group")
            return
        self.conductor.wish(Proposal(reason=reason, urgent=urgent))

    def await_exact(self, take: Callable[[], bool]) -> None:
        """Stay at this step until `take` has cut it; saves of this step fail where the other ranks do not come."""
        step = self._clock.step
        until_s = time.monotonic() + EXACT_S
        with self.conductor.stay():
            while not self.conductor.down and time.monotonic() < until_s:
                self._clock.expect()
                if take():
                    return
                self.conductor.wish(Proposal(reason=self._requests.reason, at=step, exact=True))
                self._clock.pause(0.2)
        self.conductor.give_up_exact()
        self._requests.fail_exact(
            step,
            f"the ranks did not all ask for it after the same step: {self.why_off or 'no answer in time'}",
        )

    def sampled(self, cut: int) -> None:
        """What replicas look like at `cut`, for comparison."""
        self.conductor.sampled(cut, sums(self._program.tracking.replicas, cut))

    def _say_off(self) -> None:
        if self.conductor.off == self._off:
            return
        self._off = self.conductor.off
        self._setbacks.skipped("order off")
        self._requests.put_off(self.conductor.why_off)

    def _refuse_differing(self) -> None:
        if not self.conductor.sums or self._said:
            return
        self._said = True
        try:
            refuse_differing(self._program, self.conductor.sums)
        except RanksDiffer as error:
            log.error("%s", error)  # noqa: TRY400 - a traceback would say nothing more
            self._listener.emit("replicas_differ", error=str(error), step=self._clock.step)
            self._requests.fail(error)
