"""Why something failed or was refused: one closed set for the wire, the errors, metric labels, logs and incidents.

A message says its cause twice: `code` is the enum of trainer.proto, `cause` its word, which is the enum's name in lower
case. A peer that is older than the enum sends the word alone and reads nothing else, so the word is always sent; one
that is newer may send a code that is not known here, and its word is taken as it stands.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol

METADATA = "deltashard-refusal-bin"
"""Key of a failed call's trailing metadata: a serialized `Refusal`."""


class Cause(enum.StrEnum):
    """Why; the value is the word that people, labels and logs see. Members are those of `deltashard.v1.Cause`."""

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

    @property
    def code(self) -> Any:  # protobuf's constructors take an enum by its name
        """Name of the cause in `deltashard.v1.Cause`, as a message's `code` takes it."""
        return f"CAUSE_{self.name}"


_BY_WORD: dict[str, Cause] = {cause.value: cause for cause in Cause}
_PREFIX = "CAUSE_"


class Told(Protocol):
    """A message with a cause: `SaveReply.Failed`, `RestoreReply.Failed`, `Incident`, `Refusal`, ..."""

    DESCRIPTOR: Any
    cause: str
    code: Any


def heard(message: Told) -> str:
    """Cause that a message tells: a `Cause` where it is known here, else the peer's word; empty where it tells none."""
    value = message.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_number.get(message.code)
    word = value.name.removeprefix(_PREFIX).lower() if value is not None and value.number else message.cause
    return _BY_WORD.get(word, word)


def to_metadata(cause: str) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata of a failed call."""
    from deltashard_proto.v1.trainer_pb2 import Refusal

    known = _BY_WORD.get(cause, Cause.ERROR)
    return ((METADATA, Refusal(cause=known, code=known.code).SerializeToString()),)


def from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Cause in a failed call's trailing metadata; empty where an older peer sent none, or nobody answered."""
    from deltashard_proto.v1.trainer_pb2 import Refusal

    for key, value in metadata or ():
        if key == METADATA and isinstance(value, bytes):
            return heard(Refusal.FromString(value))
    return ""
