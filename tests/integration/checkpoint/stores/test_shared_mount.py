"""A store on a shared file system with several clients that cache attributes, like those of NFS."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.restore.open_checkpoint import OpenCheckpoint
from deltashard_checkpoint.stores.abc import ConditionalPutUnsupported, ObjectExists, ObjectNotFound, Store
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.probe import probe
from deltashard_checkpoint.write.attempt import open_attempt
from deltashard_checkpoint.write.fencing import FencedError

from tests.support.checkpoint.store_conformance import StoreTests
from tests.support.checkpoint.written_run import ITEMS, WrittenRun
from tests.support.server.shared_mount import SharedMount, mount_error

pytestmark = pytest.mark.skipif(bool(mount_error()), reason=mount_error())
Mounter = Callable[..., FileStore]
CACHED = ("-cache", "3")
"""Seconds of NFS's own shortest default."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Mounter]:
    """Mount the file system again and return the store on this mount."""
    mounts: list[SharedMount] = []

    def mount(*options: str) -> FileStore:
        mounts.append(SharedMount(tmp_path / "exported", tmp_path / f"client-{len(mounts)}", *options))
        return FileStore(mounts[-1].path / "store")

    yield mount
    for each in mounts:
        each.stop()


class TestSharedMount(StoreTests):
    """The conformance suite on a shared mount."""

    big_bytes = 3 * 1024 * 1024 + 13

    @pytest.fixture
    def store(self, client: Mounter) -> Store:
        return client(*CACHED)


def test_link_with_lost_reply_succeeds(client: Mounter) -> None:
    """The client repeats the link request and gets "exists" because its first request succeeded."""
    store = client("-repeat-links")
    store.put_if_absent("log/0", b"mine")
    assert store.get("log/0") == b"mine"
    with pytest.raises(ObjectExists):
        store.put_if_absent("log/0", b"another")


def test_file_system_without_hard_links_is_refused(client: Mounter) -> None:
    with pytest.raises(ConditionalPutUnsupported, match="hard links"):
        probe(client("-no-links"), "run/probe/0")


def test_slots_have_one_writer_each_over_two_clients(client: Mounter) -> None:
    """Each client looks a slot up first, so that it has cached the absence when the other client creates the slot."""
    clients = [client(*CACHED), client(*CACHED)]
    for number in range(20):
        key, won = f"log/{number}", []
        for store in clients:
            with pytest.raises(ObjectNotFound):
                store.get(key)
        for name, store in enumerate(clients):
            try:
                store.put_if_absent(key, b"client %d" % name)
            except ObjectExists:
                continue
            won.append(b"client %d" % name)
        assert len(won) == 1
        assert [store.get(key) for store in clients] == won * 2


def test_run_resumes_on_second_client_and_first_is_fenced(client: Mounter, tmp_path: Path) -> None:
    first, second = client(*CACHED), client(*CACHED)
    before = WrittenRun(first, "run", tmp_path / "first")
    baseline = before.save(step=1)
    newest = before.save(before.train(), step=2, covers=baseline)
    followed = RunLog(second, "run")
    resume = open_attempt(followed, owner="tests").resume
    assert resume is not None
    assert resume.seq == newest
    with pytest.raises(FencedError):
        before.save(before.train(), step=3, covers=newest)
    [restored] = OpenCheckpoint.of(second, followed.state, resume).tables([ITEMS])
    assert np.array_equal(restored.weights, before.saved[newest][0].weights)
    before.close()
