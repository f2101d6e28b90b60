"""From a URL to a store: `s3://bucket/prefix`, `file:///dir` (or a plain path), `memory://name`.

An s3 URL may carry `?endpoint=http://127.0.0.1:9000&region=us-east-1`; without,
`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` and `AWS_REGION` decide as they do for other tools. Credentials
never stand in a URL.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retries import RetryingStore, RetryPolicy, StoreObserver

_FORMS = "use s3://bucket/prefix, file:///dir or memory://name"


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
    return RetryingStore(_open(url, create=create), policy=policy, observer=observer)


def _open(url: str, *, create: bool) -> Store:
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
    if parts.scheme == "memory":
        return MemoryStore.named((parts.netloc + parts.path).strip("/"))
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise BadStoreUrl(
                "file URL without an absolute path", where=url, remedy="use file:///absolute/dir"
            )
        return FileStore(unquote(parts.path), create=create)
    if parts.scheme == "s3":
        from deltashard_checkpoint.stores.s3 import S3Store

        query = dict(parse_qsl(parts.query))
        unknown = sorted(set(query) - {"endpoint", "region"})
        if unknown or not parts.netloc:
            what = f"unknown option {unknown[0]!r} in store URL" if unknown else "s3 URL without a bucket"
            raise BadStoreUrl(
                what, where=url, remedy="use s3://bucket/prefix?endpoint=https://host&region=name"
            )
        return S3Store(
            bucket=parts.netloc,
            prefix=unquote(parts.path).strip("/"),
            endpoint=query.get("endpoint"),
            region=query.get("region"),
        )
    raise BadStoreUrl(f"unknown kind of store {parts.scheme or url!r}", where=url, remedy=_FORMS)
