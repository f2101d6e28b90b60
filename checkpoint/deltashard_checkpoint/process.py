"""Process environment shared by all deltashard programs: listening sockets, open-file limit, version."""

from __future__ import annotations

import contextlib
import importlib.metadata
import resource
import socket

ANY_ADDRESS = "::"
"""Wildcard address for IPv4 and IPv6."""


def usable_host(host: str) -> str:
    """Return the address to bind: `::` becomes `0.0.0.0` if the kernel has no IPv6."""
    return "0.0.0.0" if host == ANY_ADDRESS and not socket.has_dualstack_ipv6() else host  # noqa: S104


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. `::` also accepts IPv4, which asyncio's own servers disable."""
    host = usable_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == ANY_ADDRESS)


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files (1,024 under containerd 2) to the hard limit: each connection needs a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # not permitted: keep the current limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def version() -> str:
    """Return the version of the installed distribution, or an empty string if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("deltashard")
    return ""
