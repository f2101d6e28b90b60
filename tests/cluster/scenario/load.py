"""A steady load of admissions: threads create annotated Jobs as dry runs, and count failures."""

from __future__ import annotations

import threading
import time
from typing import Self

import urllib3

from tests.cluster.kubernetes.api import ApiError, KubeApi, Object
from tests.cluster.kubernetes.process import wait_until
from tests.cluster.scenario.job import SIDECAR


class AdmissionLoad:
    """A context manager; `failures` lists refused Jobs, and Jobs admitted without the sidecar."""

    def __init__(
        self, api: KubeApi, namespace: str, manifest: Object, *, every_s: float = 0.1, threads: int = 2
    ) -> None:
        self._api = api
        self._path = f"/apis/batch/v1/namespaces/{namespace}/jobs?dryRun=All"
        self._manifest = manifest
        self._every_s = every_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        self._lock = threading.Lock()
        self.admitted = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join(60)

    def wait_more(self, count: int, *, timeout_s: float = 120.0) -> None:
        goal = self.admitted + count
        wait_until(
            lambda: self.failures or self.admitted >= goal,
            timeout_s=timeout_s,
            what=f"{count} more admissions",
        )

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            began_s = time.monotonic()
            failure = ""
            try:
                made = self._api.create(self._path, self._manifest)
                inits = made["spec"]["template"]["spec"].get("initContainers", ())
                if not any(each["name"] == SIDECAR for each in inits):
                    failure = "admitted without a sidecar"
            except (ApiError, urllib3.exceptions.HTTPError) as error:
                failure = str(error)
            with self._lock:
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                self.admitted += not failure
                self.failures += [failure] if failure else []
