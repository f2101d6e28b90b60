"""The key-value store that the process group was made with, as the ranks use it to agree: puts, looks, compare-and-set.

Each thread has a connection of its own, since a store answers one call at a time. Nothing waits inside of it: torch
warns on stderr of every wait that ends without a key, so whoever waits looks again. The store may live in torchrun's
agent or in rank 0, and goes with it: then the group is about to end, and `GroupLost` is raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed import distributed_c10d

from deltashard.errors import GroupLost

_FAILURES: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    OSError,
)  # torch's DistStoreError is a RuntimeError


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raises `GroupLost` when the store, called within, does not answer."""
    try:
        yield
    except _FAILURES as error:
        raise GroupLost(
            f"the store of the process group does not answer: {str(error).splitlines()[0]}",
            where="torch.distributed",
            remedy="it ends with torchrun's agent, or with rank 0: start the group anew",
        ) from None


class GroupStore:
    """One thread's connection, under a prefix of keys; every call may raise `GroupLost`."""

    def __init__(self, prefix: str) -> None:
        with _translate_errors():
            # torch has no other way to the store of a group that the user made.
            default: Any = distributed_c10d._get_default_store()  # noqa: SLF001
            self._store: Any = distributed_c10d.PrefixStore(prefix, default.clone())

    def put(self, key: str, value: bytes) -> None:
        with _translate_errors():
            self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """What `key` was set to; None: nothing yet."""
        found = self.get_all([key])
        return None if found is None else found[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """What all of `keys` were set to; None: not all of them were."""
        with _translate_errors():
            if not self._store.check(list(keys)):
                return None
            if len(keys) > 1 and self._store.has_extended_api():
                return list(self._store.multi_get(list(keys)))
            return [self._store.get(key) for key in keys]

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        """What `key` was first set to, which is `value` if nobody did before."""
        with _translate_errors():
            # IMPORTANT: an expectation of "" means an absent key; with any other one an absent key is not set.
            found: bytes = self._store.compare_set(key, "", value)
            return found

    def delete(self, key: str) -> None:
        """Let `key` go; stores that cannot keep it."""
        with _translate_errors(), contextlib.suppress(NotImplementedError):
            self._store.delete_key(key)
