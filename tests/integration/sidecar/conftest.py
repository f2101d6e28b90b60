"""A sidecar of one test, and a trainer that has opened an attempt in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_model import Model
from tests.support.fake_trainer import Trainer
from tests.support.sidecar_process import SidecarProcess, sidecar


@pytest.fixture
def process(tmp_path: Path, url: str) -> Iterator[SidecarProcess]:
    with sidecar(tmp_path, url, encoding="fp32", metrics_port=0) as one:
        yield one


@pytest.fixture
def trainer(process: SidecarProcess) -> Iterator[Trainer]:
    one = Trainer(process.socket, Model())
    one.open()
    yield one
    one.close()
