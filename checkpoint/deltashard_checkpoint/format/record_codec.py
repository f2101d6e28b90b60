"""Records as JSON objects: a table of fields defines how each is written and read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deltashard_checkpoint.format.canonical_json import Reader


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record; record and document use the same name."""

    read: Callable[[Reader, str], Any]
    """Raises `CorruptObject`."""
    write: Callable[[Any], Any] = _same
    omit_empty: bool = False
    """Whether an empty text is omitted from the document."""


INTEGER = Field(Reader.integer)
COUNT = Field(lambda r, key: r.integer(key, low=1))
NULLABLE = Field(Reader.nullable)
NUMBER = Field(Reader.number)
BOOLEAN = Field(Reader.boolean)
TEXT = Field(Reader.text)
TEXTS = Field(Reader.texts, list)
MAPPING = Field(Reader.mapping, dict)
INTEGERS = Field(lambda r, key: tuple(r.as_integer(item, key) for item in r.items(key)), list)

Fields = Mapping[str, Field]


def text(pattern: re.Pattern[str] | None = None, *, omit_empty: bool = False) -> Field:
    return Field(lambda r, key: r.text(key, pattern), omit_empty=omit_empty)


def list_of(read: Callable[[Reader, Any], Any], write: Callable[[Any], Any]) -> Field:
    """Return a field that holds a list of records, from the codec of one record."""
    return Field(
        lambda r, key: tuple(read(r, item) for item in r.items(key)),
        lambda held: [write(one) for one in held],
    )


def document(record: object, fields: Fields) -> dict[str, Any]:
    held = {name: (field, getattr(record, name)) for name, field in fields.items()}
    return {n: field.write(value) for n, (field, value) in held.items() if value or not field.omit_empty}


def values(r: Reader, fields: Fields) -> dict[str, Any]:
    """Return the record's values by name; raises `CorruptObject`."""
    return {n: f.read(r, n) if r.has(n) or not f.omit_empty else "" for n, f in fields.items()}
