"""The conformance suite on servers that speak as Google's and Azure's storage do."""

from collections.abc import Iterator

import pytest
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.store_conformance import StoreTests
from tests.support.server.cloud_server import CloudServer


class TestGoogleStore(StoreTests):
    """As everyone uses it, below a prefix; it lists in pages of 1000."""

    @pytest.fixture
    def store(self, google: CloudServer) -> Iterator[Store]:
        with open_store(google.url(google.new_bucket(), "some/prefix")) as store:
            yield store


class TestAzureStore(StoreTests):
    """The same; a page of Azure's has 5000, more than Azurite takes in a test's time."""

    listed_keys = 100

    @pytest.fixture
    def store(self, azure: CloudServer) -> Iterator[Store]:
        with open_store(azure.url(azure.new_bucket(), "some/prefix")) as store:
            yield store
