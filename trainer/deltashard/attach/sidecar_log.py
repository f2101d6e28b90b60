"""Reads the cause of a sidecar's end from its log, which is lost with the container, so that errors can quote it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

TAIL_BYTES = 64 << 10
MAX_CHARS = 500
"""Longest quoted line in characters."""
_ERROR_PATTERN = re.compile(r"(?P<what>.*?)(?: \[(?P<where>[^\]]*)\])?(?: -- (?P<remedy>.*))?")
"""Text format of `DeltashardError`."""


def size_of(path: Path) -> int:
    """Return the size of the log in bytes; 0 if it does not exist."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def lines_after(path: Path, offset: int) -> list[str]:
    """Return the last lines that were written after `offset` bytes, or of the whole file if it is a new one."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(offset if offset <= size else 0, size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return []


def last_log_error(lines: list[str]) -> str:
    """Return what, where and remedy of the last line that reports a problem; empty without one."""
    for line in reversed(lines):
        entry = _fields(line)
        if entry is None:
            return line[-MAX_CHARS:]  # the end of a traceback or of a crash report
        if entry.get("level") in ("warning", "error", "critical"):
            parts = [entry[key] for key in ("what", "where", "remedy") if entry.get(key)]
            return " -- ".join(parts or [entry.get("event", line)])[-MAX_CHARS:]
    return ""


def parse_error(line: str) -> dict[str, str]:
    """Return what, where and remedy of an error line, structured or plain text."""
    if (entry := _fields(line)) is not None:
        return {key: entry.get(key, "") for key in ("what", "where", "remedy")}
    match = _ERROR_PATTERN.fullmatch(line.removeprefix("deltashard-sidecar: "))
    return match.groupdict(default="") if match else {"what": line, "where": "", "remedy": ""}


def _fields(line: str) -> dict[str, str] | None:
    with contextlib.suppress(ValueError, AttributeError):
        return {key: str(value) for key, value in json.loads(line).items()}
    return None
