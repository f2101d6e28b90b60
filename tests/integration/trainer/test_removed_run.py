"""A run is removed under a real trainer: the trainer warns once, trains on, and its close() returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltashard.errors import SaveFailed
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_checkpoint.whole_run import removal

from tests.support.checkpointers import MakeCheckpointer, checkpointers
from tests.support.trainer.toy_loop import ToyLoop

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
FOREVER_S = 1e6
"""With this deadline, a close() that waits for it would never end within a test."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCheckpointer]:
    with checkpointers(tmp_path, monkeypatch, encoding="fp32") as build:
        yield build


def test_new_run_over_existing_data_warns(
    make: MakeCheckpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example an interrupted copy has no log yet. Training would silently start at step 0."""
    open_store(f"file://{tmp_path}/store", create=True).put(
        f"r/data/{1:020d}/{1:08d}/00000-{'a' * 16}-00000.pack", b"x"
    )
    ckpt = make(ToyLoop(), every_s=0)
    with caplog.at_level(logging.WARNING, "deltashard"):
        ckpt.restore()
    assert "starts without a log at a name that already has data" in caplog.text
    ckpt.close()
    caplog.clear()
    again = make(ToyLoop(), every_s=0)
    with caplog.at_level(logging.WARNING, "deltashard"):
        again.restore()
    assert "starts without a log" not in caplog.text
    again.close()


@pytest.mark.parametrize("notified", [True, False])
def test_training_continues_and_close_returns_after_removal(
    make: MakeCheckpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, notified: bool
) -> None:
    loop = ToyLoop()
    ckpt = make(loop, every_s=0)
    ckpt.restore()
    loop.train(2, ckpt)
    ckpt.save().wait(120)
    log = RunLog(open_store(f"file://{tmp_path}/store"), "r")
    removal.remove(log)
    loop.train(1, ckpt)
    if notified:
        with pytest.raises(SaveFailed, match="run 'r' was removed"):
            ckpt.save().wait(120)
        left = [info.key for info in log.store.list("")]
        loop.train(5, ckpt)
        with pytest.raises(SaveFailed, match="run 'r' was removed"):
            ckpt.save().wait(120)
    with caplog.at_level(logging.WARNING, "deltashard"), pytest.raises(SaveFailed) as raised:
        ckpt.close(deadline_s=FOREVER_S)
    assert f"step {8 if notified else 3} is not durable" in str(raised.value)
    assert "run 'r' was removed" in str(raised.value)
    assert "`deltashard rm " in str(raised.value)
    warnings = [record.getMessage() for record in caplog.records if "was removed" in record.getMessage()]
    assert len(warnings) == 1
    assert "saving stopped at step" in warnings[0]
    if notified:
        assert [info.key for info in log.store.list("")] == left
    removal.remove(log)
    assert list(log.store.list("")) == []
