"""Check a store before a run uses it: create-only puts must fail on taken keys, and acknowledged objects must persist.

With a store that overwrites on create-only puts, two trainers would both win one slot of the log. So it is rejected
before the first entry, not when the second trainer arrives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress

from deltashard_checkpoint.errors import DeltashardError
from deltashard_checkpoint.stores.abc import (
    ConditionalPutUnsupported,
    ObjectExists,
    ObjectNotFound,
    Store,
    StoreUnavailable,
)

_FIRST, _SECOND = b"first", b"second"
_probed: weakref.WeakSet[Store] = weakref.WeakSet()


def is_probed(store: Store) -> bool:
    """Return whether this process has verified the store's create-only puts."""
    return store in _probed


def probe(store: Store, key: str, *, pause: Callable[[], bool] = lambda: False) -> None:
    """Probe the store with one object at `key`, which must be unique; the object is deleted afterwards.

    `pause` waits before another try, or returns False if no time is left. Raises `ConditionalPutUnsupported`,
    `StoreUnavailable` if the store does not answer in time, and other store errors (`AccessDenied`, ...).
    """
    try:
        while True:
            try:
                _probe_once(store, key)
            except ObjectNotFound as error:
                if not pause():
                    raise StoreUnavailable(
                        "the store has lost an acknowledged object", where=store.url
                    ) from error
            except StoreUnavailable:
                if not pause():
                    raise
            else:
                _probed.add(store)
                return
    finally:
        # A few bytes may be left; gc reports a missing permission to delete.
        with suppress(DeltashardError):
            store.delete([key])


def _probe_once(store: Store, key: str) -> None:
    for data in (_FIRST, _SECOND):
        with suppress(ObjectExists):  # for the first put, too: its acknowledgement was lost
            store.put_if_absent(key, data)
    found = store.get(key)
    if found not in {_FIRST, _SECOND}:
        raise StoreUnavailable("the store returns neither of two objects that were put", where=store.url)
    if found == _SECOND:
        raise ConditionalPutUnsupported(
            "the store overwrites objects on create-only puts",
            where=store.url,
            remedy="use a store that honours If-None-Match on PUT: S3, or MinIO of 2024 or newer",
        )
