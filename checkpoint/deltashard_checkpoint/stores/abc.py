"""What a store must do: immutable objects by key, one create-only put, ranges, ordered listing, a clock.

Keys are relative to the store's root (`s3://bucket/prefix`, `file:///dir`, `memory://name`), '/'-separated, ASCII.
A back-end makes one bounded attempt per call and classifies what went wrong; who retries, how long and how is
the business of `retry.py` alone. Read-after-write and list-after-write consistency are required.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deltashard_proto.cause import Cause

from deltashard_checkpoint.errors import CorruptObject, DeltashardError, EnvironmentFault, UserError

Buffer = bytes | bytearray | memoryview
MAX_WHOLE_BYTES = 1 << 30
"""An object read whole (a log entry, an index) is never larger; packs, which may be, are read by range."""


class StoreUnavailable(EnvironmentFault):
    """The attempt's outcome is unknown or it failed in a way that a retry may mend (timeout, reset, 5xx, throttle).

    A put that raises this may still have happened: only reading back tells.
    """

    cause = Cause.UNAVAILABLE


class ObjectNotFound(DeltashardError):
    """The store answered for sure that no object has this key (a confirmed 404)."""


class ObjectExists(DeltashardError):
    """A create-only put found its key taken (by another writer, or by this put's own lost acknowledgement)."""


class AccessDenied(UserError):
    """Wrong, expired or insufficient credentials."""

    cause = Cause.DENIED


class CredentialsMissing(AccessDenied):
    """There are no credentials to sign a request with: the file or token is absent or empty. It may yet appear."""

    cause = Cause.MISSING


class BucketMissing(UserError):
    """The bucket or root does not exist."""

    cause = Cause.BUCKET_MISSING


class StoreFull(EnvironmentFault):
    """Quota or disk full."""

    cause = Cause.FULL


class ConditionalPutUnsupported(UserError):
    """The store overwrites where it was asked to create only: two trainers could not be told apart."""


class RequestRefused(UserError):
    """The store refused a request as malformed or not allowed, in a way no other error names."""


class ClockSkew(UserError):
    """The store refuses our signature because the two clocks differ too much."""

    cause = Cause.CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as the store lists it."""

    key: str
    size_bytes: int
    modified_at_s: float
    """Last-Modified by the store's own clock, seconds since the epoch."""


def check_size(size_bytes: int, *, where: str) -> None:
    """Raises `CorruptObject` for an object too large to be one that is read whole, before memory is taken for it."""
    if size_bytes > MAX_WHOLE_BYTES:
        raise CorruptObject(
            f"an object of {size_bytes} bytes where at most {MAX_WHOLE_BYTES} can be", where=where
        )


QUIET_S = 3600.0
"""A writer that has written nothing for so long, and holds no lock, has died."""


class Store(ABC):
    """Each back-end passes the same tests: `StoreTests` of tests/support/checkpoint/store_conformance.py."""

    url: str

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write `data` whole under `key`, replacing what was there; the buffer must not change until it returns."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create `key` with `data`, atomically; raises `ObjectExists` if the key is taken."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object; raises `ObjectNotFound`, and `CorruptObject` for one beyond `MAX_WHOLE_BYTES`, unread."""

    @abstractmethod
    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes [offset, offset + len(out)); a short object raises `CorruptObject`."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size and Last-Modified; raises `ObjectNotFound`."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix` and sorts after `start_after`, in key order."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete; keys that do not exist are no error."""

    def sweep(self, prefix: str, *, quiet_s: float = QUIET_S) -> int:  # noqa: ARG002 - most stores have no such thing
        """Remove what writers that died left under `prefix` and no listing shows; how many there were.

        Never what a living writer is about to finish; `quiet_s`: nor what was written to within so long.
        """
        return 0

    @abstractmethod
    def now_s(self) -> float:
        """The store's own clock, seconds since the epoch: the only clock that ages what it holds."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing to close
        """Release connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
