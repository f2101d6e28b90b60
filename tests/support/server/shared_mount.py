"""A directory as several clients of a shared file system show it, mounted by tools/shared-mount (FUSE, as root)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.tool import require_tool


def mount_error() -> str:
    """Return why this machine cannot mount; empty when it can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


class SharedMount:
    """One client's mount of `directory` at `mountpoint`, until `stop`."""

    def __init__(self, directory: Path, mountpoint: Path, *options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mountpoint.mkdir(parents=True)
        self.path = mountpoint
        command = [str(require_tool("shared-mount")), *options, str(directory), str(mountpoint)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "mounted\n"

    def signal(self, number: int) -> None:
        """Send a signal. SIGSTOP: calls wait in the kernel, as on a hard mount whose server is absent; SIGCONT ends that."""
        self._process.send_signal(number)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
