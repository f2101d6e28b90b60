"""Canonical JSON: one byte form per document, and a strict reader.

Sorted keys, no spaces, ASCII, finite numbers: equal documents have equal bytes, so a hash of the bytes identifies the
content. `load` accepts only this form, up to a size limit; `Reader` gives typed, bounded access to the content. Input
is untrusted: every rejection is a `CorruptObject`, and parsing cost is proportional to the input.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from deltashard_checkpoint.errors import CorruptObject

MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum size of a document; parsing rejects larger ones before it allocates memory."""
_MAX_INT = (1 << 63) - 1
_MAX_TEXT = 1 << 16


def canonical(document: Any) -> bytes:
    return json.dumps(
        document,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
        check_circular=False,
    ).encode("ascii")


def content_digest(data: bytes) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256, which name an object of the log by its content."""
    return hashlib.sha256(data).hexdigest()[:32]


def load(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object in canonical form; raises `CorruptObject` for any other bytes."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CorruptObject(f"{len(data)} bytes are too many (limit {MAX_DOCUMENT_BYTES})", where=where)
    try:
        document = json.loads(data.decode("ascii"), parse_constant=_refuse_constant)
        same = isinstance(document, dict) and canonical(document) == data
    except (ValueError, RecursionError, OverflowError) as error:
        raise CorruptObject(f"not canonical JSON: {str(error)[:200]}", where=where) from None
    if not same:
        raise CorruptObject("not a canonical JSON object", where=where)
    return cast("dict[str, Any]", document)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Reader:
    """Typed, bounded access to one JSON object: read each field once, then `end` rejects unread fields."""

    __slots__ = ("_left", "_object", "where")

    def __init__(self, document: Any, where: str) -> None:
        self.where = where
        if not isinstance(document, dict):
            self.fail("an object was expected")
        self._object: dict[str, Any] = document
        self._left = set(document)

    def fail(self, what: str) -> NoReturn:
        raise CorruptObject(f"log document is malformed: {what}", where=self.where)

    def take(self, key: str) -> Any:
        if key not in self._object:
            self.fail(f"{key!r} is missing")
        self._left.discard(key)
        return self._object[key]

    def has(self, key: str) -> bool:
        return key in self._object

    def optional(self, key: str) -> Any:
        self._left.discard(key)
        return self._object.get(key)

    def integer(self, key: str, *, low: int = 0) -> int:
        """Return an integer in [low, 2^63)."""
        return self.as_integer(self.take(key), key, low=low)

    def as_integer(self, value: Any, what: str, *, low: int = 0) -> int:
        if type(value) is not int or not low <= value <= _MAX_INT:
            self.fail(f"{what} is not an integer >= {low}")
        return value

    def nullable(self, key: str) -> int | None:
        value = self.take(key)
        return None if value is None else self.as_integer(value, key)

    def number(self, key: str) -> float:
        """Return a finite, non-negative number."""
        value = self.take(key)
        if type(value) not in (int, float) or not 0 <= value <= _MAX_INT:
            self.fail(f"{key} is not a number >= 0")
        return cast("float", value)

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if type(value) is not bool:
            self.fail(f"{key} is neither true nor false")
        return value

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a string of bounded length that matches the whole pattern."""
        return self.as_text(self.take(key), key, pattern)

    def as_text(self, value: Any, what: str, pattern: re.Pattern[str] | None = None) -> str:
        if type(value) is not str or len(value) > _MAX_TEXT or (pattern and not pattern.fullmatch(value)):
            self.fail(f"{what} is not a valid string")
        return value

    def items(self, key: str) -> Iterator[Any]:
        return iter(self.as_list(self.take(key), key))

    def as_list(self, value: Any, what: str, length: int | None = None) -> list[Any]:
        if type(value) is not list or (length is not None and len(value) != length):
            self.fail(f"{what} is not a valid list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self.as_text(item, key) for item in self.items(key))

    def members(self, key: str) -> Iterator[tuple[str, Any]]:
        """Return names and untyped values of an object."""
        value = self.take(key)
        if type(value) is not dict:
            self.fail(f"{key} is not an object")
        return ((self.as_text(name, key), held) for name, held in value.items())

    def mapping(self, key: str) -> dict[str, str]:
        return {name: self.as_text(text, f"{key}.{name[:40]}") for name, text in self.members(key)}

    def end(self) -> None:
        if self._left:
            self.fail(f"unknown fields {sorted(self._left)[:5]}")
