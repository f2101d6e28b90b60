"""Why a cut has to wait, in one place: `step()`, `save()`, `wait()`, SIGTERM and `close()` all ask here.

A cut is only taken where the program stands at the end of a whole step, and only when there is somewhere to send it.
What is asked for and cannot be cut yet stays asked for; which reasons count depends on who asks:

                 timer   save()  urgent  wait()  SIGTERM close()
    torn           x       x       x       x       x       x    an optimizer's step was left by an exception
    stepped        x       x       x       x       x       x    an optimizer stepped after the last step()
    accumulating   x       x       x       x       x       -    the last step() ended no optimizer step
    moved on       x       x       x       x       x       -    a batch was taken, or a forward ran, after that
    in flight      x       x       x       x       x       x    the save before is not durable yet
    sidecar away   x       x       x       x       x       x
    unopened       x       x       x       x       x       x    the store was full when the attempt was to be opened
    backing off    x       x       x       -       -       -    a save failed a moment ago

`close()` cannot wait for another step: it cuts, and says what is not exact about it. Whoever holds training anyway need
not spare it by backing off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class Asker(Enum):
    """Who wants a cut."""

    TIMER = "timer"
    REQUEST = "request"
    """`save()`, or the sidecar on somebody's behalf."""
    URGENT = "urgent"
    WAITER = "wait"
    """The training thread waits for it."""
    TERM = "term"
    """SIGTERM's grace runs."""
    CLOSE = "close"


class Wait(StrEnum):
    """Why there is no cut now; the value is the cause under which skipped cuts are counted."""

    TORN = "torn"
    STEPPED = "stepped"
    ACCUMULATING = "accumulating"
    MOVED = "moved on"
    FLIGHT = "in flight"
    AWAY = "sidecar away"
    UNOPENED = "attempt not open"
    BACK_OFF = "backing off"

    @property
    def said(self) -> str:
        """For people."""
        return _SAID[self]


_SAID = {
    Wait.TORN: "an optimizer's step() was left by an exception, and the model is of no step until it ends once",
    Wait.STEPPED: "an optimizer has stepped since the last step(): that boundary is gone",
    Wait.ACCUMULATING: "the last step() ended no optimizer step",
    Wait.MOVED: "a batch was taken, or a forward pass ran, since the last step()",
    Wait.FLIGHT: "the save before it was not durable yet",
    Wait.AWAY: "the sidecar was away",
    Wait.UNOPENED: "the store took no entry, so the attempt was not open",
    Wait.BACK_OFF: "a save had failed a moment before",
}

_BUT_CLOSE = frozenset(Asker) - {Asker.CLOSE}
_RULES: tuple[tuple[Wait, frozenset[Asker]], ...] = (
    (Wait.TORN, frozenset(Asker)),
    (Wait.STEPPED, frozenset(Asker)),
    (Wait.ACCUMULATING, _BUT_CLOSE),
    (Wait.MOVED, _BUT_CLOSE),
    (Wait.FLIGHT, frozenset(Asker)),
    (Wait.AWAY, frozenset(Asker)),
    (Wait.UNOPENED, frozenset(Asker)),
    (Wait.BACK_OFF, frozenset({Asker.TIMER, Asker.REQUEST, Asker.URGENT})),
)
_OF_THE_PROGRAM = frozenset({Wait.TORN, Wait.STEPPED, Wait.ACCUMULATING, Wait.MOVED})


@dataclass(frozen=True, slots=True)
class Standing:
    """All that holds at one instant."""

    holds: frozenset[Wait]

    @classmethod
    def of(
        cls,
        *,
        torn: bool = False,
        stepped: bool = False,
        accumulating: bool = False,
        moved: bool = False,
        in_flight: bool = False,
        away: bool = False,
        unopened: bool = False,
        backing_off: bool = False,
    ) -> Standing:
        """See the module."""
        facts = (torn, stepped, accumulating, moved, in_flight, away, unopened, backing_off)
        return cls(frozenset(wait for wait, fact in zip(Wait, facts, strict=True) if fact))

    def why(self, asker: Asker) -> Wait | None:
        """The first reason to wait; None: cut now."""
        return next((wait for wait, askers in _RULES if wait in self.holds and asker in askers), None)

    @property
    def gone(self) -> Wait | None:
        """Why the program does not stand where a `step()` left it; None: it does, and waiting here is of use."""
        return next((wait for wait, _ in _RULES if wait in self.holds & _OF_THE_PROGRAM), None)
