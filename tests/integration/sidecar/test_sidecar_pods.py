"""Sidecars in pods: names of runs, takeover between workloads, and different users."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.stores.url import open_store
from deltashard_proto.arena_layout import NEVER, SAVE_AT_STEP
from deltashard_proto.v1 import trainer_pb2 as pb

from tests.support.eventually import eventually
from tests.support.fake_model import FakeModel
from tests.support.fake_trainer import SaveStreamFailed, Trainer
from tests.support.server.faulty_proxy import FaultyProxy
from tests.support.server.minio_server import MinioServer
from tests.support.sidecar.training import pod, runtime_dir
from tests.support.sidecar_process import sidecar

DEADLINE_S = 90.0
ROOT = Path(__file__).parents[3]


def state_of(url: str, run: str = "ns/job") -> RunState:
    return RunLog(open_store(url), run).refresh()


def test_indexed_pods_train_separate_runs(tmp_path: Path, url: str) -> None:
    """Two pods of an Indexed Job share no key, and each finds its own run again."""
    for index in ("0", "1"):
        with sidecar(runtime_dir(tmp_path, index), url, **pod(index=index, runs="per-pod")) as process:
            trainer = Trainer(process.socket, FakeModel(seed=int(index)))
            assert trainer.reply.run == f"ns/job-{index}"
            trainer.open()
            trainer.model.step = 10 + int(index)
            trainer.save_and_commit()
            trainer.close()
    keys = [info.key for info in open_store(url).list("")]
    assert {key.split("/")[1] for key in keys} == {"job-0", "job-1"}
    assert state_of(url, "ns/job-1").owner == "ns/job-1"
    again = runtime_dir(tmp_path, "again")
    with sidecar(again, url, **pod(index="1", runs="per-pod")) as process:
        trainer = Trainer(process.socket, FakeModel())
        assert trainer.open().step == 11
        trainer.close()


def test_second_live_workload_fences_first(tmp_path: Path, url: str) -> None:
    """The later workload holds the run. The earlier one is fenced permanently, and its restart fences no one."""
    with (
        sidecar(runtime_dir(tmp_path, "a"), url, **pod("job-a")) as first,
        sidecar(runtime_dir(tmp_path, "b"), url, **pod("job-b")) as second,
    ):
        earlier = Trainer(first.socket, FakeModel())
        earlier.open()
        earlier.save_and_commit()
        later = Trainer(second.socket, FakeModel())
        opened = later.open()
        assert opened.HasField("resume_seq")
        with pytest.raises(SaveStreamFailed, match="taken_over: .*job-b") as refused:
            earlier.save_and_commit()
        assert refused.value.cause == "taken_over"
        eventually(lambda: earlier.fenced, what="the notice of the takeover")
        with pytest.raises(SaveStreamFailed, match="taken_over"):
            earlier.begin()
        for _ in range(3):
            earlier.attach()
            with pytest.raises(grpc.RpcError, match="TakenOver: .*takeover=True") as failed:
                earlier.open()
            assert failed.value.code() == grpc.StatusCode.ABORTED
        later.save_and_commit()
        assert state_of(url).attempt == opened.attempt
        assert earlier.open(takeover=True).attempt > opened.attempt
        earlier.save_and_commit()
        earlier.close()
        later.close()


def test_returning_replaced_pod_stays_fenced(tmp_path: Path, url: str) -> None:
    """A pod of a lost node is fenced at its next save, and its restarted containers cannot open the run."""
    with (
        sidecar(runtime_dir(tmp_path, "a"), url, **pod(**{"pod-uid": "one"})) as replaced,
        sidecar(runtime_dir(tmp_path, "b"), url, **pod(**{"pod-uid": "two"})) as replacement,
    ):
        old = Trainer(replaced.socket, FakeModel())
        old.open()
        old.save_and_commit()
        new = Trainer(replacement.socket, FakeModel())
        attempt = new.open().attempt
        with pytest.raises(SaveStreamFailed) as refused:
            old.save_and_commit()
        assert refused.value.cause == "fenced"
        for _ in range(2):
            old.attempt = None
            old.attach()
            with pytest.raises(grpc.RpcError, match="FencedError: .*another pod"):
                old.open()
        new.save_and_commit()
        assert state_of(url).attempt == attempt
        old.close()
        new.close()


@pytest.mark.minio
def test_next_pod_waits_for_last_save_of_terminating_pod(tmp_path: Path, own_minio: MinioServer) -> None:
    """After SIGTERM the pod saves urgently with a slow upload.

    The next pod's Open waits and resumes from that snapshot.
    """
    bucket = own_minio.new_bucket()
    direct = own_minio.url(bucket)
    with (
        FaultyProxy(own_minio.port) as slow,
        sidecar(
            runtime_dir(tmp_path, "old"), own_minio.url(bucket, port=slow.port), **pod(term_deadline_s=60)
        ) as old,
        sidecar(runtime_dir(tmp_path, "new"), direct, **pod()) as new,
    ):
        trainer = Trainer(old.socket, FakeModel())
        trainer.open()
        trainer.model.step = 5
        trainer.save_and_commit()
        trainer.model.train()
        trainer.stub.Notify(pb.NotifyRequest(reason="stopping", deadline_s=60), timeout=60)
        store = open_store(direct)
        eventually(lambda: list(store.list("ns/job/closing/")), what="the marker")
        slow.hang = True
        number = trainer.save(reason="urgent", urgent=True)
        state = trainer.model.state()
        trainer.close()
        old.signal(signal.SIGTERM)
        fresh = Trainer(new.socket, FakeModel())
        opening = fresh.stub.Open.future(
            pb.OpenRequest(session=fresh.reply.session, which="latest"), timeout=120
        )
        with pytest.raises(AssertionError, match="not within"):
            eventually(opening.done, within_s=2.0)
        assert old.poll() is None
        slow.hang = False
        slow.release()
        reply = opening.result(timeout=DEADLINE_S)
        assert old.wait_exit() == 0
        assert (reply.step, reply.resume_attempt) == (6, 1)
        assert reply.snapshot_id == number
        assert reply.waited_s > 0.0
        assert not list(store.list("ns/job/closing/"))
        fresh.attempt = reply.attempt
        fresh.assert_restores(reply.resume_seq, state)
        fresh.close()


def test_marker_is_removed_with_trainer_without_urgent_save(tmp_path: Path, url: str) -> None:
    """The trainer exits after SIGTERM before its urgent save, so the next pod does not wait."""
    with sidecar(tmp_path, url, **pod(every_s=0.2)) as process:
        trainer = Trainer(process.socket, FakeModel())
        trainer.open()
        store = open_store(url)
        for gone in ("detached", "killed"):
            trainer.save_and_commit()
            # The timer has run, so the sidecar has counted this trainer as live.
            eventually(lambda: trainer.arena.line(0)[SAVE_AT_STEP] != NEVER)
            trainer.stub.Notify(pb.NotifyRequest(reason="stopping", deadline_s=60), timeout=60)
            eventually(lambda: list(store.list("ns/job/closing/")), what="the marker")
            if gone == "detached":
                trainer.detach()
                trainer.attach()
                trainer.open()
            else:
                trainer.close()
            eventually(lambda: not list(store.list("ns/job/closing/")), what=gone)
