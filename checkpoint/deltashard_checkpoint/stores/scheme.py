"""Schemes of store URLs: `s3` is core's; packages beside it register theirs as entry points of the group `GROUP`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import Store

GROUP = "deltashard.stores"


class BadStoreUrl(UserError):
    """A store URL that names no store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """What a URL says; bucket and options match their patterns."""

    scheme: str
    bucket: str
    prefix: str
    options: Mapping[str, str]
    text: str
    """The URL as it was given."""

    @property
    def bare(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A kind of store with buckets."""

    form: str
    """How to write such a URL, for messages."""
    bucket: re.Pattern[str]
    """Of its name."""
    options: Mapping[str, re.Pattern[str]]
    """What a URL may say beside the store's name, and what that looks like."""
    open: Callable[[StoreUrl], Store]
    """Makes the store; buckets are met at the first request."""


def registered(name: str) -> Scheme | None:
    for entry in entry_points(group=GROUP, name=name):
        found: Scheme = entry.load()
        return found
    return None


def registered_names() -> list[str]:
    return sorted(entry_points(group=GROUP).names)
