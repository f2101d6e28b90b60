"""A store in a directory: `file:///dir`, on a local disk or a shared file system.

Objects appear atomically, and survive a power failure once acknowledged: bytes are written to a temporary file in the
same directory and synced. The name is created last, by `link` (create-only: fails atomically if the name is taken, on
NFS too) or `rename` (overwrite); then the directory is synced. New directories are synced, too.

Listing walks one directory at a time in key order and enters only those that can contain results. Temporary files left
by a crash are not listed; `sweep` removes them, as does emptying their directory. A writer locks its temporary file
(`flock`) until the rename; without lock support an hour without a write decides. The clock is the file system's: the
mtime of the root after a touch. A key cannot be both an object and the "directory" of another key; no key of ours is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from deltashard_checkpoint.errors import CorruptObject, DeltashardError
from deltashard_checkpoint.stores.abc import (
    QUIET_S,
    AccessDenied,
    BucketMissing,
    Buffer,
    ConditionalPutUnsupported,
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    Store,
    StoreFull,
    StoreUnavailable,
    check_size,
)
from deltashard_checkpoint.stores.key_rule import TEMPORARY, BadKey, check_key, check_prefix

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_MAX_RACES = 16
"""How often a put recreates its directory after a concurrent deleter removed it as empty."""


class FileStore(Store):
    """Objects as files under `root`, which is created with `create`, and must exist otherwise.

    A root that cannot be created yet (no permission, no answer) is created by the first call that can. Until then each
    call raises the reason, like calls on an inaccessible bucket.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = Path(root).absolute()
        self.url = f"file://{self.root}"
        self._root_pending = create
        if create:
            with suppress(AccessDenied, StoreFull, StoreUnavailable):
                self._make_root()
        else:
            try:
                there = self.root.is_dir()
            except OSError as error:
                raise self._translated(error, "") from error
            if not there:
                raise BucketMissing(
                    "the store's directory does not exist",
                    where=self.url,
                    remedy="check the path, or create the directory",
                )

    def _make_root(self) -> None:
        """Create the root if it was requested and is still missing."""
        if not self._root_pending:
            return
        try:
            _make_directories(self.root)
        except FileExistsError as error:
            raise BucketMissing(
                "the store's path, or a parent of it, is not a directory",
                where=self.url,
                remedy="use a path to a directory",
            ) from error
        except OSError as error:
            raise self._translated(error, "") from error
        self._root_pending = False

    def put(self, key: str, data: Buffer) -> None:
        self._write(key, data, create_only=False)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._write(key, data, create_only=True)

    def _write(self, key: str, data: Buffer, *, create_only: bool) -> None:
        path = self._path(key)
        temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            if create_only and path.exists():
                raise ObjectExists("object exists", where=f"{self.url}/{key}")
            descriptor = self._open_new(temporary)
            try:
                try:
                    with suppress(OSError):
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _write_all(descriptor, memoryview(data).cast("B"))
                    os.fsync(descriptor)
                    if create_only:
                        self._link(temporary, path, key)
                    else:
                        # IMPORTANT: the rename is the commit point of an overwrite; before it the old object is intact.
                        temporary.rename(path)
                finally:
                    os.close(descriptor)
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()
            with suppress(FileNotFoundError):  # deleted already
                _sync_directory(path.parent)
        except (NotADirectoryError, IsADirectoryError) as error:
            raise BadKey(
                "in a directory store a key cannot be both an object and a prefix of others",
                where=f"{self.url}/{key}",
            ) from error
        except OSError as error:
            raise self._translated(error, key) from error

    def _open_new(self, path: Path) -> int:
        for _ in range(_MAX_RACES):
            with suppress(FileNotFoundError):
                return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            # IMPORTANT: the root is created once, when the store is opened, and never later. A root that vanished under
            # a living writer (a lost mount, a removed directory) has lost the objects on which the writer builds.
            if not self.root.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root))
            # The deleter was faster again: it removed the grandparent, or a concurrent writer created the directory.
            with suppress(FileNotFoundError, FileExistsError):
                _make_directories(path.parent)
        raise OSError(errno.ESTALE, "the directory was removed repeatedly while an object was written")

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        try:
            # IMPORTANT: link is the commit point of a create-only put: atomic, and rejected if the name is taken.
            os.link(temporary, path)
        except FileExistsError as error:
            # An NFS client repeats a request after a lost reply: the name is then taken by our own file.
            with suppress(FileNotFoundError):  # deleted since, but it was taken
                if path.samefile(temporary):
                    return
            raise ObjectExists("object exists", where=f"{self.url}/{key}") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise ConditionalPutUnsupported(
                "the file system cannot make hard links, so objects cannot be created only-if-absent",
                where=self.url,
                remedy="use a file system with hard links (ext4, xfs, NFS), or an s3:// store",
            ) from error

    def get(self, key: str) -> bytes:
        try:
            with self._path(key).open("rb") as file:
                check_size(os.fstat(file.fileno()).st_size, where=f"{self.url}/{key}")
                return file.read()
        except OSError as error:
            raise self._translated(error, key) from error

    def get_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        done = 0
        try:
            with self._path(key).open("rb", buffering=0) as file:
                while done < len(view):
                    count = os.preadv(file.fileno(), [view[done:]], offset + done)
                    if count == 0:
                        raise CorruptObject(
                            f"object ends {len(view) - done} bytes before offset {offset} + {len(view)}",
                            where=f"{self.url}/{key}",
                        )
                    done += count
        except OSError as error:
            raise self._translated(error, key) from error

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        try:
            status = path.stat()
        except OSError as error:
            raise self._translated(error, key) from error
        if not path.is_file():
            raise ObjectNotFound("no such object", where=f"{self.url}/{key}")
        return ObjectInfo(key=key, size_bytes=status.st_size, modified_at_s=status.st_mtime)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._make_root()
        if not self.root.is_dir():
            raise BucketMissing(
                "the store's directory does not exist", where=self.url, remedy="was it removed?"
            )
        directory, slash, _ = prefix.rpartition("/")
        return self._walk(directory + slash, prefix, start_after)

    def _walk(self, directory: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield objects under `directory` ('' or ending in '/') in key order, one directory in memory at a time."""
        try:
            with os.scandir(self.root / directory) as entries:
                # Sort as keys do: keys in a directory begin with its name and '/', and '-' sorts before '/'.
                names = sorted(
                    directory + entry.name + ("/" if entry.is_dir() else "")
                    for entry in entries
                    if not entry.name.startswith(TEMPORARY)
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._translated(error, directory) from error
        for name in names:
            if name.endswith("/"):
                if not (name.startswith(prefix) or prefix.startswith(name)):
                    continue
                if name < start_after and not start_after.startswith(name):
                    continue  # every key below sorts before start_after
                yield from self._walk(name, prefix, start_after)
            elif name.startswith(prefix) and name > start_after:
                with suppress(
                    ObjectNotFound, BadKey
                ):  # deleted since the directory was read, or not one of our keys
                    yield self.head(name)

    def delete(self, keys: Iterable[str]) -> None:
        parents: dict[Path, None] = {}
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                continue
            except IsADirectoryError:
                continue
            except OSError as error:
                raise self._translated(error, key) from error
            parents[path.parent] = None
        for parent in parents:
            with suppress(FileNotFoundError, NotADirectoryError):
                _sync_directory(parent)
                self._prune(parent)

    def _prune(self, directory: Path) -> None:
        """Remove `directory` and its parents up to the root, if empty except for files of dead writers."""
        while directory != self.root:
            try:
                for left in directory.iterdir():
                    if not left.name.startswith(TEMPORARY) or not self._abandoned(left, QUIET_S):
                        return
                    left.unlink()
                directory.rmdir()
            except OSError:
                return  # a writer arrived, or another deleter was faster
            directory = directory.parent

    def sweep(self, prefix: str, *, quiet_s: float = QUIET_S) -> int:
        check_prefix(prefix)
        self._make_root()
        swept = 0
        for name, _, files in os.walk(self.root / prefix, topdown=False):
            before = swept
            for left in (Path(name, file) for file in files if file.startswith(TEMPORARY)):
                with suppress(OSError):  # its writer finished it, or another sweep was faster
                    if self._abandoned(left, quiet_s):
                        left.unlink()
                        swept += 1
            if swept > before:
                self._prune(Path(name))
        return swept

    def _abandoned(self, path: Path, quiet_s: float) -> bool:
        """Return whether the writer of a temporary file is dead; raises `OSError` if the file is gone."""
        if quiet_s and self.now_s() - path.stat().st_mtime < quiet_s:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # no lock support
        finally:
            os.close(descriptor)
        return True

    def now_s(self) -> float:
        self._make_root()
        try:
            os.utime(self.root)
            return self.root.stat().st_mtime
        except OSError as error:
            raise self._translated(error, "") from error

    def _path(self, key: str) -> Path:
        self._make_root()
        return self.root / check_key(key)

    def _translated(self, error: OSError, key: str) -> DeltashardError:
        where = f"{self.url}/{key}"
        reason = error.strerror or str(error)
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            if not self.root.is_dir():
                return BucketMissing(
                    "the store's directory does not exist", where=self.url, remedy="was it removed?"
                )
            return ObjectNotFound("no such object", where=where)
        if error.errno in _FULL:
            return StoreFull(f"no room left: {reason}", where=where, remedy="free space, or raise the quota")
        if error.errno in _DENIED:
            return AccessDenied(
                reason,
                where=where,
                remedy=f"let user {os.geteuid()} read and write in the store's directory, on a mount that is not "
                "read-only",
            )
        return StoreUnavailable(f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {reason}", where=where)


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])


def _make_directories(directory: Path) -> None:
    """Create directories like `mkdir -p`, and sync the parent of each new one."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
