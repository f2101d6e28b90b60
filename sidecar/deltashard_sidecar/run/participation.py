"""The newest attempt that trainers of this pod took part in, kept across restarts of the sidecar.

The log records which pod opened an attempt, which is rank 0's. After the next rendezvous rank 0 may be in another pod:
one that opened an earlier attempt, had another rank since, and opens again. This record proves that the pod was not
superseded in between, but took part. The file is on the pod's disk next to the cache, and is removed with the pod.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from deltashard_sidecar.telemetry.structured_logging import Logger

FILE = "participation.json"


class Participation:
    """Attempts of this pod's trainers. Thread-safe."""

    def __init__(self, folder: Path | None, log: Logger) -> None:
        self._path = None if folder is None else folder / FILE  # None: not needed outside of a cluster
        self._logger = log
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}
        if self._path is not None:
            try:
                found = json.loads(self._path.read_text())
                self._newest = {str(run): int(attempt) for run, attempt in found.items()}
            except (OSError, ValueError, AttributeError, TypeError) as error:
                if not isinstance(error, FileNotFoundError):
                    log.warning("participation.read_failed", error=str(error)[:200])

    def newest(self, run: str) -> int:
        with self._lock:
            return self._newest.get(run, 0)

    def record(self, run: str, attempt: int) -> None:
        with self._lock:
            if attempt <= self._newest.get(run, 0):
                return
            self._newest = {run: attempt}  # a pod trains one run
            if self._path is None:
                return
            try:
                scratch = self._path.with_suffix(".new")
                scratch.write_text(json.dumps(self._newest))
                scratch.replace(self._path)
            except OSError as error:
                self._logger.warning("participation.write_failed", error=str(error)[:200])
