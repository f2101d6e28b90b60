"""From a URL to a store: `s3://bucket/prefix`, `file:///dir` (or a plain path), `memory://name`.

An s3 URL may carry `?endpoint=http://127.0.0.1:9000&region=us-east-1`; without,
`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` and `AWS_REGION` decide as they do for other tools. Credentials
never stand in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import parse_qsl, unquote, urlsplit

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.hedge import HedgingStore
from deltashard_checkpoint.stores.key_rule import check_prefix
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy, SilentObserver, StoreObserver

_FORMS = "use s3://bucket/prefix, file:///dir or memory://name"
_S3_FORM = "use s3://bucket/prefix?endpoint=https://host:port&region=name"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]", re.ASCII)
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", re.ASCII)


class BadStoreUrl(UserError):
    """A store URL that names no store."""


def open_store(
    url: str, *, policy: RetryPolicy | None = None, observer: StoreObserver | None = None, create: bool = True
) -> RetryingStore:
    """The store at `url`, with retries by `policy`; `create` false: a missing file:// directory is an error.

    Raises:
        BadStoreUrl: `url` is not one.
        BucketMissing: the directory does not exist and must not be made. Buckets are met at the first request.
    """
    observer = observer or SilentObserver()
    return RetryingStore(_open(url, create=create, observer=observer), policy=policy, observer=observer)


def _open(url: str, *, create: bool, observer: StoreObserver) -> Store:
    if url.startswith(("/", "./", "../", "~/")) or url in {".", ".."}:
        from pathlib import Path

        return FileStore(Path(url).expanduser(), create=create)
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.password is not None:
        raise BadStoreUrl(
            "a store URL must not hold credentials",
            where=f"{parts.scheme}://***@{parts.hostname or ''}{parts.path}",
            remedy="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or into a credentials file",
        )
    if parts.fragment:
        raise BadStoreUrl("store URL with a fragment", where=url, remedy=_FORMS)
    options = _options(parts.query, url, {"endpoint", "region"} if parts.scheme == "s3" else set())
    if parts.scheme == "memory":
        return MemoryStore.named((parts.netloc + parts.path).strip("/"))
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise BadStoreUrl(
                "file URL without an absolute path", where=url, remedy="use file:///absolute/dir"
            )
        return FileStore(unquote(parts.path), create=create)
    if parts.scheme == "s3":
        from deltashard_checkpoint.stores.s3.store import S3Store

        if _BUCKET.fullmatch(parts.netloc) is None:
            what = f"{parts.netloc!r} cannot name a bucket" if parts.netloc else "s3 URL without a bucket"
            raise BadStoreUrl(what, where=url, remedy=_S3_FORM)
        region = options.get("region")
        if region is not None and _REGION.fullmatch(region) is None:
            raise BadStoreUrl(f"{region!r} cannot name a region", where=url, remedy=_S3_FORM)
        store = S3Store(
            bucket=parts.netloc,
            prefix=check_prefix(unquote(parts.path).strip("/")),
            endpoint=options.get("endpoint"),
            region=region,
        )
        return HedgingStore(store, hedged=observer.hedged)
    raise BadStoreUrl(f"unknown kind of store {parts.scheme or url!r}", where=url, remedy=_FORMS)


def _options(query: str, url: str, known: Collection[str]) -> dict[str, str]:
    """The URL's options, each known, given once and not empty: one that is passed over in silence misleads."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known or name in found or not value:
            trouble = "unknown option" if name not in known else "second" if name in found else "empty"
            raise BadStoreUrl(f"{trouble} {name!r} in store URL", where=url, remedy=_S3_FORM)
        found[name] = value
    return found
