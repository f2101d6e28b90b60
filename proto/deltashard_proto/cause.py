"""Causes of failures and rejections: one closed set for wire, errors, metric labels, logs and incidents.

The wire carries the string. Unknown values from a newer peer are kept unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

METADATA = "deltashard-refusal-bin"
"""Key of a failed call's trailing metadata: a serialized `Refusal`."""


class Cause(enum.StrEnum):
    """A cause; its value is used in messages, labels and logs."""

    # Causes of a failed save.
    ABORTED = "aborted"
    """The trainer cancelled the save before all rows were handed over, for example because of an exception."""
    STALL_BUDGET = "stall_budget"
    """The snapshot blocked training for longer than `stall_budget_s`: the arena is too small for the changed rows."""
    BROKEN = "broken"
    """The trainer's connection ended before all rows were handed over."""
    BUSY = "busy"
    """The previous save of this rank is still in flight. The save is skipped."""
    FENCED = "fenced"
    """A newer attempt has taken over the run. This trainer cannot commit again."""
    TAKEN_OVER = "taken_over"
    """Another workload has taken over the run. Restarts of this workload are rejected."""
    STOPPING = "stopping"
    """The sidecar is stopping."""
    SUPERSEDED = "superseded"
    """An urgent save, or the save of a new trainer of this rank, took its place."""
    DEADLINE = "deadline"
    """The save was not durable within `save_deadline_s`, or the trainer sent nothing for `stream_idle_s`."""
    INVALID = "invalid"
    """The trainer sent an invalid request. Of a restore: the checkpoint is damaged or incomplete."""
    UNAVAILABLE = "unavailable"
    """The store cannot be used: it does not answer, or rejects requests. The sidecar's log has the reason."""
    ABANDONED = "abandoned"
    """A rank failed, or the ranks disagreed, so that the snapshot cannot be committed."""
    CORRUPT = "corrupt"
    """Stored bytes violate the format."""
    LOG_LOST = "log_lost"
    """The run's log is not the one that was written: entries are missing, or the store was reset."""
    REMOVED = "removed"
    """The run was removed during training, or the store was emptied. Nothing is saved until a restart."""
    ERROR = "error"
    """Any other error. The message and the log have details."""
    # Causes of a failed restore, in addition to invalid, unavailable and error.
    MOVED = "moved"
    """Another run changed while its checkpoint was read: the checkpoint may have been retired."""
    NOT_FOUND = "not_found"
    """The requested checkpoint does not exist."""
    MISMATCH = "mismatch"
    """The checkpoint and the model differ."""
    # Causes of store failures, in addition to unavailable.
    MISSING = "missing"
    """There are no credentials: the file or token is absent or empty."""
    DENIED = "denied"
    """The store rejects the credentials: wrong, expired or insufficient."""
    BUCKET_MISSING = "bucket_missing"
    """The bucket or directory does not exist."""
    FULL = "full"
    """The store has no space, or its quota is used up."""
    CLOCK = "clock"
    """The store rejects signatures because the clocks differ too much."""
    REFUSED = "refused"
    """The store rejects requests for another reason."""
    # Causes of other incidents.
    LOST = "lost"
    """The trainer ended without detaching, or its session is unknown."""
    AUDIT = "audit"
    """Rows changed that no tracker had marked."""
    DAMAGED_LOG = "damaged_log"
    """A restore skipped checkpoints because the log cannot be read to its end."""

    def __repr__(self) -> str:
        """Repr of the value: causes are keys of dicts that users print (`Checkpointer.stats`)."""
        return repr(self.value)


_BY_WORD: dict[str, Cause] = {cause.value: cause for cause in Cause}


def parse_cause(word: str) -> str:
    """Parse the cause of a message: a `Cause` if known, else the peer's string; empty if there is none."""
    return _BY_WORD.get(word, word)


def to_metadata(cause: str) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata of a failed call."""
    from deltashard_proto.v1.trainer_pb2 import Refusal

    return ((METADATA, Refusal(cause=_BY_WORD.get(cause, Cause.ERROR)).SerializeToString()),)


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the cause in a failed call's trailing metadata; empty if the peer did not answer."""
    from deltashard_proto.v1.trainer_pb2 import Refusal

    for key, value in metadata or ():
        if key == METADATA and isinstance(value, bytes):
            return parse_cause(Refusal.FromString(value).cause)
    return ""
