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
    STALL_BUDGET = "stall_budget"
    BROKEN = "broken"
    BUSY = "busy"
    FENCED = "fenced"
    TAKEN_OVER = "taken_over"
    STOPPING = "stopping"
    SUPERSEDED = "superseded"
    DEADLINE = "deadline"
    INVALID = "invalid"
    UNAVAILABLE = "unavailable"
    ABANDONED = "abandoned"
    CORRUPT = "corrupt"
    LOG_LOST = "log_lost"
    REMOVED = "removed"
    ERROR = "error"
    # Causes of a failed restore, in addition to invalid, unavailable and error.
    MOVED = "moved"
    NOT_FOUND = "not_found"
    MISMATCH = "mismatch"
    # Causes of store failures, in addition to unavailable.
    MISSING = "missing"
    DENIED = "denied"
    BUCKET_MISSING = "bucket_missing"
    FULL = "full"
    CLOCK = "clock"
    REFUSED = "refused"
    # Causes of other incidents.
    LOST = "lost"
    AUDIT = "audit"
    DAMAGED_LOG = "damaged_log"

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
