"""Trainers and sidecars, one after the other, on a real MinIO behind a proxy with network faults.

Acknowledgements are lost; requests are doubled, delivered late, refused in storms, truncated, flipped and hung; each
sidecar ends in a random way. In all cases, each restore is exactly that of the newest checkpoint; no acknowledged
checkpoint is missing; a checkpoint is never reported invalid; once the faults end `verify --deep` is clean, and every
live checkpoint reads back.

Seeds determine everything. `DELTASHARD_TEST_FAULTS_S=3600` continues with new seeds for an hour.
"""

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from deltashard_cli.target import Target
from deltashard_cli.verification import verify

from tests.support.checkpoint.snapshot import read_checkpoint
from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel, assert_stored, same
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.machine import limit_s
from tests.support.server.faulty_s3_proxy import FaultyS3Proxy, by_seed
from tests.support.server.minio_server import MinioServer
from tests.support.sidecar_process import SidecarProcess

pytestmark = [pytest.mark.minio, pytest.mark.slow]

SIDECARS = 8
SNAPSHOTS = 3
RATE = 0.15
LONGER_S = float(os.environ.get("DELTASHARD_TEST_FAULTS_S", "0"))
POINTS = """
stage.batch_received encode.first stage.sealed pack.before_put pack.during_put:2 pack.after_put index.before_put
index.after_put:2 commit.after_list commit.before_log_put:2 commit.after_log_put commit.after_log_put:2
ack.before_send:2 attempt.before_open attempt.after_open restore.planned restore.first_filled retire.before_put
retire.after_put gc.during_delete gc.after_delete compact.after_packs compact.after_index compact.after_log_put
"""
ALLOWED_ERRORS = {"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "PERMISSION_DENIED"}
"""Error codes that a call may return: retryable; a slot taken by a zombie's late entry; a token that expired twice."""
ENDS = ("crash", "crash", "crash", "kill", "disconnect", "server", "graceful")


class FaultScenario:
    """One run, its faults, and the record of every snapshot's content and of every acknowledgement."""

    def __init__(self, root: Path, server: MinioServer, proxy: FaultyS3Proxy, seed: int) -> None:
        self.root, self.server, self.proxy = root, server, proxy
        self.bucket = server.new_bucket()
        self.url = server.url(self.bucket, port=proxy.port)
        self.chance = random.Random(seed)
        self.consecutive = bool(seed % 2)
        self.model = FakeModel(seed=seed)
        self.states: dict[tuple[int, int], list[np.ndarray]] = {}
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self.messages: Counter[str] = Counter()

    def sidecar(self, crash_at: str = "") -> SidecarProcess:
        flags = {
            "maintenance-interval-s": 0, "keep-last": 2, "gc-grace-s": 0, "compact-after": 2, "pack-bytes": "8MiB",
        }  # fmt: skip
        differential = "consecutive" if self.consecutive else "intermittent"
        return SidecarProcess(
            self.root, self.url, encoding="fp32", crash_at=crash_at, differential=differential, **flags
        )  # type: ignore[arg-type]

    def run_sidecar(self) -> None:
        end = self.chance.choice(ENDS)
        point = self.chance.choice(POINTS.split())
        process = self.sidecar(point if end == "crash" else "")
        try:
            self.run_trainer(process, snapshots=SNAPSHOTS, end=end)
            if end == "disconnect":
                self.run_trainer(process, snapshots=1)
            if end == "graceful" and process.poll() is None:
                assert process.terminate() == 0
        finally:
            process.kill()
        assert '.unexpected"' not in process.log(), "an unexpected error is logged"

    def run_trainer(self, process: SidecarProcess, *, snapshots: int, end: str = "") -> None:
        """Run a trainer that resumes and saves until an error ends it."""
        trainer: Trainer | None = None
        try:
            trainer = Trainer(process.socket, self.model, consecutive=self.consecutive)
            self.assert_recovers(trainer)
            for number in range(snapshots):
                if end == "disconnect" and number == 1:
                    self.model.train()
                    snapshot = trainer.begin()
                    snapshot.rows_of(0, None)
                    snapshot.disconnect()
                    return
                self.save_snapshot(trainer, self.restart_server if end == "server" and number == 1 else None)
                if trainer.gone:
                    return
        except grpc.RpcError as error:
            if error.code().name not in ALLOWED_ERRORS:  # type: ignore[attr-defined]
                raise
            self.messages[error.code().name] += 1  # type: ignore[attr-defined]
        except SaveStreamFailed as error:
            self.check_error(error)
        finally:
            if trainer is not None:
                for commit in list(trainer.commits.values()):
                    self.acknowledged[commit.seq] = (commit.attempt, commit.snapshot_id)
                trainer.close()

    def check_error(self, error: SaveStreamFailed) -> None:
        """Any error is allowed except an invalid checkpoint: the store never lost one."""
        if error.cause in {"invalid", "corrupt"}:
            raise error
        self.messages[error.cause] += 1

    def assert_recovers(self, trainer: Trainer) -> None:
        opened = trainer.open()
        newest = max(self.acknowledged, default=0)
        if not opened.HasField("resume_seq"):
            assert not newest, f"checkpoint {newest} was acknowledged, but nothing is restored"
            return
        assert opened.resume_seq >= newest
        self.model.wipe()
        trainer.restore(opened.resume_seq)
        assert same(self.model.state(), self.states[opened.resume_attempt, opened.snapshot_id])

    def restart_server(self) -> None:
        """Kill the server, as a node failure does, and start it again."""
        self.server.kill()
        self.server.start()
        self.proxy.upstream_port = self.server.port

    def save_snapshot(self, trainer: Trainer, meanwhile: Callable[[], None] | None = None) -> None:
        """Make one snapshot and wait for its result; `meanwhile` runs while the snapshot is in flight."""
        self.model.train()
        assert trainer.attempt is not None
        self.states[trainer.attempt, trainer.snapshot_id + 1] = self.model.state()
        try:
            number = trainer.save()
            if meanwhile is not None:
                meanwhile()
            eventually(
                lambda: number in trainer.commits or number in trainer.failures or trainer.gone,
                within_s=limit_s(300),
                what=f"snapshot {number} ends",
            )
            trainer.committed(number)
        except SaveStreamFailed as error:
            self.check_error(error)

    def assert_healthy(self) -> None:
        self.proxy.disable_faults()
        process = self.sidecar()
        try:
            trainer = Trainer(process.socket, self.model, consecutive=self.consecutive)
            self.assert_recovers(trainer)
            for _ in range(2):
                self.save_snapshot(trainer)
            assert max(trainer.commits) == 2, trainer.failures
            self.acknowledged |= {c.seq: (c.attempt, c.snapshot_id) for c in trainer.commits.values()}
            trainer.close()
            assert process.terminate() == 0
        finally:
            process.kill()
        with open_store(self.server.url(self.bucket)) as store:
            found = verify(Target(store=store, run="run"), deep=True)
            assert found.ok, found.problems
            state = RunLog(store, "run").refresh()
            assert max(state.checkpoints) == max(self.acknowledged)
            assert set(found.restored) == set(state.checkpoints)
            for seq, entry in state.checkpoints.items():
                snapshot = read_checkpoint(store, "run", f"seq:{seq}", state=state)
                assert_stored(snapshot, self.states[entry.attempt, entry.snapshot_id])


def run_scenario(root: Path, server: MinioServer, seed: int) -> None:
    """Run all sidecars of one seed; print the faults."""
    root.mkdir()
    with FaultyS3Proxy(server.port, by_seed(seed, RATE)) as proxy:
        scenario = FaultScenario(root, server, proxy, seed)
        for _ in range(SIDECARS):
            scenario.run_sidecar()
        scenario.assert_healthy()
        injected = ", ".join(
            f"{kind} {fault} {count}" for (kind, fault), count in sorted(proxy.injected.items())
        )
        print(
            f"seed {seed}: {len(scenario.acknowledged)} acknowledged; errors {dict(scenario.messages)}; injected {injected}"
        )


@pytest.mark.timeout(LONGER_S + 3600)  # half a minute each on an idle machine
def test_runs_survive_store_faults(own_minio: MinioServer, tmp_path: Path) -> None:
    until_s = time.monotonic() + LONGER_S
    for seed in itertools.count(1):
        run_scenario(tmp_path / f"seed-{seed}", own_minio, seed)
        if time.monotonic() >= until_s:
            break
