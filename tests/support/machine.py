"""The timeout scale of tests on this machine.

Tests wait for conditions; a limit only separates "slow" from "never". Limits are written for an idle machine of two
good cores and multiplied by `timeout_scale()`, which is never less than `MIN_SCALE`: a longer wait costs nothing where
the condition becomes true. `DELTASHARD_TEST_TIMEOUT_SCALE` sets it.
"""

from __future__ import annotations

import functools
import os
import time

MIN_SCALE, MAX_SCALE = 3.0, 12.0
_VARIABLE = "DELTASHARD_TEST_TIMEOUT_SCALE"
_IDLE_S = 0.25
"""Duration of `_work` on the idle reference machine of the limits."""
_ROUNDS = 3


def _work() -> int:
    """Exercise Python and memory: a loop, and 256 MiB copied."""
    total = 0
    for number in range(600_000):
        total ^= number * number
    block = bytearray(32 << 20)
    for _ in range(8):
        total += len(bytes(block))
    return total


@functools.cache
def timeout_scale() -> float:
    """Return the factor of every limit; it is measured once, and processes started from here inherit it."""
    scale = os.environ.get(_VARIABLE)
    if scale is None:
        took_s = []
        for _ in range(_ROUNDS):
            began_s = time.perf_counter()
            _work()
            took_s.append(time.perf_counter() - began_s)
        waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
        scale = os.environ[_VARIABLE] = f"{MIN_SCALE * max(1.0, max(took_s) / _IDLE_S, waiting):.1f}"
    return min(max(float(scale), MIN_SCALE), MAX_SCALE)


def limit_s(seconds: float) -> float:
    return seconds * timeout_scale()
