"""A store that has room for so many objects and no more."""

from collections.abc import Iterable

from deltashard_checkpoint.stores.abc import ObjectNotFound, StoreFull
from deltashard_checkpoint.stores.memory import MemoryStore


class SmallStore(MemoryStore):
    """In memory; an object that replaces another one needs a place of its own while it is written, as a file does."""

    room: int | None = None
    """Objects that may still be put; None: any number."""

    def _put(self, key: str, data: bytes, *, create_only: bool) -> None:
        if self.room is None:
            return super()._put(key, data, create_only=create_only)
        if self.room <= 0:
            raise StoreFull("no room left", where=f"{self.url}/{key}")
        known = self._knows(key)
        super()._put(key, data, create_only=create_only)
        self.room -= not known
        return None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self.room is not None and self._knows(key):
                self.room += 1
            super().delete([key])

    def _knows(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True
