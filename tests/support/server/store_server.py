"""Server processes that hold a store, each on a free port, in its own directory, ended by its pid."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
import urllib3

from tests.support.eventually import eventually
from tests.support.server.port import free_port


class StoreServer(ABC):
    """One server process; it keeps its port over a restart."""

    health = "/"
    """A path that answers 200 once the server is ready; for "/" any answer counts."""
    url_scheme = "http"

    def __init__(self, directory: Path, *, host: str = "127.0.0.1", trusted: Path | None = None) -> None:
        """Create the server; `trusted` are the authorities that clients of a server with TLS trust."""
        self.directory, self.host, self.port = directory, host, 0
        self._process: subprocess.Popen[bytes] | None = None
        self._http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=5, read=60), retries=False, ca_certs=trusted and str(trusted)
        )

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line with the port to listen on."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Return the server's environment."""

    @abstractmethod
    def new_bucket(self) -> str:
        """Return a new bucket that only the caller uses."""

    def start(self) -> None:
        """Start and wait until it answers; try another port when the first was taken meanwhile."""
        for _ in range(5):
            self.port = self.port or free_port()
            if self._started():
                return
            self.port = 0
        text = (self.directory / "server.log").read_text()
        pytest.fail(f"it did not start:\n{text[-4000:]}", pytrace=False)

    def _started(self) -> bool:
        environment = {"HOME": str(self.directory), "PATH": os.environ.get("PATH", ""), **self.settings()}
        with (self.directory / "server.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.directory, env=environment,
                start_new_session=True,
            )  # fmt: skip

        def answers_or_exited() -> bool:
            if process.poll() is not None:
                return True
            try:
                place = f"{self.url_scheme}://{self.host}:{self.port}{self.health}"
                return self._http.request("GET", place).status == 200 or self.health == "/"
            except urllib3.exceptions.HTTPError:
                return False

        eventually(answers_or_exited, what=f"{type(self).__name__} ready")
        return process.poll() is None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        self._http.clear()
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # irrelevant to tests
            process.kill()
            process.wait(60)
