"""The one error base and its three families.

Every error deltashard raises says *what* happened, *where*, and the *remedy*. The family tells who can act:
`UserError` (arguments, configuration, permissions), `EnvironmentFault` (store, disk, network, another process)
and `InternalBug` (ours: please report). Modules define their own errors as subclasses of one family.
"""

from __future__ import annotations

from deltashard_proto.cause import Cause


class DeltashardError(Exception):
    """Base of all deltashard errors: `what` happened, `where`, and the `remedy`; `cause` is one of a closed set."""

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
    """The caller's to mend: an argument, a setting, a permission."""


class EnvironmentFault(DeltashardError):
    """The surroundings failed: store, disk, network or a peer process; a retry may succeed."""


class InternalBug(DeltashardError):
    """An invariant of ours does not hold: please report it."""


class FormatError(EnvironmentFault):
    """Bytes that were read are not what the format allows."""

    cause = Cause.CORRUPT


class CorruptObject(FormatError):
    """A hash, length or field of a stored object is wrong (truncation, bit flips)."""


class UnsupportedVersion(FormatError):
    """The object was written by a newer format than this library reads."""

    cause = Cause.ERROR


class ForeignObject(FormatError):
    """The object is whole, but belongs to another run, attempt or cut than its place says."""


class InvalidCheckpoint(FormatError):
    """A committed checkpoint cannot be read.

    Bytes re-read from the store are wrong, the store says 404 for sure, or its frames do not hold what its index and
    log entry promise. Only this makes a restore fall back to an older checkpoint; an unreachable store never does.
    """
