"""A program of the operator as a process: the common part of webhook and controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3
import yaml

from tests.support.operator import sample
from tests.support.server.apiserver import ApiServer, CertificateAuthority
from tests.support.server.port import free_port


@dataclass
class OperatorProcess:
    """A program as the chart runs it, on loopback; `start` and `stop` may repeat."""

    apiserver: ApiServer
    directory: Path
    host: str = "127.0.0.1"
    authority: CertificateAuthority = field(default_factory=CertificateAuthority)
    policy: dict[str, Any] = field(default_factory=lambda: sample.DEFAULTS)
    """The chart's default policy."""
    metrics_port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def run(self, *program: str, **flags: object) -> None:
        """Run the program with the flags, over those of every program."""
        self.metrics_port = free_port()
        (self.directory / "policy.yaml").write_text(yaml.safe_dump(self.policy))
        flags = {
            "host": self.host,
            "metrics_port": self.metrics_port,
            "certificate_dir": self.directory,
            "default_policy": self.directory / "policy.yaml",
            "kubeconfig": self.apiserver.kubeconfig,
        } | flags
        words = (f"--{key.replace('_', '-')}={value}" for key, value in flags.items())
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a plain page; status 0 without an answer."""
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with urllib3.PoolManager(retries=False, timeout=60.0) as http:
            try:
                host = f"[{self.host}]" if ":" in self.host else self.host
                reply = http.request("GET", f"http://{host}:{self.metrics_port}/{path}")
            except urllib3.exceptions.HTTPError:
                return 0, ""
            return reply.status, reply.data.decode()

    def metric(self, name: str, **labels: str) -> float | None:
        for line in self.get("metrics")[1].splitlines():
            if line.startswith(name + ("{" if labels else " ")) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        return None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.process = None
        return status
