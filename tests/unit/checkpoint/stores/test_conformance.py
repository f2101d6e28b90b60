"""The conformance suite on the stores that need no server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.store_conformance import StoreTests


class TestMemoryStore(StoreTests):
    """The reference store."""

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestOpenedFileStore(StoreTests):
    """The file store with retries, as `open_store` returns it."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with open_store(f"file://{tmp_path}/store") as store:
            yield store
