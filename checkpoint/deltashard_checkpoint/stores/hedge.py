"""Hedged reads: one that takes much longer than such reads do is asked for a second time, and the first answer counts.

A server or a path in between that goes silent costs one read its whole silence time-out, and a restore waits for it.
"Much longer" is `MULTIPLE` times the median of the newest reads of that size class, and never less than `SHORTEST_S`;
where too few are known a size's worth of a slow link is allowed. At most `concurrent` second requests are under way
at a time: a store that is slow as a whole is not asked for twice as much.

What one of the two says for sure (bytes, a 404) ends the race; "unavailable" counts when both say so. So if the first
breaks just as the second is asked, the second's answer is the result. The loser writes nothing any more (`gate`) and
its connection is shut down. All of this is within one try of `retry`, under its deadline.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from typing import Generic, TypeVar

from deltashard_checkpoint.stores.abc import Buffer, ObjectInfo, Store, StoreUnavailable
from deltashard_checkpoint.stores.deadline import remaining_s, until
from deltashard_checkpoint.stores.gate import Gate, through

Result = TypeVar("Result")
Overdue = Callable[[threading.Event, float], bool]
"""(set when the read has ended, seconds) -> whether it has not by then."""
MULTIPLE = 3.0
SHORTEST_S = 1.0
FIRST_S = 5.0
"""A read without precedent gets this, and its size at `FIRST_BYTES_PER_S`."""
FIRST_BYTES_PER_S = 4.0 * 1024 * 1024
OUTCOMES = ("won", "lost", "failed", "refused")
"""Of second requests: its answer counted, the first's did, neither brought one, or it was not sent: too many were."""
_KNOWN = 64
_ENOUGH = 8
_GRACE_S = 30.0
"""Past the deadline the requests end by themselves; only then does waiting for them end."""


def _late(ended: threading.Event, seconds: float) -> bool:
    return not ended.wait(min(seconds, threading.TIMEOUT_MAX))


class Durations:
    """How long reads take, by size class (a factor of 4 wide; reads of an unknown size are one class). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, deque[float]] = {}

    def add(self, size_bytes: int, seconds: float) -> None:
        """A read of this size took so long."""
        with self._lock:
            self._known.setdefault(size_bytes.bit_length() // 2, deque(maxlen=_KNOWN)).append(seconds)

    def too_long_s(self, size_bytes: int) -> float:
        """When a read of this size has taken much longer than such reads do."""
        with self._lock:
            known = self._known.get(size_bytes.bit_length() // 2, ())
            if len(known) < _ENOUGH:
                return FIRST_S + size_bytes / FIRST_BYTES_PER_S
            return max(SHORTEST_S, MULTIPLE * statistics.median(known))


class _Race(Generic[Result]):
    """Up to two requests for the same; thread-safe."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.winner: Gate | None = None
        """Of the request whose answer, a result or an error, counts."""
        self._lock = threading.Lock()
        self._running = 1
        self._result: Result | None = None
        self._error: BaseException | None = None

    def enter(self) -> bool:
        """A second request begins, unless all is over."""
        with self._lock:
            if not self.ended.is_set():
                self._running += 1
                return True
            return False

    def answered(self, gate: Gate, result: Result | None, error: BaseException | None) -> None:
        """A request ended."""
        with self._lock:
            self._running -= 1
            if self.ended.is_set():
                return
            if self._error is None or not isinstance(error, StoreUnavailable):
                self._result, self._error = result, error  # of two that failed the first one says why
            if not isinstance(error, StoreUnavailable) or self._running == 0:
                self.winner = gate
                self.ended.set()

    @property
    def failed(self) -> bool:
        """Whether no request brought an answer."""
        return not self.ended.is_set() or isinstance(self._error, StoreUnavailable)

    def result(self) -> Result:
        """What the winner said; raises its error."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]  # the winner's


class HedgingStore(Store):
    """`inner`, whose `get` and `get_into` are hedged. `inner` must write what it receives by `gate.deliver` only."""

    def __init__(
        self,
        inner: Store,
        *,
        hedged: Callable[[str], None] = lambda _outcome: None,
        concurrent: int = 4,
        overdue: Overdue = _late,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hedged` hears of every second request: one of `OUTCOMES`."""
        self.inner = inner
        self.url = inner.url
        self.durations = Durations()
        self._hedged = hedged
        self._room = threading.BoundedSemaphore(concurrent)
        self._overdue = overdue
        self._clock = clock

    def get(self, key: str) -> bytes:
        """See `Store.get`."""

        def ask() -> bytes:
            return self.inner.get(key)

        return self._raced(0, ask, ask)

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        """See `Store.get_into`."""
        view = out.cast("B")

        def first() -> bytearray | None:
            self.inner.get_into(key, offset, view)
            return None

        def second() -> bytearray | None:
            spare = bytearray(len(view))
            self.inner.get_into(key, offset, memoryview(spare))
            return spare

        found = self._raced(len(view), first, second)
        if found is not None:
            view[:] = found

    def _raced(self, size_bytes: int, first: Callable[[], Result], second: Callable[[], Result]) -> Result:
        """What the winner says; neither request writes anything once this has returned."""
        race: _Race[Result] = _Race()
        mine, other = Gate(), Gate()
        asked = False
        try:
            self._start(race, mine, first, size_bytes)
            if self._overdue(race.ended, self.durations.too_long_s(size_bytes)):
                if not self._room.acquire(blocking=False):
                    self._hedged("refused")
                elif asked := race.enter():
                    self._start(race, other, second, size_bytes, done=self._room.release)
                else:
                    self._room.release()
            if not race.ended.wait(min(remaining_s() + _GRACE_S, threading.TIMEOUT_MAX)):
                raise StoreUnavailable("no answer, long after the deadline", where=self.url)
            return race.result()
        finally:
            mine.close()
            other.close()
            if asked:
                self._hedged("failed" if race.failed else "won" if race.winner is other else "lost")

    def _start(
        self,
        race: _Race[Result],
        gate: Gate,
        ask: Callable[[], Result],
        size_bytes: int,
        *,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        def work() -> None:
            begun_s = self._clock()
            result: Result | None = None
            error: BaseException | None = None
            try:
                with through(gate), until(lambda: gate.closed):
                    result = ask()
                self.durations.add(size_bytes, self._clock() - begun_s)
            except BaseException as caught:  # noqa: BLE001 - raised again where the result is asked for
                error = caught
            gate.carried_by(None)
            done()
            race.answered(gate, result, error)

        threading.Thread(target=copy_context().run, args=(work,), name="read", daemon=True).start()

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`."""
        self.inner.put_if_absent(key, data)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        return self.inner.list(prefix, start_after=start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        self.inner.delete(keys)

    def now_s(self) -> float:
        """See `Store.now_s`."""
        return self.inner.now_s()

    def close(self) -> None:
        """See `Store.close`."""
        self.inner.close()
