"""The attempt a trainer trains under: what it resumed from, how far it is durable, and whether it is fenced."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from deltashard_proto.cause import Cause
from deltashard_proto.v1 import trainer_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Why an attempt can never commit again."""

    cause: Cause
    """Fenced, or taken over by another workload."""
    why: str


class SessionAttempt:
    """The attempt of one session, which a fall-back or a takeover replaces. Thread-safe; only its methods write."""

    def __init__(self, number: int | None, layout: str = "") -> None:
        self._lock = threading.Lock()
        self.number = number
        """Attempt in the log; None before one is open."""
        self.layout = layout
        """Digest of the layout of its ranks; empty: one rank, which holds every table whole."""
        self.asked_s = 0.0
        """When it was asked for, monotonic."""
        self.asked_at_s = 0.0
        """When it was asked for, Unix seconds."""
        self.resumed = False
        """Whether it resumes from a checkpoint."""
        self.restored = False
        """Whether every row of that was handed over."""
        self.lost_steps = 0
        """Steps lost by the restart that this attempt is, as far as this arena saw."""
        self.last_commit: pb.Commit | None = None
        self.durable_step: int | None = None
        """Newest step that a crash of the trainer cannot take back."""

    def asked(self) -> None:
        with self._lock:
            self.asked_s, self.asked_at_s = time.monotonic(), time.time()

    def opened(self, reply: pb.OpenReply) -> None:
        """An attempt was opened, in place of any before."""
        lost = reply.last_step_seen - reply.step if reply.HasField("last_step_seen") else 0
        with self._lock:
            self.number = reply.attempt
            self.layout = reply.layout
            self.last_commit = None
            self.resumed, self.restored = reply.HasField("resume_seq"), False
            self.durable_step = reply.step if self.resumed else None
            self.lost_steps = max(0, lost)

    def found(self, commit: pb.Commit | None) -> None:
        """A trainer attached in the middle of this attempt, whose newest commit is this."""
        with self._lock:
            self.last_commit = commit

    def committed(self, number: int, commit: pb.Commit) -> None:
        """A save of attempt `number` is durable; of another attempt it is no news."""
        with self._lock:
            if number == self.number:
                self.last_commit, self.durable_step = commit, commit.step

    def handed_over(self) -> bool:
        """Every row of what it resumes from was handed over; True the first time."""
        with self._lock:
            first, self.restored = not self.restored, True
            return first
