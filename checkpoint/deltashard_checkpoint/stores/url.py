"""From a URL to a store: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or a directory.

A directory is `file:///dir` or a plain path. What is said of a store beside its name are the URL's options, each a
word of its scheme (`OPTIONS`): `s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1`. Without, the
environment decides as it does for other tools: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` and `AWS_REGION`;
`AZURE_STORAGE_ACCOUNT_NAME`. Credentials never stand in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from deltashard_checkpoint.errors import UserError
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.key_rule import check_prefix
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.retry import RetryingStore, RetryPolicy, StoreObserver

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "s3": ("endpoint", "region", "addressing", "sse", "kms-key-id"),
    "gs": ("endpoint",),
    "az": ("endpoint", "account"),
}
"""What a URL may say beside the store's name, by its scheme."""
_FORMS = "use s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///dir or memory://name"
_FORM = {
    "s3": "use s3://bucket/prefix?endpoint=https://host:port&region=name",
    "gs": "use gs://bucket/prefix",
    "az": "use az://container/prefix?account=name",
}
_BUCKET = {
    "s3": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]", re.ASCII),
    "gs": re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII),
    "az": re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}", re.ASCII),
}
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}", re.ASCII)
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}", re.ASCII)


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


def local_path(text: str) -> Path:
    """The absolute path of a directory that was named as a shell would; raises `BadStoreUrl` for `~` without a home."""
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
        raise BadStoreUrl("store URL with a fragment", where=url, remedy=_FORMS)
    options = _options(parts, url)
    if parts.scheme == "memory":
        return MemoryStore.named((parts.netloc + parts.path).strip("/"))
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise BadStoreUrl(
                "file URL without an absolute path", where=url, remedy="use file:///absolute/dir"
            )
        return FileStore(unquote(parts.path), create=create)
    if parts.scheme in OPTIONS:
        return _in_bucket(parts, options, url)
    raise BadStoreUrl(f"unknown kind of store {parts.scheme or url!r}", where=url, remedy=_FORMS)


def _in_bucket(parts: SplitResult, options: Mapping[str, str], url: str) -> Store:
    form = _FORM[parts.scheme]
    if _BUCKET[parts.scheme].fullmatch(parts.netloc) is None:
        what = (
            f"{parts.netloc!r} cannot name a bucket"
            if parts.netloc
            else f"{parts.scheme} URL without a bucket"
        )
        raise BadStoreUrl(what, where=url, remedy=form)
    prefix = check_prefix(unquote(parts.path).strip("/"))
    for option, pattern, noun in (("region", _REGION, "region"), ("account", _ACCOUNT, "storage account")):
        if option in options and pattern.fullmatch(options[option]) is None:
            raise BadStoreUrl(f"{options[option]!r} cannot name a {noun}", where=url, remedy=form)
    if parts.scheme == "s3":
        from deltashard_checkpoint.stores.s3.encryption import encryption
        from deltashard_checkpoint.stores.s3.store import S3Store

        return S3Store(
            bucket=parts.netloc,
            prefix=prefix,
            endpoint=options.get("endpoint"),
            region=options.get("region"),
            addressing=_one_of("addressing", options, ("auto", "path", "virtual"), url),
            encryption=encryption(options.get("sse"), options.get("kms-key-id"), where=url),
        )
    from deltashard_checkpoint.stores.cloud.account import AzureAccount, GoogleAccount
    from deltashard_checkpoint.stores.cloud.store import CloudStore

    bare = f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/")
    account = (
        GoogleAccount(parts.netloc, endpoint=options.get("endpoint"), where=bare)
        if parts.scheme == "gs"
        else AzureAccount(
            parts.netloc, account=options.get("account"), endpoint=options.get("endpoint"), where=bare
        )
    )
    return CloudStore(account, url=bare, prefix=prefix)


def _one_of(name: str, options: Mapping[str, str], choices: Collection[str], url: str) -> str:
    value = options.get(name, "auto")
    if value not in choices:
        raise BadStoreUrl(f"{value!r} is no {name}", where=url, remedy=f"use one of {', '.join(choices)}")
    return value


def _options(parts: SplitResult, url: str) -> dict[str, str]:
    """The URL's options, each known, given once and not empty: one that is passed over in silence misleads."""
    known = OPTIONS.get(parts.scheme, ())
    remedy = f"{_FORM.get(parts.scheme, _FORMS)}; its options are {', '.join(known) or 'none'}"
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known or name in found or not value:
            trouble = "unknown option" if name not in known else "second" if name in found else "empty"
            raise BadStoreUrl(f"{trouble} {name!r} in store URL", where=url, remedy=remedy)
        found[name] = value
    return found
