"""Training on Google's and Azure's storage: after a save and a killed sidecar, a machine without local data resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.checkpointers import checkpointers
from tests.support.server.cloud_server import CloudServer
from tests.support.trainer.toy_loop import ToyLoop

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def test_another_machine_resumes_from_commit(
    cloud: CloudServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed state is exact. A save without a confirmed commit may also have succeeded."""
    options = {"url": cloud.url(cloud.new_bucket(), "runs"), "encoding": "fp32"}
    first, again = ToyLoop(seed=1), ToyLoop(seed=2)
    with checkpointers(tmp_path / "first", monkeypatch, **options) as make:
        ckpt = make(first)
        ckpt.restore()
        first.train(5, ckpt)
        ckpt.save().wait(120)
        saved = {5: first.table()}
        first.train(2, ckpt)
        ckpt.save()
        saved[7] = first.table()
        os.kill(ckpt.sidecar_pid, signal.SIGKILL)
    with checkpointers(tmp_path / "second", monkeypatch, **options) as make:
        ckpt = make(again)
        restored = ckpt.restore()
        assert restored.source == "store"
        assert all(map(torch.equal, again.table(), saved[restored.step]))
        again.train(1, ckpt)
        ckpt.close()
    with open_store(options["url"]) as store:
        assert RunLog(store, "r").refresh().newest().step == restored.step + 1
