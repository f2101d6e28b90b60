"""Ports for servers of tests: free, and reserved until this process ends.

A port that the kernel picks (by binding port 0) is free again until its server binds it, seconds later, and while that
server restarts. Another worker's server or an outgoing connection may take it meanwhile. So ports are taken from below
the kernel's ephemeral range, and a test process locks one byte of a file for each port, which the kernel unlocks when
the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import socket
import tempfile
from pathlib import Path

LOWEST, HIGHEST = 12_000, 30_000
"""The range is above the well-known ports of the cluster's programs and below NodePorts."""
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: set[int] = set()
"""Ports of this process: its own file locks do not exclude it."""


@functools.cache
def _ephemeral_start() -> int:
    """Return the first port that tests must not take: the kernel may pick it."""
    with contextlib.suppress(OSError):
        return max(min(int(RANGE.read_text().split()[0]), HIGHEST), LOWEST + 1000)
    return HIGHEST


@functools.cache
def _locks() -> int:
    # Never closed: closing any descriptor of the file would drop all its locks.
    path = Path(tempfile.gettempdir()) / f"deltashard-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def free_port() -> int:
    """Return a loopback port that no process listens on, reserved for this process."""
    count = _ephemeral_start() - LOWEST
    first = secrets.randbelow(count)
    for n in range(count):
        port = LOWEST + (first + n) % count
        if port not in _reserved and _locked(port) and _unused(port):
            _reserved.add(port)
            return port
    raise AssertionError(f"no port is free from {LOWEST} to {_ephemeral_start()}")


def _locked(port: int) -> bool:
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
