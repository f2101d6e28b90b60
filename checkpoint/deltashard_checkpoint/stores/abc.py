"""The store protocol: immutable objects by key, create-only puts, range reads, ordered listing, and a clock.

Keys are relative to the store's root (`s3://bucket/prefix`, `file:///dir`, `memory://name`), '/'-separated, ASCII. A
back-end makes one bounded attempt per call and classifies its failure; only `retry.py` retries. Read-after-write and
list-after-write consistency are required.
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
"""Largest object that is read whole (a log entry, an index); packs, which may be larger, are read by range."""


class StoreUnavailable(EnvironmentFault):
    """The attempt failed in a way that a retry may fix (timeout, reset, 5xx, throttling), or its outcome is unknown.

    A put that raises this may have succeeded; only a read shows.
    """

    cause = Cause.UNAVAILABLE


class ObjectNotFound(DeltashardError):
    """The store confirmed that no object has this key (a 404)."""


class ObjectExists(DeltashardError):
    """A create-only put found its key taken, by another writer or by its own unacknowledged attempt."""


class AccessDenied(UserError):
    """Wrong, expired or insufficient credentials."""

    cause = Cause.DENIED


class CredentialsMissing(AccessDenied):
    """There are no credentials to sign a request: the file or token is absent or empty, but may appear later."""

    cause = Cause.MISSING


class BucketMissing(UserError):
    """The bucket or root does not exist."""

    cause = Cause.BUCKET_MISSING


class StoreFull(EnvironmentFault):
    """Quota or disk full."""

    cause = Cause.FULL


class ConditionalPutUnsupported(UserError):
    """The store overwrites on create-only puts, so two trainers could not be distinguished."""


class RequestRefused(UserError):
    """The store rejected a request as malformed or not allowed, for a reason without a specific error class."""


class ClockSkew(UserError):
    """The store rejects the signature because the clocks differ too much."""

    cause = Cause.CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Listing entry of one object."""

    key: str
    size_bytes: int
    modified_at_s: float
    """Last-Modified by the store's own clock, seconds since the epoch."""


def check_size(size_bytes: int, *, where: str) -> None:
    """Raise `CorruptObject` for an object too large to be read whole, before memory is allocated for it."""
    if size_bytes > MAX_WHOLE_BYTES:
        raise CorruptObject(
            f"an object of {size_bytes} bytes exceeds the limit of {MAX_WHOLE_BYTES}", where=where
        )


QUIET_S = 3600.0
"""A writer without a lock that has written nothing for so long is considered dead."""


class Store(ABC):
    """Protocol of a store. Each back-end passes `StoreTests` of tests/support/checkpoint/store_conformance.py."""

    url: str

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write `data` under `key`, replacing any object; the buffer must not change before the return."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create `key` with `data`, atomically; raises `ObjectExists` if the key is taken."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the whole object; raises `ObjectNotFound`, and `CorruptObject` above `MAX_WHOLE_BYTES`."""

    @abstractmethod
    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the object's bytes [offset, offset + len(out)); a short object raises `CorruptObject`."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size and Last-Modified; raises `ObjectNotFound`."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose key starts with `prefix` and sorts after `start_after`, in key order."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing keys are ignored."""

    def sweep(self, prefix: str, *, quiet_s: float = QUIET_S) -> int:  # noqa: ARG002 - most stores have no leftovers
        """Remove unlisted leftovers of dead writers under `prefix`; return their number.

        Files of living writers, and files written within `quiet_s`, are kept.
        """
        return 0

    @abstractmethod
    def now_s(self) -> float:
        """Return the store's clock, in seconds since the epoch: the only clock for the age of its objects."""

    def close(self) -> None:  # noqa: B027 - most stores hold nothing to close
        """Release connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
