"""Log, event, `doctor()` and metric report a due save that does not happen, with a real sidecar."""

from __future__ import annotations

import json
import logging
import urllib.request
from pathlib import Path

import pytest
import torch
from deltashard import SaveFailed
from deltashard.attach.launcher import runtime_dir
from deltashard.save.watchdog import MIN_BLOCKED_S
from deltashard_proto.block_reason import BlockReason

from tests.incidents.toys import ToyRun
from tests.support.eventually import eventually

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class WatchdogRun(ToyRun):
    """A run whose watchdog clock the test can advance."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.ahead_s = 0.0
        super().__init__(folder / "store", metrics_port=0, content_hash=False, grace_s=None, **options)
        real = self.ckpt._wiring.records.watchdog._now_s
        self.ckpt._wiring.records.watchdog._now_s = lambda: real() + self.ahead_s

    def advance(self, seconds: float) -> None:
        """Advance the time without a save and train, so that the watchdog checks."""
        self.ahead_s += seconds
        self.ckpt._clock.request_boundary()
        self.train()

    def blocked_s(self) -> float:
        ready = json.loads((runtime_dir(self.ckpt.url, self.name) / "ready.json").read_text())
        page = urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=60).read()
        (line,) = [
            each for each in page.decode().splitlines() if each.startswith("deltashard_save_blocked_seconds ")
        ]
        return float(line.split()[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    return tmp_path


def test_replaced_optimizer_is_reported_within_a_minute(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The program switches to its own optimizer, so that no given optimizer finishes a step any more."""
    with WatchdogRun(folder, every_steps=3) as run:
        run.train(2)
        run.save()
        given = run.tables, run.dense
        run.tables = torch.optim.SGD([run.model.items.weight], lr=0.1)
        run.dense = torch.optim.SGD(run.model.head.parameters(), lr=0.1)
        eventually(lambda: run.train() or run.ckpt._wiring.records.watchdog.blocked, what="a due save")
        assert not run.kinds("save_blocked")
        report = str(run.ckpt.doctor())
        assert "no step of an optimizer given to the Checkpointer" in report
        run.advance(MIN_BLOCKED_S + 1)
        (facts,) = run.kinds("save_blocked")
        assert facts["reason"] == BlockReason.ACCUMULATING
        assert facts["age_s"] > MIN_BLOCKED_S
        assert "after replacing one, build a new Checkpointer" in caplog.text
        assert "after replacing one, build a new Checkpointer" in str(run.ckpt.doctor())
        assert run.blocked_s() > MIN_BLOCKED_S
        run.advance(MIN_BLOCKED_S - 2)
        assert len(run.kinds("save_blocked")) == 1, "the next warning comes at twice the time"
        run.advance(10)
        assert len(run.kinds("save_blocked")) == 2
        run.tables, run.dense = given
        eventually(lambda: run.train() or run.ckpt._wiring.records.watchdog.blocked is None, what="a save")
        assert run.blocked_s() == 0


def test_unsavable_state_is_reported_as_reason(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each try fails in the program. The message does not promise a later save, and close() raises immediately."""
    held: dict[str, object] = {"epoch": 1}
    run = WatchdogRun(folder, every_steps=2, state={"progress": (lambda: dict(held), held.update)})
    with caplog.at_level(logging.WARNING):
        run.train(2)
        held["model"] = run.model
        eventually(lambda: run.train() or run.ckpt.stats.failures, what="a save that fails")
        failures = run.ckpt.stats.failures.total()
        assert "covers its rows" not in caplog.text
        run.advance(MIN_BLOCKED_S + 1)
        (facts,) = run.kinds("save_blocked")
        assert "state['progress']" in facts["message"]
        with pytest.raises(SaveFailed, match=r"is not durable.*state\['progress'\]"):
            run.ckpt.close(deadline_s=60)
    assert run.ckpt.stats.failures.total() <= failures + 4, "close() retries at most a few times"
