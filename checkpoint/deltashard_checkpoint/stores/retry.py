"""The only place that retries: every store is used through `RetryingStore`.

`StoreUnavailable` is retried after an exponential back-off with jitter, until the call's deadline or attempts are used
up or the caller has abandoned it (`deadline.abandon_when`). Then the last error is raised, with the store's message. A
call's deadline grows with the bytes it moves. All other errors are final and raised at once.

**`put_if_absent` is never retried.** After a lost acknowledgement a second try would find the key taken by the first.
Only the log can tell from the content whether that is success. An interrupted listing continues after its last key.

A read (`get`, `get_into`) tolerates a silence of `RetryPolicy.idle_timeout_s`, doubled after each try that timed out,
up to `deadline.IDLE_TIMEOUT_S`: a hung connection costs two seconds. The store remembers the silence that was needed,
or that a failed read reached, so a slow store is retried once, not for every read. Each read without a second try
reduces the remembered value by 2 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from deltashard_checkpoint.backoff import Backoff, Clocks
from deltashard_checkpoint.stores.abc import (
    QUIET_S,
    Buffer,
    ObjectInfo,
    RequestRefused,
    Store,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.deadline import (
    IDLE_TIMEOUT_S,
    deadline,
    idle_timeout,
    is_abandoned,
    remaining_s,
)

Result = TypeVar("Result")
BACKOFF = Backoff(first_s=0.1, longest_s=5.0)
_IDLE_TIMEOUT_DECAY = 0.98
"""Factor on the remembered silence after each read that needed no more."""
DELETE_BATCH = 1000
"""Keys per delete request: the limit of S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Deadlines and number of retries."""

    deadline_s: float = 60.0
    """Deadline of a call that moves no bytes."""
    slowest_bytes_per_s: float = 2.0 * 1024 * 1024
    """A call that moves n bytes has n / this seconds more."""
    attempts: int = 30
    """Maximum number of tries per call."""
    backoff: Backoff = BACKOFF
    """Pauses between tries."""
    idle_timeout_s: float = 2.0
    """A read without data for so long is retried, with twice this timeout."""

    def allowance_s(self, size_bytes: int) -> float:
        """Return the deadline of a call that moves `size_bytes`."""
        return self.deadline_s + size_bytes / self.slowest_bytes_per_s


class StoreObserver:
    """Hook for metrics and logs, called once per try and once per call; must not raise. This one does nothing."""

    def attempted(self, operation: str, seconds: float, error: Exception | None) -> None:
        """One try of `operation` (put, put_if_absent, get, get_into, head, list, delete, now) took `seconds`."""

    def finished(self, operation: str, seconds: float, size_bytes: int, error: Exception | None) -> None:
        """The whole call, tries and waits together; `size_bytes` moved when `error` is None."""


class RetryingStore(Store):
    """Wrapper of `inner` that retries by `policy`."""

    def __init__(
        self,
        inner: Store,
        *,
        policy: RetryPolicy | None = None,
        observer: StoreObserver | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.policy = policy or RetryPolicy()
        self.observer = observer or StoreObserver()
        self._clocks = clocks or Clocks()
        self._idle_timeout_s = self.policy.idle_timeout_s
        """Silence that recent reads needed."""

    def put(self, key: str, data: Buffer) -> None:
        size_bytes = memoryview(data).nbytes
        self._call("put", key, size_bytes, lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        size_bytes = memoryview(data).nbytes
        self._call("put_if_absent", key, size_bytes, lambda: self.inner.put_if_absent(key, data), attempts=1)

    def get(self, key: str) -> bytes:
        return self._call("get", key, 0, self._with_idle_timeout(lambda: self.inner.get(key)), sized=len)

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        self._call(
            "get_into",
            key,
            out.nbytes,
            self._with_idle_timeout(lambda: self.inner.get_into(key, offset, out)),
        )

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, 0, lambda: self.inner.head(key))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """The deadline bounds each silence, not the whole listing."""
        state = ResumedListing(lambda last: self.inner.list(prefix, start_after=last), start_after)
        while (found := self._call("list", prefix, 0, state.step)) is not None:
            yield found

    def delete(self, keys: Iterable[str]) -> None:
        left = iter(keys)
        while some := tuple(islice(left, DELETE_BATCH)):
            self._call("delete", some[0], 0, partial(self.inner.delete, some))

    def sweep(self, prefix: str, *, quiet_s: float = QUIET_S) -> int:
        return self._call("delete", prefix, 0, lambda: self.inner.sweep(prefix, quiet_s=quiet_s))

    def now_s(self) -> float:
        return self._call("now", "", 0, self.inner.now_s)

    def close(self) -> None:
        self.inner.close()

    def _with_idle_timeout(self, read: Callable[[], Result]) -> Callable[[], Result]:
        """Wrap `read` with an idle timeout for one call, doubled after each try that timed out."""
        idle_timeout_s = self._idle_timeout_s
        grown = False

        def attempt() -> Result:
            nonlocal idle_timeout_s, grown
            begun_s = self._clocks.monotonic_s()
            try:
                with idle_timeout(idle_timeout_s):
                    result = read()
            except StoreUnavailable:
                if (
                    self._clocks.monotonic_s() - begun_s >= 0.95 * idle_timeout_s
                ):  # timers fire a moment early
                    idle_timeout_s, grown = min(2 * idle_timeout_s, IDLE_TIMEOUT_S), True
                    # Now, not when a try succeeds: the deadline may end this call before that.
                    self._idle_timeout_s = max(self._idle_timeout_s, idle_timeout_s)
                raise
            if not grown:
                self._idle_timeout_s = max(
                    self.policy.idle_timeout_s, self._idle_timeout_s * _IDLE_TIMEOUT_DECAY
                )
            return result

        return attempt

    def _call(
        self,
        operation: str,
        key: str,
        size_bytes: int,
        attempt: Callable[[], Result],
        *,
        attempts: int | None = None,
        sized: Callable[[Result], int] | None = None,
    ) -> Result:
        limit = attempts or self.policy.attempts
        begun_s = self._clocks.monotonic_s()
        allowance_s = min(self.policy.allowance_s(size_bytes), remaining_s())
        failures = 0
        last_error: StoreUnavailable | None = None
        while True:
            try_begun_s = self._clocks.monotonic_s()
            left_s = allowance_s - (try_begun_s - begun_s)
            try:
                with deadline(left_s):
                    result = attempt()
            except StoreUnavailable as error:
                now_s = self._clocks.monotonic_s()
                self.observer.attempted(operation, now_s - try_begun_s, error)
                failures += 1
                delay_s = self.policy.backoff.delay_s(failures, self._clocks.uniform)
                spent_s = now_s - begun_s
                if last_error is None or spent_s < allowance_s:
                    last_error = error  # an error caused by the deadline says nothing about the store
                if failures < limit and spent_s + delay_s < allowance_s and not is_abandoned():
                    self._clocks.sleep(delay_s)
                    if not is_abandoned():
                        continue
                self.observer.finished(operation, spent_s, size_bytes, error)
                if limit == 1:
                    raise
                raise StoreUnavailable(
                    f"{operation} failed {failures} times in {spent_s:.1f} s, last: {last_error.what}",
                    where=last_error.where or f"{self.url}/{key}",
                    remedy=last_error.remedy or "is the store up and reachable?",
                ) from last_error
            except Exception as error:
                now_s = self._clocks.monotonic_s()
                self.observer.attempted(operation, now_s - try_begun_s, error)
                self.observer.finished(operation, now_s - begun_s, size_bytes, error)
                # IMPORTANT: every back-end is called here, and adds place and remedy to all errors.
                if isinstance(error, (OSError, ValueError)):
                    raise RequestRefused(
                        f"{operation} failed: {type(error).__name__}: {error}",
                        where=f"{self.url}/{key}",
                        remedy="check the store's URL and settings",
                    ) from error
                raise
            now_s = self._clocks.monotonic_s()
            self.observer.attempted(operation, now_s - try_begun_s, None)
            moved_bytes = sized(result) if sized else size_bytes
            self.observer.finished(operation, now_s - begun_s, moved_bytes, None)
            return result


class ResumedListing:
    """The objects that `opener(start_after)` lists, one per `step`."""

    def __init__(self, opener: Callable[[str], Iterator[ObjectInfo]], start_after: str) -> None:
        self._opener = opener
        self._last = start_after
        self._keys: Iterator[ObjectInfo] | None = None

    def step(self) -> ObjectInfo | None:
        """Return the next object; None at the end. After an error of the listing, the next step resumes it."""
        try:
            if self._keys is None:
                self._keys = self._opener(self._last)
            found = next(self._keys, None)
        except BaseException:
            self._keys = None
            raise
        if found is not None:
            self._last = found.key
        return found
