"""A real registry of images and charts on loopback, in memory; use as a context manager."""

from __future__ import annotations

import subprocess
from typing import Self

from tests.support.tool import built


class RegistryServer:
    """`address` is host:port."""

    address = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [str(built("registry"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
