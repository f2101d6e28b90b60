"""A disk of a few MiB that can be full: a separate tmpfs. It needs root, which CI containers have."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SmallDisk:
    """The capacity of a directory's file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fill(self) -> None:
        """Take the remaining space to the last block, as another user of a shared volume may."""
        with (self.root / "other").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(os.statvfs(self.root).f_frsize))
            except OSError:
                assert self.free_bytes == 0

    def empty(self) -> None:
        """Free the space that `fill` took."""
        (self.root / "other").unlink()

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", self.root], check=True)


@contextmanager
def small_disk(root: Path, *, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system of this size at `root` for the duration of the context."""
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "small", root], check=True)
    try:
        yield SmallDisk(root)
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)
