"""Objects of a chain disappear during a run: the sidecar detects this before it commits a save that depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer
from tests.support.sidecar_process import sidecar


@pytest.mark.parametrize("url", ["file", "minio"], indirect=True)
@pytest.mark.parametrize("noticed_by", ["the last save", "maintenance"])
def test_missing_base_is_detected_and_next_save_is_baseline(
    tmp_path: Path, url: str, noticed_by: str
) -> None:
    maintenance_interval_s = 0.05 if noticed_by == "maintenance" else -1
    flags = {
        "encoding": "fp32",
        "differential": "consecutive",
        "maintenance_interval_s": maintenance_interval_s,
        "metrics_port": 0,
    }
    with sidecar(tmp_path, url, **flags) as process:
        trainer = Trainer(process.socket, FakeModel())
        trainer.open()
        base = trainer.save_and_commit()
        trainer.model.train()
        assert not trainer.save_and_commit().baseline
        log = RunLog(open_store(url), "run")
        prefix = log.refresh().checkpoints[base.seq].parts[0].prefix
        log.store.delete([info.key for info in log.store.list(f"run/{prefix}") if info.key.endswith(".pack")])
        trainer.model.train()
        commits = []
        if noticed_by == "maintenance":
            # Its commit makes the check due. On a slow machine the second save's check detects it.
            commits.append(trainer.save_and_commit())
            eventually(lambda: "deltashard_chain_broken_total 1.0" in process.metrics_page())
        else:
            number = trainer.save(reason="close")
            failure = eventually(lambda: trainer.failures.get(number))
            assert failure.cause == "abandoned"
            assert "the next save is a baseline" in failure.message
            assert prefix in failure.message
        trainer.model.train()
        commits.append(trainer.save_and_commit())
        assert [each.baseline for each in commits].count(True) == 1
        trainer.close()
        again = Trainer(process.socket, FakeModel())
        again.assert_restores(again.open().resume_seq, trainer.model.state())
        again.close()
