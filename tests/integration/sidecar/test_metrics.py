"""A sidecar's metrics port serves few series, and the sidecar works without it if the port is in use."""

from __future__ import annotations

import socket
from pathlib import Path

from deltashard_checkpoint.process import version
from deltashard_sidecar import main

from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import Trainer
from tests.support.sidecar_process import SidecarProcess, sidecar


def series(process: SidecarProcess) -> dict[str, str]:
    lines = [line for line in process.metrics_page().splitlines() if not line.startswith("#")]
    return dict(line.rsplit(" ", 1) for line in lines)


def test_run_exports_few_series(tmp_path: Path, url: str) -> None:
    """A sidecar without rank 0 serves a tenth of the series. Events that never happened have no series."""
    with sidecar(tmp_path, url, run="team/run", encoding="fp32", metrics_port=0) as process:
        fresh = series(process)
        assert fresh[f'deltashard_build_info{{component="sidecar",version="{version()}"}}'] == "1.0"
        second = Trainer(process.socket, FakeModel(), rank=1, world_size=2, attempt=1, layout="0" * 32)
        beside = series(process)
        assert beside.keys() - fresh.keys() == {'deltashard_trainer_step{rank="1",run="team/run"}'}
        assert len(beside) <= 8
        second.detach()
        second.close()
        first = Trainer(process.socket, FakeModel())
        first.open()
        assert len(series(process)) <= 50
        first.save_and_commit()
        found = series(process)
        assert found['deltashard_commits_total{kind="baseline"}'] == "1.0"
        assert found['deltashard_trainer_step{rank="0",run="team/run"}']
        first.close()


def test_occupied_metrics_port_disables_only_metrics(tmp_path: Path, url: str) -> None:
    """The program's own exporter may have the port when a sidecar restarts. The sidecar is healthy and saves."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with sidecar(tmp_path, url, encoding="fp32", metrics_port=port) as process:
            assert process.ready()["metrics_port"] is None
            assert main.health(["--socket", str(process.socket)]) == 0
            (line,) = [each for each in process.events() if each["event"] == "sidecar.metrics_unavailable"]
            assert line["where"] == f"127.0.0.1:{port}"
            trainer = Trainer(process.socket, FakeModel())
            trainer.open()
            trainer.save_and_commit()
            trainer.close()
