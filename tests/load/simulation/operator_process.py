"""Webhook and controller as the chart's Deployments start them, as processes on loopback with their own accounts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import urllib3

from tests.load.simulation import control_plane, measure
from tests.load.simulation.control_plane import CONTROLLER, SYSTEM, WEBHOOK, ControlPlane
from tests.load.simulation.process import LoggedProcess, Usage
from tests.support.eventually import eventually
from tests.support.operator.webhook_process import PROGRAM
from tests.support.server.minio_server import free_port


class OperatorService:
    """A webhook or controller process with its plain port and its mounted files."""

    def __init__(self, plane: ControlPlane, name: str, *program: str, **flags: object) -> None:
        """Configure the service; `program` contains Python's arguments."""
        self.plane = plane
        self.name = name
        self.folder = plane.folder / name
        self.folder.mkdir()
        assert plane.mount("configmaps", "deltashard-default-policy", self.folder)
        self.metrics_port = free_port()
        options = {
            "host": "127.0.0.1",
            "metrics-port": self.metrics_port,
            "default-policy": self.folder / "policy.yaml",
            "kubeconfig": plane.apiserver.kubeconfig_of(SYSTEM, name, plane.folder),
            "certificate-dir": self.folder,
        } | {key.replace("_", "-"): value for key, value in flags.items()}
        self.process = LoggedProcess(
            name,
            [sys.executable, *program, *(f"--{key}={value}" for key, value in options.items())],
            folder=plane.folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"},  # as the chart sets it
        )
        self._http = urllib3.PoolManager(retries=False, timeout=20.0)

    def start(self) -> None:
        self.process.start()
        eventually(self.ready, what=f"{self.name} ready", timeout_s=control_plane.TIMEOUT_S)

    def ready(self) -> bool:
        self.process.check()
        self.plane.mount("secrets", "deltashard-tls", self.folder)
        return self.get("healthz")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a plain page; the status is 0 without a response."""
        try:
            reply = self._http.request("GET", f"http://127.0.0.1:{self.metrics_port}/{path}")
        except urllib3.exceptions.HTTPError:
            return 0, ""
        return reply.status, reply.data.decode()

    def metrics(self) -> str:
        status, text = self.get("metrics")
        assert status == 200, self.process.tail()
        return text

    def usage(self) -> Usage:
        return self.process.usage()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.stop(number)


class LoadWebhook(OperatorService):
    """One replica of the webhook behind the Service's name."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(
            plane,
            WEBHOOK,
            "-c",
            PROGRAM,
            port=plane.webhook_port,
            fleet_ca=plane.folder / WEBHOOK / "ca.crt",
            drain_s=0.5,
        )

    def start(self) -> None:
        eventually(
            lambda: self.plane.mount("configmaps", "deltashard-fleet-ca", self.folder),
            what="the authority",
            timeout_s=control_plane.TIMEOUT_S,
        )
        super().start()


class LoadController(OperatorService):
    """The controller in mode `builtin`."""

    def __init__(self, plane: ControlPlane) -> None:
        self.fleet_port = free_port()
        super().__init__(
            plane,
            CONTROLLER,
            "-m",
            "deltashard_operator.controller_main",
            fleet_port=self.fleet_port,
            namespace=SYSTEM,
            certificates="builtin",
        )

    def ready(self) -> bool:
        leads = measure.value(self.get("metrics")[1], "deltashard_controller_leading") == 1
        return leads and super().ready()

    def fleet_authority(self) -> str:
        folder: Path = self.folder / "fleet"
        eventually(
            lambda: self.plane.mount("configmaps", "deltashard-fleet-ca", folder),
            what="the fleet's authority",
            timeout_s=control_plane.TIMEOUT_S,
        )
        return (folder / "ca.crt").read_text()
