"""Runs kernels that release the GIL over many rows, on as many threads as torch uses.

Torch's own pool is not used: it waits at barriers for every core, and during a snapshot the sidecar occupies some.
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
"""More threads do not read memory faster, and would take cores from the rest of the training process."""


def split(rows: int, max_extra_threads: int, work: Callable[[int, int], None], *, threads: int = 0) -> None:
    """Call `work(start, stop)` for ranges that cover [0, rows), on at most `1 + max_extra_threads` threads.

    `threads` is another limit; 0: as many as torch has.
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
        wait(others)  # also after a failure: no thread writes after this returns
    for other in others:
        other.result()


def share(jobs: Sequence[Callable[[], None]]) -> None:
    """Run independent `jobs` on helper threads and on this one; each thread takes the next job when it is free.

    Therefore it takes no longer than running all jobs here, however late the helpers start.
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
    with suppress(RuntimeError):  # no helpers at interpreter exit: close() from atexit runs all jobs here
        others.extend(_pool(threads - 1).submit(work) for _ in range(min(threads, len(jobs)) - 1))
    try:
        work()
    finally:
        for other in others:
            other.cancel()  # a helper that has not started has nothing left to do
        wait(others)
    for other in others:
        if not other.cancelled():
            other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="deltashard-rows")
