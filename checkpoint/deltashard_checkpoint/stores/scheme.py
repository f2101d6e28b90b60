"""Schemes of store URLs: `s3` is built in; other packages register theirs as entry points of the group `GROUP`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import Store

GROUP = "deltashard.stores"


class BadStoreUrl(UserError):
    """A store URL that is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """Parsed store URL; bucket and options match the scheme's patterns."""

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str]
    text: str
    """The original URL."""

    @property
    def bare(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A kind of store with buckets."""

    form: str
    """URL syntax, for messages."""
    bucket: re.Pattern[str]
    """Pattern of the bucket name."""
    options: Mapping[str, re.Pattern[str]]
    """URL options and their patterns."""
    open: Callable[[StoreUrl], Store]
    """Creates the store; the bucket is first contacted by a request."""


def registered(name: str) -> Scheme | None:
    for entry in entry_points(group=GROUP, name=name):
        found: Scheme = entry.load()
        return found
    return None


def registered_names() -> list[str]:
    return sorted(entry_points(group=GROUP).names)
