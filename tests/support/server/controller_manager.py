"""Some of kube-controller-manager's controllers, for an `ApiServer`; use as a context manager."""

from __future__ import annotations

import subprocess
from typing import Self

from tests.support.server.apiserver import ApiServer
from tests.support.server.port import free_port
from tests.support.tool import require_tool


class ControllerManager:
    """One process with the named controllers, ended by pid."""

    def __init__(self, apiserver: ApiServer, *controllers: str) -> None:
        self._flags = [
            str(require_tool("kubernetes") / "kube-controller-manager"),
            f"--kubeconfig={apiserver.kubeconfig}",
            f"--controllers={','.join(controllers)}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={apiserver.directory}",
        ]
        self._log = apiserver.directory / "controller-manager.log"

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._flags, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(15)
