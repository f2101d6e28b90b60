from __future__ import annotations
import os, signal, time
from pathlib import Path
import pytest
from tests.support.eventually import eventually
from tests.support.fake_model import Model, same
from tests.support.fake_trainer import SaveRefused, Trainer
from tests.support.sidecar_process import sidecar
from tests.support.sidecar.metric_page import blocks
from tests.support.sidecar.pod_flags import place, pod
from tests.support.server.fleet_server import Authority, FleetServer
from tests.support.server.shared_mount import SharedMount

def test_stall(tmp_path: Path) -> None:
    mount = SharedMount(tmp_path / "exported", tmp_path / "client", "-cache", "3")
    with FleetServer(Authority()) as server, sidecar(tmp_path, f"file://{mount.path}/store", **(pod(**server.flags(tmp_path)) | {"encoding": "fp32", "metrics_port": 0, "save_deadline_s": 20})) as process:
        trainer = Trainer(process.socket, Model())
        trainer.open()
        trainer.save_and_commit()
        mount._process.send_signal(signal.SIGSTOP)
        t0 = time.monotonic()
        try:
            trainer.model.train()
            state = trainer.model.state()
            number = trainer.save()
            print("saved", time.monotonic() - t0)
            eventually(lambda: blocks(process, "free") == 8, what="every block is free although nothing uploads")
            print("free", time.monotonic() - t0)
            for _ in range(30):
                time.sleep(1)
                print(round(time.monotonic()-t0), server.last.store_ok, [(i.kind, i.cause, i.message) for i in server.incidents(3)], server.last.saves_failed_in_a_row)
                if not process.poll() is None: break
        finally:
            mount._process.send_signal(signal.SIGCONT)
        try:
            commit = trainer.committed(number)
            print("committed")
        except SaveRefused as e:
            print("refused", e)
            trainer.model.train()
            state = trainer.model.state()
            commit = eventually(lambda: trainer.save_and_commit(), what="x")
        trainer.model.wipe()
        trainer.restore(commit.seq)
        assert same(trainer.model.state(), state)
        trainer.close()
    mount.stop()
