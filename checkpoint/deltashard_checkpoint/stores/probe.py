"""Before a run trusts a store: does it create only what is absent, and keep what it acknowledged?

A store that overwrites where it was asked to create cannot tell two trainers apart: both would believe that they won
one slot of the log. So it is refused before the first entry, not when the second trainer comes.
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
    """Whether this process has tried that the store creates only what is absent."""
    return store in _probed


def probe(store: Store, key: str, *, pause: Callable[[], bool] = lambda: False) -> None:
    """Try the store with one object at `key`, a name that is nobody else's; it is deleted again.

    `pause` waits before another try, or says that there is no time for one. Raises `ConditionalPutUnsupported`,
    `StoreUnavailable` when it did not answer until then, and whatever else it answers (`AccessDenied`, ...).
    """
    try:
        while True:
            try:
                _probe_once(store, key)
            except ObjectNotFound as error:
                if not pause():
                    raise StoreUnavailable("the store loses what it acknowledged", where=store.url) from error
            except StoreUnavailable:
                if not pause():
                    raise
            else:
                _probed.add(store)
                return
    finally:
        # A few bytes may stay behind; whoever may not delete here will hear of it from gc.
        with suppress(DeltashardError):
            store.delete([key])


def _probe_once(store: Store, key: str) -> None:
    for data in (_FIRST, _SECOND):
        with suppress(ObjectExists):  # of the first one, too: its acknowledgement was lost
            store.put_if_absent(key, data)
    found = store.get(key)
    if found not in {_FIRST, _SECOND}:
        raise StoreUnavailable("the store reads back neither of two objects that were put", where=store.url)
    if found == _SECOND:
        raise ConditionalPutUnsupported(
            "the store overwrites objects that it was asked to create only if absent",
            where=store.url,
            remedy="use a store that honours If-None-Match on PUT: S3, or MinIO of 2024 or newer",
        )
