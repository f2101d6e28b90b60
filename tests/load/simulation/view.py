"""The output of `kubectl get checkpointruns --watch`, with times."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import urllib3

from tests.load.simulation import control_plane
from tests.load.simulation.control_plane import ControlPlane
from tests.support.eventually import eventually

PATH = "/apis/deltashard.io/v1alpha1/checkpointruns"


class RunWatcher:
    """Watches all CheckpointRuns, by the UID of their workload; use as a context manager."""

    def __init__(self, plane: ControlPlane) -> None:
        folder = plane.apiserver.directory
        self._url = plane.apiserver.url
        self._pool = urllib3.PoolManager(
            retries=False,
            timeout=urllib3.Timeout(connect=10.0, read=None),
            ca_certs=f"{folder}/ca.crt",
            cert_file=f"{folder}/admin.crt",
            key_file=f"{folder}/admin.key",
        )
        self._lock = threading.Lock()
        self._newest: dict[str, dict[str, Any]] = {}
        self._first_lost_s: dict[str, float] = {}
        self.changes = 0
        """The number of updates of all runs."""
        self._failure: Exception | None = None
        self._stopped = False
        self._response: urllib3.BaseHTTPResponse | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="runs")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        response = self._response
        if response is not None:
            response.shutdown()
        self._thread.join(30)
        self._pool.clear()

    def phases(self) -> Counter[str]:
        with self._lock:
            return Counter(status.get("phase", "") for status in self._newest.values())

    def status(self, workload_uid: str) -> dict[str, Any]:
        with self._lock:
            return self._newest[workload_uid]

    def lost_at_s(self, pod: str) -> float | None:
        """When a status first reported the loss of the pod, by the monotonic clock."""
        with self._lock:
            return self._first_lost_s.get(pod)

    def wait(self, condition: Callable[[Self], object], what: str, timeout_s: float) -> float:
        """Wait until the predicate holds for the watched state; returns the seconds waited."""
        begun_s = time.monotonic()

        def checked() -> object:
            if self._failure is not None:
                raise self._failure
            return condition(self)

        try:
            eventually(checked, what=what, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; runs: {dict(self.phases())}") from None
        return time.monotonic() - begun_s

    def training(self) -> int:
        return self.phases()["Training"]

    def wait_training(self, runs: int, timeout_s: float = control_plane.TIMEOUT_S) -> float:
        return self.wait(lambda view: view.training() == runs, f"{runs} runs training", timeout_s)

    def _run(self) -> None:
        try:
            version = self._list()
            while not self._stopped:
                version = self._watch(version)
        except Exception as error:
            if not self._stopped:
                self._failure = error

    def _list(self) -> str:
        page = self._pool.request("GET", f"{self._url}{PATH}").json()
        for item in page["items"]:
            self._apply(item)
        return page["metadata"]["resourceVersion"]

    def _watch(self, version: str) -> str:
        query = f"watch=1&allowWatchBookmarks=true&resourceVersion={version}"
        self._response = self._pool.request("GET", f"{self._url}{PATH}?{query}", preload_content=False)
        buffer = b""
        for chunk in self._response.stream(1 << 16):
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise RuntimeError(f"the watch of CheckpointRuns ended: {event['object']}")
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._apply(event["object"], deleted=event["type"] == "DELETED")
        return version

    def _apply(self, item: dict[str, Any], *, deleted: bool = False) -> None:
        uid = item["spec"]["workload"]["uid"]
        status = item.get("status") or {}
        with self._lock:
            self.changes += 1
            if deleted:
                self._newest.pop(uid, None)
                return
            self._newest[uid] = status
            for each in status.get("losses", ()):  # a Job's pods have generated names
                self._first_lost_s.setdefault(each["pod"], time.monotonic())
