"""What every program of deltashard asks of where it runs: addresses of both families, open files, its version."""

from __future__ import annotations

import contextlib
import importlib.metadata
import resource
import socket

ANY_ADDRESS = "::"
"""Every address of the machine, of IPv4 and IPv6."""


def usable_host(host: str) -> str:
    """The host to bind: `::` becomes `0.0.0.0` where the kernel has no IPv6."""
    return "0.0.0.0" if host == ANY_ADDRESS and not socket.has_dualstack_ipv6() else host  # noqa: S104


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; `::` takes IPv4, too, which asyncio's own servers turn off."""
    host = usable_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=host == ANY_ADDRESS)


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files, 1,024 under containerd 2, to the hard one; each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a kernel that says no leaves it as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def version() -> str:
    """Of the installed distribution; empty: it is not installed as one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("deltashard")
    return ""
