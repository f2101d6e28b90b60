"""User-facing types of saves: the handle of a save, its commit, and counters.

A handle is requested, staged (its bytes left the trainer), and then committed or failed. Only the training thread
changes its state, at a step boundary or while it waits; any thread may wait for it.

A save with a pin or metadata is *exact*: it is bound to the step at which it was requested (between two steps: to the
next one) and fails if that step is not captured, so that its metadata is never stored with another step.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from deltashard_proto.v1 import trainer_pb2 as pb

from deltashard.errors import SaveFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A durable checkpoint."""

    seq: int
    """Sequence number in the run's commit log, as in `restore(which=f"seq:{seq}")`."""
    attempt: int
    snapshot_id: int
    step: int
    """Training step of the checkpoint."""
    baseline: bool
    """Whether the checkpoint holds all rows without reference to an earlier one."""
    durable_s: float
    """Seconds from the start of the save to its log entry."""
    stored_bytes: int
    raw_bytes: int
    rows: int

    @classmethod
    def of(cls, message: pb.Commit) -> Commit:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


class SaveHandle:
    """A requested save, returned by `Checkpointer.save`."""

    def __init__(
        self,
        *,
        reason: str,
        pin: str | None,
        metadata: Mapping[str, str],
        waiter: Callable[[SaveHandle, float | None], None] | None = None,
    ) -> None:
        """`waiter` implements `wait()`; without it, `wait()` returns at once."""
        self.reason = reason
        self.pin = pin
        self.metadata = dict(metadata)
        self.step: int | None = None
        """Step of the snapshot; None until it is taken."""
        self.snapshot_id: int | None = None
        self.commit: Commit | None = None
        self.error: Exception | None = None
        self.requested_step: int | None = None
        """Step that an exact save is bound to, once known."""
        self.not_taken_reason = ""
        """Reason why the last try took no snapshot."""
        self.finished = threading.Event()
        self._waiter = waiter

    def __repr__(self) -> str:
        state = (
            "committed"
            if self.commit
            else "failed"
            if self.error
            else "staged"
            if self.snapshot_id
            else "requested"
        )
        return f"<SaveHandle {self.reason!r} {state} step={self.step}>"

    @property
    def exact(self) -> bool:
        """Whether the save is bound to the step at which it was requested."""
        return self.pin is not None or bool(self.metadata)

    @property
    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout_s: float | None = None) -> Commit:
        """Block until the checkpoint is durable or the save has failed.

        Args:
            timeout_s: Seconds to wait. Default: no limit.

        Returns:
            The commit of the save.

        Raises:
            WaitError: Called on the training thread before the snapshot was taken, which would deadlock.
            SaveFailed: The save failed; the next one covers its rows. Without a timeout also if the sidecar is
                disconnected for too long or the training thread has ended, so that the outcome is unknown.
            TimeoutError: The save is not durable after `timeout_s`.
        """
        if self._waiter is not None:
            self._waiter(self, timeout_s)
        if self.error is not None:
            raise self.error
        if self.commit is None:
            raise TimeoutError(f"the save {self.reason!r} is not durable after {timeout_s} s")
        return self.commit

    def mark_staged(self, *, step: int, snapshot_id: int) -> None:
        self.step, self.snapshot_id = step, snapshot_id

    def finish(self, *, commit: Commit | None = None, error: Exception | None = None) -> None:
        if not self.finished.is_set():
            self.commit, self.error = commit, error
            self.finished.set()


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightSave:
    """A save from the start of its snapshot until its outcome is known."""

    snapshot_id: int
    step: int
    reason: str
    urgent: bool = False
    handles: list[SaveHandle] = field(default_factory=list)
    begun: pb.SaveReply.Begun | None = None
    """The sidecar's reply, with the encodings of the tables."""
    commit: Commit | None = None
    error: SaveFailed | None = None
    """Outcome; while both `commit` and `error` are None, the save is in flight."""

    @property
    def metadata(self) -> dict[str, str]:
        """Merged metadata of all handles; `split_compatible` ensures that their values agree."""
        return {key: value for handle in self.handles for key, value in handle.metadata.items()}

    @property
    def pins(self) -> list[str]:
        """Pins of all handles, oldest first."""
        return [handle.pin for handle in self.handles if handle.pin is not None]

    def join(self, handle: SaveHandle) -> None:
        """Add a later handle to this save; it shares the outcome."""
        self.handles.append(handle)
        handle.mark_staged(step=self.step, snapshot_id=self.snapshot_id)
        if self.commit is not None or self.error is not None:
            handle.finish(commit=self.commit, error=self.error)

    def mark_staged(self) -> None:
        for handle in self.handles:
            handle.mark_staged(step=self.step, snapshot_id=self.snapshot_id)

    def committed(self, commit: Commit) -> None:
        self.commit = commit
        for handle in self.handles:
            handle.finish(commit=commit)

    def failed(self, error: Exception) -> None:
        self.error = SaveFailed(str(error), where=f"save of step {self.step}")
        for handle in self.handles:
            handle.finish(error=self.error)


def split_compatible(handles: list[SaveHandle]) -> tuple[list[SaveHandle], list[SaveHandle]]:
    """Split into handles that one snapshot can satisfy, oldest first, and the rest, whose metadata conflicts."""
    taken: list[SaveHandle] = []
    rest: list[SaveHandle] = []
    metadata: dict[str, str] = {}
    for handle in handles:
        if all(metadata.get(key, value) == value for key, value in handle.metadata.items()):
            taken.append(handle)
            metadata |= handle.metadata
        else:
            rest.append(handle)
    return taken, rest


@dataclass(slots=True, kw_only=True)
class PrecopyStats:
    """Counters of snapshots for which rows were copied ahead, and the cost of copying for training.

    Not counted are snapshots without a copy ahead (below 4 MiB of eligible weights and state, or with precopy=False);
    the sidecar's metrics include them.
    """

    snapshots: int = 0
    """Snapshots for which rows were copied ahead."""
    precopied_rows: int = 0
    """Rows copied while training continued."""
    recopied_rows: int = 0
    """Rows copied again at the snapshot because they had changed."""
    stalled_rows: int = 0
    """Rows copied while training waited."""
    slowdown_s: float = 0.0
    """Total seconds by which steps during copies were longer than the steps before."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Incomplete or unused copies by cause: "stopped" (the snapshot began before their end), "arena full", ..."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of this trainer, for people and tests; use the sidecar's metrics for alerts."""

    snapshots: int = 0
    """Snapshots whose bytes were handed over to the sidecar."""
    commits: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Due snapshots that were not taken, by cause: "vetoed" or another `BlockReason`."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed saves by cause."""
    event_errors: int = 0
    """Exceptions raised by `on_event`; only the first is logged."""
    audit_faults: int = 0
    optimizer_state_resets: int = 0
    """Row-wise optimizer state that was restored and then recreated by the optimizer at its first step."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """Seconds for which each of the last 1,000 snapshots held the training thread."""
    precopy: PrecopyStats = field(default_factory=PrecopyStats)
    last_commit: Commit | None = None

    def count_event_error(self) -> int:
        """Count an exception of `on_event` and return the total."""
        self.event_errors += 1
        return self.event_errors
