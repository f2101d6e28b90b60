"""A sidecar with a trainer that has opened an attempt in it: the start of most tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer
from tests.support.sidecar_process import SidecarProcess, sidecar


@contextmanager
def training(root: Path, url: str, **flags: object) -> Iterator[tuple[SidecarProcess, Trainer]]:
    with sidecar(root, url, **flags) as process:
        trainer = Trainer(process.socket, FakeModel())
        trainer.open()
        yield process, trainer
        trainer.close()


def pod(workload: str = "w-1", **more: object) -> dict[str, Any]:
    """Return flags of a sidecar in a pod of this workload."""
    return {"run": "ns/job", "owner": "ns/job", "workload-uid": workload, "encoding": "fp32", **more}


def runtime_dir(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path
