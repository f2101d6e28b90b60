"""Execute a plan: fetch frames in order, prefetched by a few threads under a byte budget, and check each one.

A request is served from the local cache if possible, else by a range read from the store. A frame whose hash or
description mismatches its index is read again from the store, and its cached copy is dropped. If the store returns
wrong bytes twice, or confirms that the object does not exist, the checkpoint is *invalid* (`InvalidCheckpoint`). Any
other failure means *unavailable*: the store's error is raised after its retries, under the plan's deadline. A restore
falls back to an older checkpoint only if this one is invalid.

Bytes can be fetched directly into their final memory (blocks of an arena): a `destination` gives memory for each
request, in order. A request is at most one block long, and its frames start at multiples of 64 bytes. The destination
may block only when no other request can make progress, so a consumer that frees memory as it advances never deadlocks
the fetch. A frame is returned with its tail; the memory of a request is kept while its frames await tails.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from deltashard_checkpoint.cache.pack_cache import PackCache
from deltashard_checkpoint.errors import (
    FormatError,
    InvalidCheckpoint,
    UnsupportedVersion,
)
from deltashard_checkpoint.format import object_key
from deltashard_checkpoint.format.frame import (
    Frame,
    FrameInfo,
    Tail,
    checked_frame,
    checked_tail,
    with_tail,
)
from deltashard_checkpoint.restore.plan import (
    Plan,
    PlannedFrame,
    RangeRequest,
)
from deltashard_checkpoint.restore.shared_read import SharedReads
from deltashard_checkpoint.stores.abc import ObjectNotFound, Store, StoreUnavailable
from deltashard_checkpoint.stores.deadline import deadline

_Found = TypeVar("_Found", Frame, Tail)
DEFAULT_PREFETCH_BYTES = 64 << 20
DEFAULT_WORKERS = 8
_GRACE_S = 5.0
"""Grace period past the deadline, in which stores raise their own errors, before the wait for them ends."""


class _Parsed(NamedTuple):
    """Checked frames or tails of a request."""

    frames: list[Frame]
    tails: list[Tail]


class Destination(Protocol):
    """Provider of memory for fetched bytes."""

    def __call__(self, request: RangeRequest, *, wait: bool) -> memoryview | None:
        """Return writable memory of exactly `request.length` bytes (at most 8 MiB), or None if none is free.

        Called in the plan's order from the iterating thread. With `wait` it blocks until memory is free, or raises: no
        other request is running then, and the consumer must free the memory it holds.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFrame:
    """A frame and its tail, checked against the index: hash, kind, table, rows, columns, step, blob."""

    planned: PlannedFrame
    frame: Frame
    """Parsed with its tail."""
    data: memoryview
    tail: memoryview | None
    """None if the frame has no tail or state is not wanted."""
    request: int
    """Position in the plan of the request whose memory holds `data`."""
    tail_request: int
    tail_offset: int
    """Offset in the memory of that request."""
    last: bool
    """Whether no other frame is ready, so the next one may take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStats:
    """Bytes by source."""

    cache_bytes: int
    store_bytes: int
    reread_bytes: int
    """Bytes read again because of a wrong hash."""


class Fetcher:
    """Fetcher of plans from one run of a store, with or without a local cache."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        cache: PackCache | None = None,
        shared: SharedReads | None = None,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        workers: int = DEFAULT_WORKERS,
        deadline_s: float = 3600.0,
    ) -> None:
        """`prefetch_bytes` bounds fetched, unconsumed bytes; `deadline_s` bounds each plan as a whole.

        `shared` holds blobs that other ranks of this process have just read.
        """
        self._store = store
        self._run = run
        self._cache = cache
        self._shared = shared
        self._prefetch_bytes = prefetch_bytes
        self._workers = workers
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._cache_bytes = self._store_bytes = self._reread_bytes = 0

    @property
    def stats(self) -> FetchStats:
        with self._lock:
            return FetchStats(
                cache_bytes=self._cache_bytes, store_bytes=self._store_bytes, reread_bytes=self._reread_bytes
            )

    def fetch(self, plan: Plan, destination: Destination | None = None) -> Iterator[FetchedFrame]:
        """Yield the plan's frames in order. Without a destination, each request has its own memory.

        Raises `InvalidCheckpoint`, `StoreUnavailable` and other store errors. Closing the iterator stops the fetch and
        waits for running reads, so that the memory of `destination` is no longer written.
        """
        until = time.monotonic() + self._deadline_s
        todo = deque(plan.requests)
        matcher = _TailMatcher()
        under_way: deque[tuple[RangeRequest, memoryview, Future[_Parsed]]] = deque()
        ahead = 0
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="fetch")
        try:
            while todo or under_way:
                while todo and (not under_way or ahead + todo[0].length <= self._prefetch_bytes):
                    memory = _memory(todo[0], destination, wait=not under_way)
                    if memory is None:
                        break
                    request = todo.popleft()
                    under_way.append((request, memory, pool.submit(self._read, request, memory, until)))
                    ahead += request.length
                request, memory, future = under_way.popleft()
                try:
                    parsed = future.result(max(0.0, until - time.monotonic()) + _GRACE_S)
                except FutureTimeout:
                    raise self._timeout_error(request) from None
                ahead -= request.length
                yield from matcher.take(request, memory, parsed)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, request: RangeRequest, memory: memoryview, until: float) -> _Parsed:
        """Fill the memory with the request's bytes and return its checked frames or tails."""
        if time.monotonic() >= until:
            raise self._timeout_error(request)
        key = object_key.run_key(self._run, request.key)
        cached = self._cache is not None and self._cache.read_into(key, request.offset, memory)
        if not cached:
            cached = self._from_shared_or_store(key, request, memory, until)
        with self._lock:
            if cached:
                self._cache_bytes += request.length
            else:
                self._store_bytes += request.length
        # A bit error on the wire must not invalidate a checkpoint: the store is always read twice.
        rereads = 2 if cached else 1

        def checked(planned: PlannedFrame, check: Callable[[memoryview, FrameInfo], _Found]) -> _Found:
            return self._checked(key, request, planned, check, memory, until, rereads=rereads)

        return _Parsed(
            frames=[checked(planned, checked_frame) for planned in request.frames],
            tails=[checked(planned, checked_tail) for planned in request.tails],
        )

    def _checked(
        self,
        key: str,
        request: RangeRequest,
        planned: PlannedFrame,
        check: Callable[[memoryview, FrameInfo], _Found],
        memory: memoryview,
        until: float,
        *,
        rereads: int,
    ) -> _Found:
        """Return a frame or tail that matches its index; reread mismatches, then raise `InvalidCheckpoint`."""
        place = memory[planned.span]
        offset = request.offset + planned.offset
        while True:
            try:
                return check(place, planned.info)
            except UnsupportedVersion:
                raise
            except FormatError as error:
                if not rereads:
                    raise InvalidCheckpoint(
                        f"the frame at {offset} (+{len(place)} bytes) of checkpoint {planned.seq} is wrong, read twice "
                        f"from the store: {error.what}",
                        where=key,
                        remedy="restore an older checkpoint",
                    ) from None
            rereads -= 1
            if self._cache is not None:
                self._cache.drop(key)
            if self._shared is not None:
                self._shared.forget((key, request.offset, request.length))
            self._from_store(key, offset, place, until)
            with self._lock:
                self._store_bytes += len(place)
                self._reread_bytes += len(place)

    def _from_shared_or_store(self, key: str, request: RangeRequest, out: memoryview, until: float) -> bool:
        """Fill `out`; return whether another rank's read supplied the bytes. Rows are never shared."""
        if self._shared is None or request.tails or any(each.table is not None for each in request.frames):
            self._from_store(key, request.offset, out, until)
            return False
        asked = False

        def fetch() -> bytearray:
            nonlocal asked
            asked = True
            data = bytearray(request.length)
            self._from_store(key, request.offset, memoryview(data), until)
            return data

        with deadline(max(0.0, until - time.monotonic())):
            out[:] = self._shared.read((key, request.offset, request.length), fetch)
        return not asked

    def _from_store(self, key: str, offset: int, out: memoryview, until: float) -> None:
        try:
            with deadline(max(0.0, until - time.monotonic())):
                self._store.get_into(key, offset, out)
        except ObjectNotFound as error:
            raise InvalidCheckpoint(
                "an object of the checkpoint does not exist",
                where=key,
                remedy="restore an older checkpoint",
            ) from error
        except FormatError:
            # Shorter than in its index: read again, like other mismatches.
            try:
                with deadline(max(0.0, until - time.monotonic())):
                    self._store.get_into(key, offset, out)
            except FormatError as error:
                raise InvalidCheckpoint(
                    f"an object of the checkpoint is too short: {error.what}",
                    where=key,
                    remedy="restore an older checkpoint",
                ) from error

    def _timeout_error(self, request: RangeRequest) -> StoreUnavailable:
        return StoreUnavailable(
            f"the checkpoint was not read within {self._deadline_s:g} s",
            where=object_key.run_key(self._run, request.key),
            remedy="is the store reachable and fast enough?",
        )


