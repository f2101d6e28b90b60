"""The probe refuses a store that overwrites, waits for a store that fails, and leaves no objects."""

import pytest
from deltashard_checkpoint.stores.abc import ConditionalPutUnsupported, StoreUnavailable
from deltashard_checkpoint.stores.memory import MemoryStore
from deltashard_checkpoint.stores.probe import probe

from tests.support.checkpoint.faulty_store import Fault, FaultyStore


def pauses(times: int):
    left = iter(range(times))
    return lambda: next(left, None) is not None


@pytest.mark.parametrize("operation", ["put_if_absent", "get"])
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST_ACK])
def test_lost_responses_are_retried(operation, fault):
    """The lost response is that of the first put, the second put or the read. An existing object is the probe's own."""
    for before in range(3):
        memory = MemoryStore()
        store = FaultyStore(memory)
        if before:
            store.fail_next(Fault.UNAVAILABLE, operation="put_if_absent", times=before)
        found = fault if operation == "put_if_absent" else Fault.UNAVAILABLE
        store.fail_next(found, operation=operation, times=2)
        probe(store, "probe/a", pause=pauses(20))
        assert list(memory.list("")) == []


def test_single_bit_flip_does_not_fail_the_probe():
    """Only the second object's bytes show an overwrite. Other bytes are read again, and repeated corruption is reported."""
    memory = MemoryStore()
    store = FaultyStore(memory)
    store.fail_next(Fault.FLIPPED, operation="get", times=2)
    probe(store, "probe/a", pause=pauses(3))
    assert list(memory.list("")) == []
    store.fail_next(Fault.FLIPPED, operation="get", times=4)
    with pytest.raises(StoreUnavailable, match="neither"):
        probe(store, "probe/a", pause=pauses(3))


def test_unsuitable_store_is_reported():
    store = MemoryStore()
    store.put_if_absent = store.put  # the store ignores If-None-Match
    with pytest.raises(ConditionalPutUnsupported, match="overwrites"):
        probe(store, "probe/a", pause=pauses(5))
    assert list(store.list("")) == []
    store.put_if_absent = lambda key, data: None
    with pytest.raises(StoreUnavailable, match="has lost an acknowledged object"):
        probe(store, "probe/a", pause=pauses(3))
    silent = FaultyStore(MemoryStore())
    silent.fail_next(Fault.UNAVAILABLE, operation="get", times=100)
    with pytest.raises(StoreUnavailable):
        probe(silent, "probe/a", pause=pauses(3))
