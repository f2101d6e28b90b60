"""Structured logs: one JSON object a line on stderr, through structlog, with the run and the process in every line.

An event is a short name (`save.staged`, `restore.failed`); everything else is a key. Errors of ours log their what,
where and remedy; a traceback only for what no one foresaw. A line that cannot be written is lost, and nothing else is.

A child sidecar's stderr is a file in memory, `sidecar.log` in its runtime directory: `bound` moves it aside to
`sidecar.log.1` when it is large. A line that comes between the two is lost.
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
"""A log file is moved aside at this size; one older file is kept."""


def bound(path: Path, *, limit_bytes: int = LOG_BYTES) -> bool:
    """Begin a new log file when stderr is `path` and that has grown to the limit; whether it did."""
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
    return False  # a terminal, a container's pipe, somebody's file; or it goes on in the old one


class _Stderr:
    """Where lines go. Memory that is full, or a reader that is gone, must cost no save."""

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
    """What to log of an error: ours by its parts, others by type and text."""
    name = type(error).__name__
    if isinstance(error, DeltashardError):
        return {"error": name, "what": error.what, "where": error.where, "remedy": error.remedy}
    return {"error": name, "what": str(error)}
