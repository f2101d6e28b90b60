"""Kernels over many rows on as many threads as torch uses: they hold no interpreter lock.

Not torch's own threads: its pool waits at barriers for every core, and at a cut the sidecar is busy on some.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache

import torch

MAX_THREADS = 8
"""More do not read memory faster, and the training process has others to feed."""


def split(rows: int, max_extra_threads: int, work: Callable[[int, int], None], *, threads: int = 0) -> None:
    """Call `work(start, stop)` for ranges that cover [0, rows), on at most one thread more than it is `max_extra_threads`.

    `threads` at most; 0: as many as torch has.
    """
    threads = min(threads or torch.get_num_threads(), 1 + max_extra_threads)
    if threads < 2:
        work(0, rows)
        return
    edges = [rows * i // threads for i in range(threads + 1)]
    others = [_pool(threads - 1).submit(work, edges[i], edges[i + 1]) for i in range(1, threads)]
    try:
        work(edges[0], edges[1])
    finally:
        wait(others)  # also the one after one that failed: nobody writes any more when this returns
    for other in others:
        other.result()


def share(jobs: Sequence[Callable[[], None]]) -> None:
    """Run independent `jobs` on helper threads and on this one, which takes the next one whenever it has ended one.

    So it never waits longer than if it had run them all itself, however late the helpers come.
    """
    left = deque(jobs)

    def work() -> None:
        while True:
            try:
                job = left.popleft()
            except IndexError:
                return
            job()

    threads = min(max(torch.get_num_threads(), len(os.sched_getaffinity(0))), MAX_THREADS)
    others: list[Future[None]] = []
    with suppress(
        RuntimeError
    ):  # at interpreter exit no helpers are to be had: close() from atexit does it alone
        others.extend(_pool(threads - 1).submit(work) for _ in range(min(threads, len(jobs)) - 1))
    try:
        work()
    finally:
        for other in others:
            other.cancel()  # one that has not begun has nothing left to do
        wait(others)
    for other in others:
        if not other.cancelled():
            other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="deltashard-rows")
