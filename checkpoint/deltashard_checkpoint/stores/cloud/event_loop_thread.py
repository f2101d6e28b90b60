"""Run requests of an asynchronous client from threads, each bounded by its caller's deadline.

A request runs on one event loop, in the caller's context, so `deadline`, `idle_timeout` and `abandon_when` apply. The
calling thread waits, and cancels the request when no time remains. It then waits until the client has released a
borrowed buffer, because until then the memory could still be sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextvars import copy_context
from typing import Any, TypeVar

from deltashard_checkpoint.stores.abc import StoreUnavailable
from deltashard_checkpoint.stores.deadline import idle_timeout_s, remaining_s

Result = TypeVar("Result")
_DEADLINE_PASSED = "the call's deadline passed"
_POLL_S = 0.25
"""How often a waiting thread checks whether its caller has abandoned the request."""
_RELEASE_S = 60.0
"""Bound of the wait for a buffer, which a cancelled request normally releases at once."""


class EventLoopThread:
    """An event loop on its own thread, started by the first request; thread-safe; not to be used across a fork."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Return or raise the result of the coroutine from `work`; `StoreUnavailable` if no time remained for it."""
        loop = self._ensure_loop()
        answer: Future[Result] = Future()
        task: list[asyncio.Task[Any]] = []

        async def run_task() -> None:
            try:
                result = await work()
            except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
                answer.set_exception(error)
            else:
                answer.set_result(result)

        def begin() -> None:
            task.append(loop.create_task(run_task(), context=context))

        def cancel() -> None:
            loop.call_soon_threadsafe(lambda: [each.cancel() for each in task])

        context = copy_context()
        loop.call_soon_threadsafe(begin)
        try:
            return self._wait(answer, cancel)
        except KeyboardInterrupt:
            cancel()
            raise

    def _wait(self, answer: Future[Result], cancel: Callable[[], None]) -> Result:
        out_of_time = False
        while not wait([answer], _RELEASE_S if out_of_time else min(_POLL_S, remaining_s())).done:
            if out_of_time:
                raise StoreUnavailable("a cancelled request does not end", where=self._where)
            if remaining_s() <= 0:
                out_of_time = True
                cancel()
        try:
            return answer.result()
        except asyncio.CancelledError:
            why = _DEADLINE_PASSED if out_of_time else "the store was closed"
            raise StoreUnavailable(why, where=self._where) from None

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="store", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Stop the loop and cancel running requests."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return

        async def end() -> None:
            others = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await loop.shutdown_asyncgens()

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(_RELEASE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_RELEASE_S)
        if not thread.is_alive():
            loop.close()


async def with_timeout(step: Awaitable[Result], longest_s: float, what: str, where: str) -> Result:
    """Await `step`; `StoreUnavailable` after `longest_s` or the idle timeout of a read."""
    try:
        async with asyncio.timeout(idle_timeout_s(longest_s)):
            return await step
    except TimeoutError:
        raise StoreUnavailable(what if remaining_s() > 0 else _DEADLINE_PASSED, where=where) from None


async def wait_released(view: memoryview, where: str) -> None:
    """Wait until a borrowed view is released; raises `StoreUnavailable` if it is not."""
    ends_at_s = time.monotonic() + _RELEASE_S
    pause_s = 0.0
    while True:
        try:
            view.release()
        except BufferError:
            if time.monotonic() > ends_at_s:
                raise StoreUnavailable("the client does not let go of a buffer", where=where) from None
            with contextlib.suppress(asyncio.CancelledError):  # must not be interrupted
                await asyncio.sleep(pause_s)
            pause_s = min(0.05, pause_s * 2 + 0.0005)
        else:
            return
