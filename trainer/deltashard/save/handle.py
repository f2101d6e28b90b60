"""What a save is from the outside: a handle that can be waited for, the commit it became, and counts of what happened.

A handle goes through: requested -> cut (its bytes left the trainer) -> committed | failed. Only the training thread
moves it, at a step boundary or while it waits itself; other threads may wait as long as they like.

A save with a pin or metadata is *exact*: what was said of one model is never stored with another. It is the cut of the
step it was asked at (between two steps: of the next one), or it fails and says why.
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
    """Its number in the run's commit log: `restore(which=f"seq:{seq}")`."""
    attempt: int
    cut: int
    step: int
    """Step it holds."""
    baseline: bool
    """Whether it holds every row by itself."""
    durable_s: float
    """Seconds from the begin of the save to its log entry."""
    stored_bytes: int
    raw_bytes: int
    rows: int

    @classmethod
    def of(cls, message: pb.Commit) -> Commit:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


class SaveHandle:
    """A requested save; made by `Checkpointer.save`."""

    def __init__(
        self,
        *,
        reason: str,
        pin: str | None,
        metadata: Mapping[str, str],
        waiter: Callable[[SaveHandle, float | None], None] | None = None,
    ) -> None:
        """`waiter` waits for it; None: nobody does."""
        self.reason = reason
        self.pin = pin
        self.metadata = dict(metadata)
        self.step: int | None = None
        """Step that was cut; None while the cut has not happened."""
        self.cut: int | None = None
        self.commit: Commit | None = None
        self.error: Exception | None = None
        self.requested_step: int | None = None
        """The only step that an exact save may become, once that is known."""
        self.not_taken_reason = ""
        """Why it was not cut when that was last tried."""
        self.finished = threading.Event()
        self._waiter = waiter

    def __repr__(self) -> str:
        state = (
            "committed" if self.commit else "failed" if self.error else "staged" if self.cut else "requested"
        )
        return f"<SaveHandle {self.reason!r} {state} step={self.step}>"

    @property
    def exact(self) -> bool:
        """Whether it may only be the cut of the step it was asked at."""
        return self.pin is not None or bool(self.metadata)

    @property
    def done(self) -> bool:
        return self.finished.is_set()

    def wait(self, timeout_s: float | None = None) -> Commit:
        """Block until the checkpoint is durable, or until it is known that it will not be.

        Raises:
            WaitError: called on the training thread before the cut happened, it would wait for itself.
            SaveFailed: the save failed (the next one covers its rows); without a timeout also when the sidecar was
                away, or the training thread gone, for so long that nobody will ever tell.
            TimeoutError: not durable within `timeout_s`.
        """
        if self._waiter is not None:
            self._waiter(self, timeout_s)
        if self.error is not None:
            raise self.error
        if self.commit is None:
            raise TimeoutError(f"the save {self.reason!r} is not durable after {timeout_s} s")
        return self.commit

    def mark_staged(self, *, step: int, cut: int) -> None:
        self.step, self.cut = step, cut

    def finish(self, *, commit: Commit | None = None, error: Exception | None = None) -> None:
        if not self.finished.is_set():
            self.commit, self.error = commit, error
            self.finished.set()


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightSave:
    """The save whose fate is not known yet."""

    cut: int
    step: int
    reason: str
    urgent: bool = False
    handles: list[SaveHandle] = field(default_factory=list)
    begun: pb.SaveReply.Begun | None = None
    """What the sidecar answered to it: how its tables are stored."""
    commit: Commit | None = None
    error: SaveFailed | None = None
    """How it ended; neither: that is not known yet."""

    @property
    def metadata(self) -> dict[str, str]:
        """Of all its handles; `split_compatible` sees to it that they agree."""
        return {key: value for handle in self.handles for key, value in handle.metadata.items()}

    @property
    def pins(self) -> list[str]:
        """Names under which retention keeps it, oldest first."""
        return [handle.pin for handle in self.handles if handle.pin is not None]

    def join(self, handle: SaveHandle) -> None:
        """Have a handle that was asked for later share the fate of this save."""
        self.handles.append(handle)
        handle.mark_staged(step=self.step, cut=self.cut)
        if self.commit is not None or self.error is not None:
            handle.finish(commit=self.commit, error=self.error)

    def mark_staged(self) -> None:
        for handle in self.handles:
            handle.mark_staged(step=self.step, cut=self.cut)

    def committed(self, commit: Commit) -> None:
        self.commit = commit
        for handle in self.handles:
            handle.finish(commit=commit)

    def failed(self, error: Exception) -> None:
        self.error = SaveFailed(str(error), where=f"save of step {self.step}")
        for handle in self.handles:
            handle.finish(error=self.error)


def split_compatible(handles: list[SaveHandle]) -> tuple[list[SaveHandle], list[SaveHandle]]:
    """Those that one cut can satisfy, oldest first, and the rest: other values under the same names."""
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
    """Of the cuts for which a copy ahead was begun: rows by how they were copied, and what it cost training.

    Cuts for which none was begun (below 4 MiB of weights and state in tables that may be, or precopy=False) do not
    count here; the sidecar's metrics have all.
    """

    snapshots: int = 0
    """Cuts for which some were copied ahead."""
    precopied_rows: int = 0
    """Copied while training went on."""
    recopied_rows: int = 0
    """... of which copied once more at the cut: they had changed since."""
    stalled_rows: int = 0
    """Copied at cuts only, while training waited."""
    slowdown_s: float = 0.0
    """By so much, in all, the steps meanwhile took longer than those before."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Copies that were not whole, or not used, by cause: "stopped" (a cut came before their end), "arena full", ..."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts of this trainer, for people and tests; the sidecar's metrics are the ones to alert on."""

    snapshots: int = 0
    """Cuts whose bytes were handed over."""
    commits: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Due cuts that were not taken, by cause: vetoed, or one of `BlockReason`."""
    failures: Counter[str] = field(default_factory=Counter)
    """Saves that failed, by cause."""
    event_errors: int = 0
    """Exceptions that `on_event=` raised; only the first is logged."""
    audit_faults: int = 0
    optimizer_state_resets: int = 0
    """Row fields of optimizers that were restored and made anew at the first step after it."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """How long each of the last 1,000 cuts held the training thread."""
    precopy: PrecopyStats = field(default_factory=PrecopyStats)
    last_commit: Commit | None = None

    def count_event_error(self) -> int:
        """`on_event=` raised; returns how often it has."""
        self.event_errors += 1
        return self.event_errors
