"""A real sidecar and trainer with a goal: the interval follows the cost of saves and survives restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard_checkpoint.deciding.cost import KEY
from deltashard_checkpoint.deciding.interval import MIN_SAVES
from deltashard_checkpoint.deciding.record import Record, parse_metadata
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.v1 import fleet_pb2 as fleet
from torch import nn

from tests.support.eventually import eventually
from tests.support.server.fleet_server import FleetServer
from tests.support.sidecar_process import SidecarProcess, sidecar

# torch's own optimizers build sparse tensors without an explicit invariant check setting.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def flags(tmp_path: Path, server: FleetServer, **more: object) -> dict[str, Any]:
    return {
        **server.flags(tmp_path), "run": "r", "workload-uid": "w-1", "encoding": "fp32", "profile-key": "image on this machine", **more,
    }  # fmt: skip


class SmallTraining:
    """A small model that trains one step whenever the test checks a condition."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.EmbeddingBag(200, 8, sparse=True), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.ckpt = deltashard.Checkpointer(self.net, self.optimizer, grace_s=None, **options)
        self.ckpt.restore()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randint(200, (4, 3))).square().mean().backward()
        self.optimizer.step()
        self.ckpt.step()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def trained() -> object:
            self.step()
            return condition()

        eventually(trained, what=what)

    def drop(self) -> None:
        """End the program by an error, without further saves."""
        self.ckpt.__exit__(KeyboardInterrupt, None, None)


def decided(process: SidecarProcess) -> list[dict[str, object]]:
    return [each for each in process.events() if each["event"] == "interval.decided"]


def newest(url: str) -> Record:
    found = RunLog(open_store(url), "r").refresh().newest()
    return parse_metadata(found.metadata[KEY])


def decision(server: FleetServer) -> fleet.Decision:
    return server.last.run.decisions[0] if server.last.run.decisions else fleet.Decision()


def reported_interval_s(server: FleetServer) -> float:
    """Return the interval of the last report.

    It is read before the report's other fields, which may be newer and are never older.
    """
    return server.last.run.policy.every_s


def test_interval_choice_is_reported_and_adopted_after_restart(
    tmp_path: Path, url: str, server: FleetServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar measures first and then chooses the longest allowed interval. A restart does not measure again."""
    options = flags(tmp_path, server, goal="auto", every_s=0.1, max_interval_s=300, metrics_port=0)
    with sidecar(tmp_path, url, **options) as process:
        monkeypatch.setenv("DELTASHARD_SOCKET", str(process.socket))
        training = SmallTraining()
        # No step is trained meanwhile: the measurement needs saves, and there are none.
        eventually(lambda: "is being measured" in decision(server).why, what="the report of the measurement")
        assert decision(server).value == "every 0.1 s"
        training.until(lambda: reported_interval_s(server) == 300.0, "the chosen interval")
        shown = decision(server)
        assert (shown.goal, shown.value, shown.proposed) == ("auto", "every 300 s", "every 300 s")
        assert shown.bound == "not above 5 min (the longest that the user allows)"
        assert "a save costs" in shown.why
        assert server.last.run.measured.saves >= MIN_SAVES
        (line,) = decided(process)
        assert (line["cause"], line["interval"]) == ("measured", "every 300 s")
        page = process.metrics_page()
        assert 'deltashard_interval_seconds{which="effective"} 300.0' in page
        assert 'deltashard_intervals_decided_total{cause="measured"} 1.0' in page
        shows_interval = lambda: "every 300 s (goal auto)" in str(training.ckpt.doctor())  # noqa: E731
        training.until(shows_interval, "doctor() shows the interval")
        training.ckpt.save().wait(120)
        assert newest(url).held is not None
        assert newest(url).evidence.lossy == 0
        training.drop()
    server.reports.clear()
    again = tmp_path / "again"
    again.mkdir()
    with sidecar(again, url, **options) as process:
        monkeypatch.setenv("DELTASHARD_SOCKET", str(process.socket))
        training = SmallTraining()
        training.until(lambda: reported_interval_s(server) == 300.0, "the adopted interval")
        assert decision(server).value == "every 300 s"
        reasons = [decision.why for report in server.reports for decision in report.run.decisions]
        assert not any("is being measured" in why for why in reasons)
        assert server.last.run.measured.saves >= MIN_SAVES
        assert [each["event"] for each in process.events() if each["event"] == "profile.adopted"] != []
        assert "measured" not in {each["cause"] for each in decided(process)}
        training.ckpt.close()
        assert newest(url).closing
        assert newest(url).evidence.restores == pytest.approx(1.0, rel=1e-3)
        process.terminate()
