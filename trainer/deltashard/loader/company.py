"""The wrapped loaders of one Checkpointer: what one loader must know of the others, and of the cut that is resumed.

The random state of a restored cut is put back when the first loader delivers its first batch: until then, what draws
draws again what it drew in the lost process (creating iterators, a second loader of a `zip`, work between `iter()` and
the first batch). A loader that resumes later leaves no trace.

Passes within a batch of another loader are recognized by counting: as many passes of the inner one began in a pass of
the outer one as that delivered batches. Then the outer batch is still in use, and is delivered once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deltashard.state.rng import apply_globals, capture_globals

log = logging.getLogger("deltashard")


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """What the others may know of one loader."""

    name: str
    open: bool = False
    """A pass is under way: begun, and not exhausted."""
    waits: bool = False
    """It has a position to resume, inside a pass, and was not iterated since."""
    inside: bool = False
    """It was restored to a position inside a pass: whoever else waits takes turns with it."""
    row: int = 0
    """Most batches it delivered in a row."""
    delivered: int = 0
    began_at: int = 0
    """Number of the event at which its pass began."""
    delivered_at: int = 0
    """Number of the event at which it delivered last."""
    after: set[str] = field(default_factory=set)
    """Who delivered next after this one."""
    within: dict[str, int] = field(default_factory=dict)
    """Passes of others that began since this one's pass did, after its first batch."""
    nests: set[str] = field(default_factory=set)
    """Whose passes lay within its batches in an earlier pass, one in each."""
    encloses: bool = False
    """Passes of others began while a batch of this one was in use: keep what it needs to be delivered again."""

    def habits(self) -> dict[str, Any]:
        """What was learned of it, as plain data."""
        return {
            "after": sorted(self.after),
            "within": dict(self.within),
            "nests": sorted(self.nests),
            "row": self.row,
        }

    def resume(self, delivered: int, habits: Mapping[str, Any]) -> None:
        """Its pass goes on after so many batches."""
        self.delivered = delivered
        self.within = {name: min(n, delivered) for name, n in habits.get("within", {}).items()}


