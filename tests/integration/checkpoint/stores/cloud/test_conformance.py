"""The store conformance suite on emulators of Google's and Azure's storage."""

from collections.abc import Iterator

import pytest
from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpoint.store_conformance import StoreTests
from tests.support.server.cloud_server import CloudServer


class TestGoogleStore(StoreTests):
    """The Google store below a prefix, with list pages of 1000 objects."""

    @pytest.fixture
    def store(self, google: CloudServer) -> Iterator[Store]:
        with open_store(google.url(google.new_bucket(), "some/prefix")) as store:
            yield store


class TestAzureStore(StoreTests):
    """The Azure store below a prefix. Azure's list pages of 5000 objects would take too long in Azurite."""

    listed_keys = 100

    @pytest.fixture
    def store(self, azure: CloudServer) -> Iterator[Store]:
        with open_store(azure.url(azure.new_bucket(), "some/prefix")) as store:
            yield store
