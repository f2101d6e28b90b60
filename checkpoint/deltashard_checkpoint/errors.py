"""The base class of all deltashard errors and its three families.

Every error states *what* happened, *where*, and a *remedy*. The family names the party that can act: `UserError`
(arguments, configuration, permissions), `EnvironmentFault` (store, disk, network, another process) and `InternalBug`
(a bug in deltashard). Modules derive their errors from one of these.
"""

from __future__ import annotations

from deltashard_proto.cause import Cause


class DeltashardError(Exception):
    """Base of all deltashard errors. `what`, `where` and `remedy` form the text; `cause` is one value of `Cause`."""

    cause: str = Cause.ERROR

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        text = what
        if where:
            text += f" [{where}]"
        if remedy:
            text += f" -- {remedy}"
        super().__init__(text)


class UserError(DeltashardError):
    """The caller must fix it: an argument, a setting or a permission."""


class EnvironmentFault(DeltashardError):
    """The environment failed (store, disk, network or a peer process); a retry may succeed."""


class InternalBug(DeltashardError):
    """An internal invariant is violated: please report it."""


class FormatError(EnvironmentFault):
    """Bytes read from the store violate the format."""

    cause = Cause.CORRUPT


class CorruptObject(FormatError):
    """A hash, length or field of a stored object is wrong (truncation, bit flips)."""


class UnsupportedVersion(FormatError):
    """The object's format version is newer than this library supports."""

    cause = Cause.ERROR


class ForeignObject(FormatError):
    """The object is intact, but belongs to another run, attempt or snapshot than its key implies."""


class InvalidCheckpoint(FormatError):
    """A committed checkpoint cannot be read.

    The store returned wrong bytes twice or a definite 404, or the frames contradict the index and the log entry.
    This is the only error that makes a restore fall back to an older checkpoint; an unreachable store never does.
    """
