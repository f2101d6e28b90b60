"""The parts that all scenarios share, built once: the cluster, a MinIO on its bridge, the chart installed by Helm.

The tests run in several processes at once (pytest-xdist's workers). The controlling process builds the stage before
the workers start and takes it down after they end; each worker attaches. A scenario that disturbs shared parts takes the
stage for itself (`exclusive`); the other scenarios share it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cluster.kubernetes import image
from tests.cluster.kubernetes.cluster import FOLDER, LocalCluster
from tests.cluster.kubernetes.host import HOST
from tests.cluster.scenario.system import ClusterRelease
from tests.support.server.minio_server import MinioServer

_FACTS = FOLDER / "stage.json"
_LOCK_FILE = FOLDER / "turns.lock"


class ClusterStage:
    """Cluster, store and system, between `build` and `tear_down`; `attach` from elsewhere."""

    def __init__(self) -> None:
        self.cluster = LocalCluster()
        self.minio: MinioServer
        self.system = ClusterRelease(self.cluster)
        self._scratch = Path(tempfile.mkdtemp(prefix="deltashard-stage-"))

    def build(self) -> None:
        began_s = time.monotonic()
        archive = image.build(self._scratch / "images.tar")
        timings = self.cluster.timings_s
        timings["images built"] = time.monotonic() - began_s
        self.cluster.up([archive])
        self.minio = MinioServer(self._scratch / "minio", host=HOST)
        self.minio.directory.mkdir()
        self.minio.start()
        self.cluster.register_process("minio", self.minio.pid)
        facts = {
            "port": self.minio.port,
            "access_key": self.minio.access_key,
            "secret_key": self.minio.secret_key,
        }
        _FACTS.write_text(json.dumps(facts))
        _LOCK_FILE.touch()
        self.system.install()
        timings["everything ready"] = time.monotonic() - began_s

    def attach(self) -> None:
        self.cluster.attach()
        facts = json.loads(_FACTS.read_text())
        self.minio = MinioServer(self._scratch, host=HOST)
        self.minio.port = facts["port"]
        self.minio.access_key, self.minio.secret_key = facts["access_key"], facts["secret_key"]

    def tear_down(self) -> list[str]:
        """End everything; return what could not be restored on the host (empty on success)."""
        with contextlib.suppress(AttributeError):  # the start did not get this far
            self.minio.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return self.cluster.down()


@contextlib.contextmanager
def hold_stage(*, exclusive: bool) -> Iterator[None]:
    with _LOCK_FILE.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield


def install_once(install: Callable[[LocalCluster, Path], None]) -> Callable[[LocalCluster, Path], None]:
    """Return `install` that runs once per cluster: concurrent calls in other processes wait for it."""

    @functools.wraps(install)
    def installed(cluster: LocalCluster, scratch: Path) -> None:
        with (FOLDER / f"{install.__module__}.{install.__name__}.installed").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not file.read():
                install(cluster, scratch)
                file.write("here")

    return installed
