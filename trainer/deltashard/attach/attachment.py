"""The training thread's view of the session with the sidecar, as of the events it has applied.

The session thread may already have another link, or none. A snapshot is only taken over the link whose events are
applied; for a newer link the outcome of the previous save is not known yet.
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
"""Seconds that an urgent save may take after SIGTERM outside of a pod."""


class SidecarAttachment:
    """The sidecar's epoch and policy, and the control line of the step clock."""

    def __init__(self, session: SidecarSession, first: Link, clock: StepClock) -> None:
        """`first` is the link returned by `session.connect()`."""
        self.session = session
        self.url = str(first.reply.url)
        """Store of the run, without credentials."""
        self.run = str(first.reply.run)
        self._clock = clock
        self._epoch = first.reply.epoch
        self.policy: pb.Policy = first.reply.policy
        """The sidecar's last known policy."""
        self.grace_s = first.reply.grace_s or OWN_GRACE_S
        """Seconds that an urgent save may take after SIGTERM."""
        clock.adopt(first.line)

    @property
    def link(self) -> Link | None:
        """The link whose events are applied; None while the sidecar is disconnected or a newer link is pending."""
        link = self.session.link
        return link if link is not None and self._clock.uses_line(link.line) else None

    def adopt(self, link: Link) -> bool:
        """Adopt a link with its line and policy; return whether the sidecar was restarted since the previous link."""
        restarted = bool(link.reply.epoch != self._epoch)
        self._clock.adopt(link.line)
        self._clock.show()
        self._epoch, self.policy = link.reply.epoch, link.reply.policy
        self.grace_s = link.reply.grace_s or OWN_GRACE_S
        return restarted

    def set_policy(self, policy: pb.Policy) -> None:
        self.policy = policy


class Listener:
    """Calls the user's `on_event`; its exceptions never interrupt training. Used on the training thread only."""

    def __init__(
        self, on_event: Callable[[str, Mapping[str, Any]], None] | None, failed: Callable[[], int]
    ) -> None:
        """`failed` counts an exception of `on_event` and returns the count."""
        self._on_event = on_event
        self._failed = failed

    def emit(self, name: str, **facts: Any) -> None:
        """Report an event; only exceptions of the user's signal handlers propagate."""
        if self._on_event is None:
            return
        try:
            self._on_event(name, facts)
        except BaseException as error:
            if must_propagate(error):
                raise
            if self._failed() == 1:
                log.warning("on_event(%r, ...) raised, training continues", name, exc_info=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMember:
    """This process as a member of its run: its rank, attempt and sidecar."""

    rank: Rank
    attempt: TrainingAttempt
    attachment: SidecarAttachment
    listener: Listener
    """Receives the events of the run."""