class _TailMatcher:
    """Queue of frames that await their tails, in order."""

    def __init__(self) -> None:
        self._requests = 0
        self._frames: deque[tuple[PlannedFrame, Frame, int, memoryview]] = deque()

    def take(self, request: RangeRequest, memory: memoryview, parsed: _Parsed) -> Iterator[FetchedFrame]:
        """Yield the frames that are complete, with their tails, after one more request."""
        number = self._requests
        self._requests += 1
        for planned, frame in zip(request.frames, parsed.frames, strict=True):
            self._frames.append((planned, frame, number, memory[planned.span]))
        tails = deque(zip(request.tails, parsed.tails, strict=True))
        while self._frames and (tails or not self._frames[0][0].state):
            planned, frame, at, data = self._frames.popleft()
            tail: PlannedFrame | None = None
            if planned.state:
                tail, state = tails.popleft()
                try:
                    frame = with_tail(frame, state)
                except (
                    FormatError
                ) as error:  # each matches its index, but frame and tail do not match each other
                    raise InvalidCheckpoint(
                        f"a frame and its tail of checkpoint {planned.seq}: {error.what}",
                        where=request.key,
                        remedy="restore an older checkpoint",
                    ) from error
            yield FetchedFrame(
                planned=planned,
                frame=frame,
                data=data,
                tail=None if tail is None else memory[tail.span],
                request=at,
                tail_request=number,
                tail_offset=0 if tail is None else tail.offset,
                last=not self._frames or (not tails and self._frames[0][0].state),
            )


def _memory(request: RangeRequest, destination: Destination | None, *, wait: bool) -> memoryview | None:
    if destination is not None:
        return destination(request, wait=wait)
    return memoryview(np.empty(request.length, np.uint8).data)
