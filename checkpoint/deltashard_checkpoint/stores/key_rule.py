"""Rules for object keys that every store can hold and that cannot escape a store's root.

Keys are relative, '/'-separated, printable ASCII, at most `MAX_KEY_BYTES` long. Segments are not empty, `.` or `..`, at
most `MAX_SEGMENT_BYTES` long, and do not begin with `TEMPORARY` (the prefix of a file store's temporary files).
"""

from __future__ import annotations

import re

from deltashard_checkpoint.errors import UserError

MAX_KEY_BYTES = 800
"""S3 allows 1024; the rest is reserved for the store's prefix."""
MAX_SEGMENT_BYTES = 255
"""Longest file name of common file systems."""
TEMPORARY = ".tmp-"

_PRINTABLE = re.compile(r"[!-\[\]-~ ]*")


class BadKey(UserError):
    """A key or prefix that some store cannot hold, or that escapes the store's root."""


def check_key(key: str) -> str:
    """Return `key` if it is valid; raises `BadKey`."""
    segments = key.split("/")
    if "" in segments:
        raise BadKey("object key has an empty segment", where=repr(key))
    if segments[-1].endswith(" ") or segments[0].startswith(" "):
        raise BadKey("object key begins or ends with a space", where=repr(key))
    _check_common(key, segments)
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys may begin with it ('' and a trailing '/' are valid); raises `BadKey`."""
    segments = prefix.split("/")
    if "" in segments[:-1]:
        raise BadKey("key prefix has an empty segment", where=repr(prefix))
    _check_common(prefix, segments)
    return prefix


def _check_common(key: str, segments: list[str]) -> None:
    if not _PRINTABLE.fullmatch(key):
        raise BadKey("object key is not printable ASCII without backslash", where=repr(key))
    if len(key) > MAX_KEY_BYTES:
        raise BadKey(f"object key is longer than {MAX_KEY_BYTES} bytes", where=repr(key[:80] + "..."))
    for segment in segments:
        if segment in {".", ".."} or segment.startswith(TEMPORARY):
            raise BadKey(f"object key has the reserved segment {segment!r}", where=repr(key))
        if len(segment) > MAX_SEGMENT_BYTES:
            raise BadKey(
                f"object key has a segment longer than {MAX_SEGMENT_BYTES} bytes",
                where=repr(key[:80] + "..."),
                remedy="use a shorter name",
            )
