"""The file store beyond the conformance suite: order of fsyncs, crashes, full disks, no path outside the root."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from deltashard_checkpoint.errors import CorruptObject
from deltashard_checkpoint.stores import file
from deltashard_checkpoint.stores.abc import (
    MAX_WHOLE_BYTES,
    AccessDenied,
    BucketMissing,
    ObjectNotFound,
    StoreFull,
    StoreUnavailable,
)
from deltashard_checkpoint.stores.file import FileStore
from deltashard_checkpoint.stores.key_rule import BadKey

from tests.support.checkpoint.store_conformance import get_range


def test_data_is_fsynced_before_rename(tmp_path, monkeypatch):
    """The order is fsync of the file, link or rename, fsync of the directory. A new directory also syncs its parent."""
    events, fsync, link, rename = [], os.fsync, os.link, Path.rename

    def synced(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"fsync {'dir ' + target.name if target.is_dir() else 'file'}")
        fsync(descriptor)

    store = FileStore(tmp_path / "store")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", lambda *paths: (events.append("link"), link(*paths)))
    monkeypatch.setattr(Path, "rename", lambda *paths: (events.append("rename"), rename(*paths))[1])
    store.put_if_absent("log/0", b"x")
    store.put("log/HINT", b"x")
    assert events[:4] == ["fsync dir store", "fsync file", "link", "fsync dir log"]
    assert events[4:] == ["fsync file", "rename", "fsync dir log"]


def test_stale_temporary_files_are_removed_with_their_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting the last object removes old temporary files and the directory. A recent one may have a live writer."""
    store = FileStore(tmp_path)
    store.put("data/1/a", b"x")
    leftover = tmp_path / "data" / "1" / f"{file.TEMPORARY}stale"
    leftover.write_bytes(b"half")
    store.delete(["data/1/a"])
    assert leftover.exists()
    store.put("data/1/a", b"x")
    os.utime(leftover, (1, 1))
    store.delete(["data/1/a"])
    assert list(tmp_path.iterdir()) == []


def test_put_survives_concurrent_directory_removal(tmp_path, monkeypatch):
    """The deletion of the last object removes parent directories at any instant of a put into a new directory."""
    store, made, pruned = FileStore(tmp_path), [], []
    real_path, real = Path.mkdir, os.mkdir
    (tmp_path / "data").mkdir()

    def prune(path, *arguments, **options):
        if path == tmp_path / "data" / "2" and not pruned:
            pruned.append(path)
            path.parent.rmdir()
        real_path(path, *arguments, **options)

    def mkdir_then_vanish(path, *arguments, **options):
        made.append(Path(path))
        if (
            len(made) == 1
        ):  # the directory existed when this put tried to make it, and is absent a moment later
            raise FileExistsError(errno.EEXIST, "it is there", str(path))
        real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", prune)
        store.put_if_absent("data/2/x", b"x")
    assert pruned
    monkeypatch.setattr(os, "mkdir", mkdir_then_vanish)
    store.put_if_absent("more/x", b"x")
    assert made == [tmp_path / "more"] * 2
    assert store.get("data/2/x") == store.get("more/x") == b"x"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EACCES, AccessDenied),
        (errno.EROFS, AccessDenied), (errno.EIO, StoreUnavailable), (errno.ESTALE, StoreUnavailable),
    ],
)  # fmt: skip
def test_os_errors_are_mapped(tmp_path, monkeypatch, code, expected):
    store = FileStore(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        with pytest.raises(expected, match=os.strerror(code)):
            store.put("a/b", b"x")
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(ObjectNotFound):
        store.get("a/b")


def test_missing_root_is_reported_until_created(tmp_path):
    """Each call reports the reason until one call makes the root. A root that vanishes later is not made again."""
    with pytest.raises(BucketMissing):
        FileStore(tmp_path / "no", create=False)
    (tmp_path / "file").touch()
    with pytest.raises(BucketMissing, match="not a directory"):
        FileStore(tmp_path / "file")
    (tmp_path / "mount").symlink_to("/sys/kernel")  # not even root can make a directory here
    store = FileStore(tmp_path / "mount" / "store")
    calls = (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.list(""), store.now_s)
    for call in calls:
        with pytest.raises(AccessDenied, match=f"mount/store/.* let user {os.geteuid()} read and write"):
            call()
    (tmp_path / "mount").unlink()
    (tmp_path / "mount").mkdir()
    store.put("a", b"x")
    shutil.rmtree(tmp_path / "mount" / "store")
    for call in calls:
        with pytest.raises(BucketMissing):
            call()


def test_foreign_file_names_and_directories_are_ignored(tmp_path):
    store = FileStore(tmp_path)
    store.put("log/1", b"x")
    (tmp_path / "log" / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "log" / "caf\u00e9").write_bytes(b"x")
    for key in ("log", "log/1/c"):
        with pytest.raises(BadKey, match="prefix of others"):
            store.put(key, b"y")
    assert [found.key for found in store.list("")] == ["log/1"]


def test_object_over_the_size_limit_is_not_read_whole(tmp_path: Path) -> None:
    """The size is checked before memory is allocated. A range of the object is still readable."""
    store = FileStore(tmp_path)
    store.put("huge", b"head")
    os.truncate(tmp_path / "huge", MAX_WHOLE_BYTES + 1)  # sparse
    with pytest.raises(CorruptObject, match=f"{MAX_WHOLE_BYTES + 1} bytes exceeds the limit of"):
        store.get("huge")
    assert get_range(store, "huge", 0, 4) == b"head"
