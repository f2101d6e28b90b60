"""What the training thread knows of the sidecar: its own view of the session, as of the news it has applied.

The session thread may hold another link already, or none. A cut is only taken over the link whose news is applied:
of a newer one it is not known yet what became of the save before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.attach.interruption import must_propagate
from deltashard.attach.lifecycle import TrainingAttempt
from deltashard.attach.rank import Rank
from deltashard.attach.session import Link, SidecarSession
from deltashard.tracking.step_clock import StepClock

log = logging.getLogger("deltashard")

OWN_GRACE_S = 20.0
"""After SIGTERM an urgent save may take so long where there is no pod."""


class SidecarAttachment:
    """The sidecar's epoch and policy, and the control line that the clock ticks on."""

    def __init__(self, session: SidecarSession, first: Link, clock: StepClock) -> None:
        """`first` is the link that `session.connect()` gave."""
        self.session = session
        self.url = str(first.reply.url)
        """Where the run is stored (without credentials)."""
        self.run = str(first.reply.run)
        """The run's name."""
        self._clock = clock
        self._epoch = first.reply.epoch
        self.policy: pb.Policy = first.reply.policy
        """The sidecar's, as it last reported it."""
        self.grace_s = first.reply.grace_s or OWN_GRACE_S
        """The pod's: after SIGTERM an urgent save may take so long."""
        clock.adopt(first.line)

    @property
    def link(self) -> Link | None:
        """The link whose news is applied; None while the sidecar is away, or another link is to be heard of."""
        link = self.session.link
        return link if link is not None and self._clock.uses_line(link.line) else None

    def adopt(self, link: Link) -> bool:
        """A new attachment: its line and its policy; returns whether it is of a sidecar that was started since."""
        restarted = bool(link.reply.epoch != self._epoch)
        self._clock.adopt(link.line)
        self._clock.show()
        self._epoch, self.policy = link.reply.epoch, link.reply.policy
        self.grace_s = link.reply.grace_s or OWN_GRACE_S
        return restarted

    def set_policy(self, policy: pb.Policy) -> None:
        self.policy = policy


class Listener:
    """Calls `on_event=`, the program's own: whatever it raises never harms training. On the training thread only."""

    def __init__(
        self, on_event: Callable[[str, Mapping[str, Any]], None] | None, failed: Callable[[], int]
    ) -> None:
        """`failed` counts what `on_event` raised, and returns the count."""
        self._on_event = on_event
        self._failed = failed

    def emit(self, name: str, **facts: Any) -> None:
        """Tell of an event; only what the user's signal handler raises comes out."""
        if self._on_event is None:
            return
        try:
            self._on_event(name, facts)
        except BaseException as error:
            if must_propagate(error):
                raise
            if self._failed() == 1:
                log.warning("on_event(%r, ...) raised, training goes on", name, exc_info=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMember:
    """This process as a member of its run: which rank it is, under which attempt, over which sidecar."""

    rank: Rank
    attempt: TrainingAttempt
    attachment: SidecarAttachment
    listener: Listener
    """Hears what happens to the run."""
