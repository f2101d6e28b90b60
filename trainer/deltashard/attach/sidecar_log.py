"""What a sidecar's log says of its end. The log is a file in memory, which goes with the container: errors quote it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

TAIL_BYTES = 64 << 10
MAX_CHARS = 500
"""Characters of a line that are quoted."""
_ERROR_PATTERN = re.compile(r"(?P<what>.*?)(?: \[(?P<where>[^\]]*)\])?(?: -- (?P<remedy>.*))?")
"""The text of our errors, see `DeltashardError`."""


def size_of(path: Path) -> int:
    """Bytes that the log has now; 0: there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def lines_after(path: Path, offset: int) -> list[str]:
    """The last lines of the log that were written after `offset` bytes; of all of it, where a new file was begun."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(offset if offset <= size else 0, size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return []


def last_log_error(lines: list[str]) -> str:
    """What, where and remedy of the last line that tells of trouble; empty: none does."""
    for line in reversed(lines):
        said = _fields(line)
        if said is None:
            return line[-MAX_CHARS:]  # a traceback's end, or a crash's
        if said.get("level") in ("warning", "error", "critical"):
            told = [said[key] for key in ("what", "where", "remedy") if said.get(key)]
            return " -- ".join(told or [said.get("event", line)])[-MAX_CHARS:]
    return ""


def parse_error(line: str) -> dict[str, str]:
    """What, where and remedy of an error that a sidecar wrote, structured or as text."""
    if (said := _fields(line)) is not None:
        return {key: said.get(key, "") for key in ("what", "where", "remedy")}
    match = _ERROR_PATTERN.fullmatch(line.removeprefix("deltashard-sidecar: "))
    return match.groupdict(default="") if match else {"what": line, "where": "", "remedy": ""}


def _fields(line: str) -> dict[str, str] | None:
    with contextlib.suppress(ValueError, AttributeError):
        return {key: str(value) for key, value in json.loads(line).items()}
    return None
