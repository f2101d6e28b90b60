"""Shared by the bench modules: rows of the table, recorded errors, resource use of a process, a MinIO to save to."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def compare_with(
    what: str, ours: float, peer: str, theirs: float, unit: str, bar: float | None = None
) -> Row:
    """Return a row of ours and a peer's value; `bar` is the minimum of theirs / ours."""
    row = {"what": what, "ours": ours, "unit": unit, "peer": peer, "theirs": theirs}
    return row | at_least(what, theirs / ours, bar)


def at_least(what: str, ratio: float, bar: float | None, **more: object) -> Row:
    return {"what": what, "ratio": ratio, "bar": bar, "met": None if bar is None else ratio >= bar, **more}


def limit(what: str, ours: float, unit: str, bar: float | None = None) -> Row:
    """Return a row with a value of ours; `bar` is its maximum."""
    met = None if bar is None else ours <= bar
    return {"what": what, "ours": ours, "unit": unit, "bar": bar, "met": met}


def log_progress(what: str) -> None:
    print(f"  {what} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def record_errors(errors: dict[str, str], what: str) -> Iterator[None]:
    """Record an error of the block in `errors`, so that the rest of the bench still runs."""
    try:
        yield
    except Exception as error:
        errors[what] = f"{type(error).__name__}: {error}"[:500]
        traceback.print_exc(limit=4)


def best_cpu_s(seconds: float, work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return this thread's processor seconds per call, the best of at least three alternating turns."""
    best = dict.fromkeys(work, float("inf"))
    for call in work.values():
        call()
    end, turns = time.perf_counter() + seconds, 0
    while turns < 3 or time.perf_counter() < end:
        for name, call in work.items():
            begun = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - begun)
        turns += 1
    return best


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int | str, kind: str) -> int:
    """Return a memory figure of a process by the kernel's name: VmRSS, VmHWM (its peak), RssAnon."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:")), 0)


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
