"""Files and directories shared by processes of one user. Links and files of other users are rejected.

Other users may be able to write to a runtime directory (a pod's shared volume, /dev/shm). A link planted there must
not redirect a write, a lock or a truncation.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from deltashard_checkpoint.errors import UserError


class NotPrivate(UserError):
    """A file or directory that must be private is a link, has the wrong type, or belongs to another user."""


def _refused(path: Path, fault: str) -> NotPrivate:
    return NotPrivate(
        f"{path} {fault}",
        where="runtime directory",
        remedy="remove it: deltashard creates it again with the right owner",
    )


def open_private(path: Path, flags: int, mode: int = 0o600, *, owned: bool = True) -> int:
    """Open a regular file without following links, close-on-exec; with `owned`, this user must own it.

    Raises:
        NotPrivate: it is a link, has a second hard link, is not a regular file, or belongs to another user.
        OSError: as `os.open`.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "is a symbolic link") from None
        raise
    status = os.fstat(fd)
    fault = (
        "is not a regular file"
        if not stat.S_ISREG(status.st_mode)
        else "has another name besides this one"
        if status.st_nlink > 1
        else "belongs to another user"
        if owned and status.st_uid != os.geteuid()
        else ""
    )
    if fault:
        os.close(fd)
        raise _refused(path, fault)
    return fd


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically; a link at `path` is replaced, not followed."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, mode), "w") as file:
        file.write(text)
    temporary.replace(path)


def private_dir(path: Path) -> None:
    """Create a directory with mode 0700 and its parents, or check that an existing one is this user's.

    Raises:
        NotPrivate: it is a link, is not a directory, or belongs to another user.
        OSError: it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise _refused(path, "is not a directory") from None
        if status.st_uid != os.geteuid():
            raise _refused(path, "belongs to another user") from None
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o700)
