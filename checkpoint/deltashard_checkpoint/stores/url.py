"""Open a store by URL: `s3://bucket/prefix`, a directory, or a scheme registered by another package (`scheme`).

A directory is `file:///dir` or a plain path. Options of a scheme are given in the query:
`s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1`. Otherwise the environment decides, as for other
tools: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` and `AWS_REGION`. A URL never holds credentials.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.key_rule import check_prefix
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy, StoreObserver
from deltashard_checkpoint.stores.scheme import BadStoreUrl, Scheme, StoreUrl, registered, registered_names

_ANY = re.compile(".+")


def _s3(url: StoreUrl) -> Store:
    from deltashard_checkpoint.stores.s3.encryption import encryption
    from deltashard_checkpoint.stores.s3.store import S3Store

    options = url.options
    return S3Store(
        bucket=url.bucket,
        prefix=url.prefix,
        endpoint=options.get("endpoint"),
        region=options.get("region"),
        addressing=options.get("addressing", "auto"),
        encryption=encryption(options.get("sse"), options.get("kms-key-id"), where=url.text),
    )


_S3 = Scheme(
    form="use s3://bucket/prefix?endpoint=https://host:port&region=name",
    bucket=re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]", re.ASCII),
    options={
        "endpoint": _ANY,
        "region": re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", re.ASCII),
        "addressing": re.compile("auto|path|virtual"),
        "sse": _ANY,
        "kms-key-id": _ANY,
    },
    open=_s3,
)


def open_store(
    url: str, *, policy: RetryPolicy | None = None, observer: StoreObserver | None = None, create: bool = True
) -> RetryingStore:
    """Return the store at `url`, with retries by `policy`; `create` false: a missing file:// directory is an error.

    Raises:
        BadStoreUrl: `url` is invalid.
        BucketMissing: the directory does not exist and `create` is false. Buckets are checked by the first request.
    """
    return RetryingStore(_open(url, create=create), policy=policy, observer=observer)


def local_path(text: str) -> Path:
    """Return the absolute path of a directory in shell notation; raises `BadStoreUrl` for `~` without a home."""
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, ValueError, OSError) as error:
        raise BadStoreUrl(
            f"the store's path cannot be resolved: {error}",
            where=text,
            remedy="give an absolute path, or set HOME",
        ) from None


def _open(url: str, *, create: bool) -> Store:
    if url.startswith(("/", "./", "../", "~/")) or url in {".", ".."}:
        return FileStore(local_path(url), create=create)
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.password is not None:
        raise BadStoreUrl(
            "a store URL must not hold credentials",
            where=f"{parts.scheme}://***@{parts.hostname or ''}{parts.path}",
            remedy="put them into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or into a credentials file",
        )
    if parts.fragment:
        raise BadStoreUrl("store URL with a fragment", where=url, remedy=_forms())
    if parts.scheme == "memory" and not parts.query:
        return MemoryStore.named((parts.netloc + parts.path).strip("/"))
    if parts.scheme == "file" and not parts.query:
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise BadStoreUrl(
                "file URL without an absolute path", where=url, remedy="use file:///absolute/dir"
            )
        return FileStore(unquote(parts.path), create=create)
    scheme = scheme_of(parts.scheme)
    if scheme is None:
        what = (
            f"{parts.scheme} URL with options"
            if parts.scheme in {"memory", "file"}
            else f"unknown kind of store {parts.scheme or url!r}"
        )
        raise BadStoreUrl(what, where=url, remedy=_forms())
    return scheme.open(_parsed(parts, scheme, url))


def scheme_of(name: str) -> Scheme | None:
    return _S3 if name == "s3" else registered(name)


def _forms() -> str:
    others = "".join(f", {name}://bucket/prefix" for name in registered_names())
    return f"use s3://bucket/prefix{others}, file:///dir or memory://name"


def _parsed(parts: SplitResult, scheme: Scheme, url: str) -> StoreUrl:
    if scheme.bucket.fullmatch(parts.netloc) is None:
        what = (
            f"{parts.netloc!r} is not a valid bucket name"
            if parts.netloc
            else f"{parts.scheme} URL without a bucket"
        )
        raise BadStoreUrl(what, where=url, remedy=scheme.form)
    return StoreUrl(
        scheme=parts.scheme,
        bucket=parts.netloc,
        prefix=check_prefix(unquote(parts.path).strip("/")),
        options=options_of(parts.query, scheme, url),
        text=url,
    )


def options_of(query: str, scheme: Scheme, url: str) -> dict[str, str]:
    """Return the URL's options; raises for unknown, repeated and invalid ones instead of ignoring them."""
    remedy = f"{scheme.form}; its options are {', '.join(scheme.options)}"
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in scheme.options or name in found or not value:
            trouble = (
                "unknown option" if name not in scheme.options else "second" if name in found else "empty"
            )
            raise BadStoreUrl(f"{trouble} {name!r} in store URL", where=url, remedy=remedy)
        if scheme.options[name].fullmatch(value) is None:
            raise BadStoreUrl(f"{value!r} is not a valid {name}", where=url, remedy=scheme.form)
        found[name] = value
    return found
