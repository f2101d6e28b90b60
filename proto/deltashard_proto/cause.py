"""Why something failed or was refused: one closed set for the wire, the errors, metric labels, logs and incidents.

The wire carries the word. One that a newer peer made up is taken as it stands.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

METADATA = "deltashard-refusal-bin"
"""Key of a failed call's trailing metadata: a serialized `Refusal`."""


class Cause(enum.StrEnum):
    """Why; the value is the word that people, labels and logs see."""

    # Of a save.
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
    # Of a restore, besides invalid, unavailable and error.
    MOVED = "moved"
    NOT_FOUND = "not_found"
    MISMATCH = "mismatch"
    # Of a store that does not serve, besides unavailable.
    MISSING = "missing"
    DENIED = "denied"
    BUCKET_MISSING = "bucket_missing"
    FULL = "full"
    CLOCK = "clock"
    REFUSED = "refused"
    # Of other incidents.
    LOST = "lost"
    AUDIT = "audit"
    DAMAGED_LOG = "damaged_log"

    def __repr__(self) -> str:
        """Repr of the word: causes are keys of what users print (`Checkpointer.stats`)."""
        return repr(self.value)


_BY_WORD: dict[str, Cause] = {cause.value: cause for cause in Cause}


def parse_cause(word: str) -> str:
    """Cause of a message: a `Cause` where it is known here, else the peer's word; empty where it states none."""
    return _BY_WORD.get(word, word)


def to_metadata(cause: str) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata of a failed call."""
    from deltashard_proto.v1.trainer_pb2 import Refusal

    return ((METADATA, Refusal(cause=_BY_WORD.get(cause, Cause.ERROR)).SerializeToString()),)


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Cause in a failed call's trailing metadata; empty where the peer did not answer."""
    from deltashard_proto.v1.trainer_pb2 import Refusal

    for key, value in metadata or ():
        if key == METADATA and isinstance(value, bytes):
            return parse_cause(Refusal.FromString(value).cause)
    return ""
