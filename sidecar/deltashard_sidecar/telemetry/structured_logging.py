"""Structured logs: one JSON object per line on stderr, by structlog, each with the run and the process id.

An event is a short name (`save.staged`, `restore.failed`) with further keys. A `DeltashardError` is logged with its
what, where and remedy; only unexpected errors have a traceback. A line that cannot be written is dropped.

The stderr of a child sidecar is the file `sidecar.log` in its runtime directory, which is in memory. `bound` renames it
to `sidecar.log.1` when it is large. A line written between rename and reopening is lost.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog
from deltashard_checkpoint.errors import DeltashardError

Logger = structlog.stdlib.BoundLogger
LOG_BYTES = 4 << 20
"""Size at which a log file is renamed; one older file is kept."""


def bound(path: Path, *, limit_bytes: int = LOG_BYTES) -> bool:
    """Start a new log file if stderr is `path` and has reached the limit; returns whether it did."""
    mine = os.fstat(2)
    with suppress(OSError):
        if mine.st_size >= limit_bytes and os.path.samestat(path.lstat(), mine):
            path.replace(path.with_name(f"{path.name}.1"))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
            fd, out = os.open(path, flags, 0o600), os.fstat(1)
            for number in (2, 1) if os.path.samestat(out, mine) else (2,):
                os.dup2(fd, number)
            os.close(fd)
            return True
    return False  # a terminal, a pipe, or another file; after an error the old file stays in use


class _Stderr:
    """Stream for log lines. Full memory or a closed pipe must not fail a save."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def configure(level: str, *, run: str) -> Logger:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
    )
    return cast("Logger", structlog.get_logger().bind(run=run, pid=os.getpid()))


def explain(error: BaseException) -> dict[str, str]:
    """Return the keys to log for an error: what, where and remedy of a `DeltashardError`, else type and text."""
    name = type(error).__name__
    if isinstance(error, DeltashardError):
        return {"error": name, "what": error.what, "where": error.where, "remedy": error.remedy}
    return {"error": name, "what": str(error)}
