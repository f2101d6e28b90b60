"""Shared by both demos' harnesses: a store to save into, waiting, and a stopped process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

from minio_server import minio_server
from rich.table import Table

T = TypeVar("T")
VERDICT = {True: "yes", False: "[bold red]NO[/]"}
STORES = ("file", "minio")
DEADLINE_S = 180.0
"""Limit without a step or a checkpoint: a machine that is busy with other work is slow, but makes progress."""


class DemoFailed(Exception):
    """An event that the demo waits for did not occur."""


def empty_store(kind: str, folder: Path, stack: contextlib.ExitStack) -> tuple[str, str]:
    """Yield (URL, display name) of an empty store, one of `STORES`; `stack` ends the server started for it."""
    if kind == "file":
        return f"file://{folder / 'store'}", "a directory (file://)"
    server = stack.enter_context(minio_server())
    os.environ.update(server.environment())
    return f"s3://{server.bucket}/demo", f"a real MinIO server at {server.endpoint}"


def until(
    what: str,
    found: Callable[[], T | None],
    *,
    progress: Callable[[], Hashable],
    is_finished: Callable[[], bool],
    logs: Callable[[], str],
    poll_s: float = 0.02,
    deadline_s: float = DEADLINE_S,
) -> T:
    """Wait for `found()`, as long as `progress()` changes every `deadline_s` and the run is not finished.

    Raises:
        DemoFailed: with `logs()`.
    """
    at, deadline = None, 0.0
    while True:
        ended = is_finished()
        value = found()
        if value:
            return value
        now_at = progress()
        if now_at != at:
            at, deadline = now_at, time.monotonic() + deadline_s
        if ended or time.monotonic() > deadline:
            raise DemoFailed(f"did not happen in time: {what}\n{logs()}")
        time.sleep(poll_s)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[int]:
    """Stop the process (SIGSTOP) inside the block; continue it afterwards if it still exists."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def make_table(title: str, columns: dict[str, bool], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(title=title)
    for name, number in columns.items():
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
