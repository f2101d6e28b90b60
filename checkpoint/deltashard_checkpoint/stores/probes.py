"""Before a run trusts a store: can it write, read, list, delete, and create only what is absent?

A store that overwrites where it was asked to create only cannot tell two trainers apart, so it is refused at start,
not when the second trainer comes.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from deltashard_checkpoint.stores.abc import ConditionalPutUnsupported, ObjectExists, Store, StoreUnavailable

_TRIES = 5


def probe(store: Store, prefix: str = "probe") -> None:
    """Raises what is wrong: `AccessDenied`, `BucketMissing`, `ClockSkew`, `ConditionalPutUnsupported`, ...

    Writes one object of a random name under `prefix`, and deletes it.
    """
    for attempt in range(1, _TRIES + 1):
        key = f"{prefix}/{secrets.token_hex(16)}"
        try:
            store.put_if_absent(key, b"first")
            break
        except StoreUnavailable:
            if attempt == _TRIES:
                raise
    try:
        with suppress(ObjectExists):
            store.put_if_absent(key, b"second")
        if store.get(key) != b"first":
            raise ConditionalPutUnsupported(
                "the store overwrites objects that it was asked to create only if absent",
                where=store.url,
                remedy="use a store that honours If-None-Match on PUT: S3, or MinIO of 2024 or newer",
            )
        if [found.key for found in store.list(key)] != [key]:
            raise StoreUnavailable("the store does not list what was just put", where=f"{store.url}/{key}")
    finally:
        store.delete([key])
