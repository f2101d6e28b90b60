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


EVENTS: Mapping[str, str] = {
    "snapshot": "The rows of a save are handed over to the sidecar. The save is not durable yet.",
    "committed": "A checkpoint is durable.",
    "save_failed": "A save failed. Training continues, and the next save covers its rows.",
    "skipped": "A due save was not taken.",
    "save_blocked": "A save has been due for three intervals and at least a minute, and does not happen.",
    "attached": "The trainer is attached to a sidecar: at the start, and after a restart of the sidecar.",
    "sidecar_lost": "The sidecar is disconnected. Saves are skipped until one is attached.",
    "restored": "`restore()` has restored a checkpoint.",
    "fell_back": "A restore skips a damaged checkpoint, or uses one before the damaged part of the log.",
    "log_damaged": "A part of the commit log cannot be read, and no newer checkpoint is known to be lost.",
    "snapshot_inconsistent": "A checkpoint may not be restored exactly: rows changed without a mark. The next is full.",
    "optimizer_state_reset": "An optimizer discarded restored row-wise state at its first step.",
    "gradient_alive": "A gradient that existed at a snapshot is used after it. Checkpoints do not contain gradients.",
    "replicas_differ": "Tensors of which every rank has a copy differ between the ranks.",
    "nothing_saved": "The optimizer stepped and `step()` was never called, so that `close()` saves nothing.",
}
"""Events of `on_event` and their meaning, for docs/reference/events.md."""
FIELDS: Mapping[str, str] = {
    "age_s": "float or None: Seconds since the newest checkpoint; None without one.",
    "commit": "Commit: The [checkpoint](api.md#deltashard.Commit).",
    "error": "str: Message for users.",
    "field": "str: Name of the state in the optimizer, such as `sum`.",
    "for_s": "float: Seconds for which the save has been due.",
    "message": "str: Message for users, with the remedy.",
    "mode": "str: Rows in the snapshot: `all`, or those changed `since_baseline` or `since_commit`.",
    "optimizer": "str: Class of the optimizer.",
    "parameter": "str: Name of the parameter.",
    "rank": "int or None: Rank that blocks the save, in a group.",
    "restored": "Restored: Result of [`restore()`](api.md#deltashard.Restored).",
    "save_blocked.reason": "str: A [reason](errors.md#reasons-that-block-a-save) that blocks a save.",
    "save_failed.cause": "str: A [cause](errors.md#causes), or a cause of the trainer, below.",
    "seq": "int or None: Checkpoint that is skipped; after damage of the log, the one that is restored.",
    "session": "str: Identifier of the attachment.",
    "skipped.cause": "str: A [reason](errors.md#reasons-that-block-a-save) that blocks a save, or of a group, below.",
    "snapshot.reason": "str: Why the save was requested: `timer`, `close`, the reason given to `save()`, and others.",
    "snapshot_id": "int: Number of the snapshot in this attempt.",
    "stall_s": "float: Seconds for which the snapshot blocked training.",
    "step": "int: Training step.",
    "table": "str: Name of the table.",
    "tables": "dict: Up to 16 wrong rows of each table, by name.",
    "why": "str: Message for users.",
}
"""Fields of the events: type and meaning. `event.field` is a field with another meaning in other events."""


class Listener:
    """Calls the user's `on_event` on the training thread; its exceptions never interrupt training."""

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
