"""A user removes a run in use: the sidecar detects this at the next save, reports it, and stops writing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.whole_run import removal
from deltashard_checkpoint.whole_run.incomplete_state import IncompleteState, incomplete_state
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, same
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.sidecar.training import training
from tests.support.sidecar_process import SidecarProcess, sidecar


def removed(url: str) -> RunLog:
    log = RunLog(open_store(url), "run")
    removal.remove(log)
    assert keys(log) == []
    return log


def keys(log: RunLog) -> list[str]:
    return [info.key for info in log.store.list("run/")]


@pytest.mark.parametrize("url", ["file", "minio"], indirect=True)
def test_removed_run_is_detected_and_not_written(process: SidecarProcess, url: str) -> None:
    trainer = Trainer(process.socket, FakeModel())
    trainer.open()
    for _ in range(3):
        trainer.model.train()
        trainer.save_and_commit()
    log = removed(url)
    trainer.model.train()
    number = trainer.save()
    failure = eventually(lambda: trainer.failures.get(number))
    assert failure.cause == "removed"
    for part in ("run 'run' was removed", url.partition("?")[0], "`deltashard rm ", "restart"):
        assert part in failure.message
    left = keys(log)
    assert left
    assert all(key.startswith("run/data/") for key in left), "packs of the save in progress"
    assert incomplete_state(log.store, "run/") is IncompleteState.NO_LOG
    # Nothing more is written: no save, no closing marker, no maintenance. The trainer is not fenced.
    for urgent in (False, True):
        with pytest.raises(SaveStreamFailed, match="was removed"):
            trainer.begin(urgent=urgent)
    assert trainer.stub.Notify(pb.NotifyRequest(reason="eviction", deadline_s=9)).trainers == 0
    assert trainer.fenced == []
    assert 'deltashard_save_failures_total{cause="removed"} 3.0' in process.metrics_page(), (
        "the alert counts these failures"
    )
    assert keys(log) == left
    # A restarted trainer begins the run from the start, also after rm removed the rest.
    removal.remove(log)
    assert keys(log) == []
    trainer.close()
    again = Trainer(process.socket, FakeModel())
    assert not again.open().HasField("resume_seq")
    again.save_and_commit()
    restored = FakeModel()
    restored.wipe()
    other = Trainer(process.socket, restored)
    other.restore(other.open().resume_seq)
    assert same(restored.state(), again.model.state())
    other.close()


def test_restarted_sidecar_detects_removed_run(tmp_path: Path, url: str) -> None:
    """The new log handle never read the run, so the trainer's attempt does not exist in the log."""
    with sidecar(tmp_path, url, encoding="fp32") as process:
        trainer = Trainer(process.socket, FakeModel())
        trainer.open()
        trainer.save_and_commit()
        process.kill()
    log = removed(url)
    with sidecar(tmp_path, url, encoding="fp32") as process:
        eventually(lambda: trainer.gone)
        trainer.attach()
        number = trainer.save()
        assert eventually(lambda: trainer.failures.get(number)).cause == "removed"
        left = keys(log)
        with pytest.raises(SaveStreamFailed, match="was removed"):
            trainer.begin()
        assert keys(log) == left
        trainer.close()


def test_temporarily_empty_store_is_saved_to_again(tmp_path: Path) -> None:
    """A directory was mounted elsewhere, for example. The log is back, and nothing was removed."""
    url = f"file://{tmp_path}/store"
    with training(tmp_path, url, encoding="fp32") as (_, trainer):
        trainer.save_and_commit()
        shutil.move(tmp_path / "store/run", tmp_path / "elsewhere")
        number = trainer.save()
        assert eventually(lambda: trainer.failures.get(number)).cause == "removed"
        shutil.rmtree(tmp_path / "store/run")
        shutil.move(tmp_path / "elsewhere", tmp_path / "store/run")
        assert trainer.save_and_commit().seq == 3