class Company:
    """Shared by the wrapped loaders of one Checkpointer; on the training thread only."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.members: dict[str, Member] = {}
        self.events = 0
        self.last = ""
        """Who delivered last."""
        self.row = 0
        """Its batches in a row."""
        # The step boundary: global random state when a batch was first asked for after step `moved_at`.
        self.moved_at = -1
        self.boundary_rng: Mapping[str, Any] | None = None
        # The restored cut.
        self.cut: Mapping[str, Any] | None = None
        self.cut_at = -1
        self.put_back_by = ""
        self.things: dict[str, Callable[[], None]] = {}
        """Puts back what lies below a resumed loader, as it was at the cut."""
        self.left: Mapping[str, Any] | None = None
        """Global random state as this module left it: what differs, somebody else has drawn."""
        self.exhausted_at = -1
        """After which step a pass ended last."""
        self.ended_at = -1
        """After which step a resumed pass turned out to be at its end."""
        self.repeated = False
        """An outer batch was delivered again: the random state is that of its instant, not the cut's."""
        self.expected: frozenset[str] | None = None
        """Who delivered next in the lost process, after who delivered last."""
        self.used: set[str] = set()
        """Who delivered since the restore, before its first step."""
        self._said: set[str] = set()

    def join(self, name: str) -> Member:
        """The member of this name, as it left off if a loader before had it."""
        return self.members.setdefault(name, Member(name=name))

    def say(self, key: str, message: str, *arguments: object) -> None:
        """A warning, once."""
        if key not in self._said:
            self._said.add(key)
            log.warning(message, *arguments)

    # What is resumed

    def resuming(self, rng: Mapping[str, Any] | None) -> None:
        """A checkpoint was restored: `rng` is the global random state of its cut."""
        self.cut_at = self.clock()
        self.cut = self.left = rng
        self.put_back_by = ""
        self.moved_at = -1

    def timely(self, name: str) -> bool:
        """Whether the random state of the cut is still to be put back by this loader's first batch."""
        return self.cut is not None and self.clock() == self.cut_at and self.put_back_by in ("", name)

    def put_back(self, name: str) -> None:
        """The random state of the cut, now."""
        if self.cut is not None:
            apply_globals(self.cut)
        for put in self.things.values():
            put()
        self.put_back_by = name

    # Events

    def moving(self, *, draws: bool) -> None:
        """A batch, or an iterator, is asked for: where the step boundary ends."""
        now = self.clock()
        if self.moved_at != now:
            self.moved_at = now
            self.boundary_rng = None
        if draws and self.boundary_rng is None:
            self.boundary_rng = capture_globals()

    def began(self, member: Member) -> None:
        """A pass begins."""
        self.events += 1
        for other in self.members.values():
            if other is not member and other.open and other.delivered:
                other.within[member.name] = other.within.get(member.name, 0) + 1
                other.encloses = True
        for name, passes in member.within.items():
            if member.delivered > 1:
                (member.nests.add if passes == member.delivered else member.nests.discard)(name)
        member.open, member.delivered, member.began_at = True, 0, self.events
        member.within = {}
        member.waits = False

    def delivering(self, member: Member, now: int) -> None:
        """A batch is about to be handed over, after step `now`."""
        self.events += 1
        if self.expected is not None:
            if now == self.cut_at:
                self.used.add(member.name)
            else:
                self._judge_order(self.expected)
                self.expected = None
        if self.last in self.members:
            self.members[self.last].after.add(member.name)
        self.row = self.row + 1 if self.last == member.name else 1
        if not any(other.waits for other in self.members.values()):
            member.row = max(member.row, self.row)
        self.last = member.name
        member.delivered += 1
        member.delivered_at = self.events

    def _judge_order(self, expected: frozenset[str]) -> None:
        """After the first step since the restore: was it on a batch of the loader whose turn it was?"""
        if self.repeated or not self.used or expected & self.used:
            return
        if expected:
            self.say(
                "order",
                "after the restore training goes on with %s, where the lost process went on with %s: loaders that take "
                "turns resume exactly only if the program chooses by the step count whose turn it is",
                " or ".join(map(repr, sorted(self.used))),
                " or ".join(map(repr, sorted(expected))),
            )
        elif len(self.members) > 1 and any(m.delivered or m.open for m in self.members.values()):
            self.say(
                "turns",
                "the save was cut before it could be seen in which order the loaders %s take turns: the resume is "
                "exact only if %r was to go on",
                ", ".join(map(repr, sorted(self.members))),
                " or ".join(sorted(self.used)),
            )

    def stepped_in(self, member: Member) -> None:
        """A step was taken in a pass of this one: the resume is over, a loader that waits for it was passed by.

        Not if this one was inside a pass, too: the two take turns, and the other one's is still to come.
        """
        if not member.inside:
            self._passed_by(member)
        self.cut = None
        self.things.clear()

    def exhausted(self, member: Member) -> None:
        """A pass with steps is at its end: has a loader waited longer for its turn than in the lost process?"""
        if member.inside and self.row > member.row:
            self._passed_by(member)

    def _passed_by(self, member: Member) -> None:
        for other in self.members.values():
            if other is not member and other.waits:
                other.waits = False
                self.say(
                    "passed by",
                    "training goes on with the loader %r, while the cut was inside a pass over %r: the resume is not "
                    "bit-exact. Begin with %r, for example by leaving the other pass out while %r.delivered > 0",
                    member.name,
                    other.name,
                    other.name,
                    other.name,
                )

    # What a cut needs

    def in_use(self, outer: Member) -> bool:
        """Whether the last batch of `outer` is still in use: a pass over another loader, begun after it, goes on."""
        if not outer.open or not outer.delivered:
            return False
        for inner in self.members.values():
            if inner is outer or not inner.open or not inner.delivered or inner.began_at < outer.delivered_at:
                continue
            if outer.within.get(inner.name, 0) != outer.delivered:
                continue
            if outer.delivered > 1 or inner.name in inner.after | outer.nests:
                return True
            if not inner.after:  # the first step of all: an inner pass, or two loaders that take turns?
                self.say(
                    "first",
                    "this save was cut before it could be seen whether passes over %r lie within a batch of %r; "
                    "resumed from it, %r is taken to go on with the batch it had",
                    inner.name,
                    outer.name,
                    outer.name,
                )
                return True
        return False
