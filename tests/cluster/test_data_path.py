"""A training Job on a real cluster, its sidecar a native one: what dies, what comes back, and that it is the same bits.

Each scenario checks the restored step against a witness that does not ask deltashard, the restored bits against the
same training without failures, and the store by reading it on its own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.cluster.conftest import Bench
from tests.cluster.jobs import TrainingJob
from tests.cluster.processes import wait_until
from tests.cluster.references import Reference, checkpoints, command_line, exported, newest_step, weights_at
from tests.cluster.witnesses import Event

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::ResourceWarning")]

ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The training that nothing happened to."""
    return Reference()


def wait_commits(bench: Bench, job: TrainingJob, *, beyond: int = 0, count: int = 1) -> int:
    """Wait for `count` commits of steps beyond `beyond`; returns the newest step."""

    def enough() -> bool:
        return sum(each.step > beyond for each in checkpoints(bench.url, job.run)) >= count

    wait_until(enough, timeout_s=60, what=f"{count} commits of {job.run} beyond step {beyond}", every_s=0.2)
    return newest_step(bench.url, job.run)


def assert_resumed(event: Event, reference: Reference) -> None:
    """The trainer came back to exactly what the uninterrupted training was at that step."""
    assert event["step"] > 0
    assert event["exact"] is True
    assert event["digest"] == reference.digest(event["step"])


def assert_store_whole(bench: Bench, job: TrainingJob, folder: Path) -> None:
    """Every byte of the store checks out, and its newest checkpoint is the reference's state at that step."""
    command_line("verify", bench.url, "--run", job.run, "--deep")
    newest = checkpoints(bench.url, job.run)[-1]  # training may go on meanwhile
    found, wanted = exported(bench.url, job.run, newest.seq, folder), weights_at(newest.step)
    assert set(found) >= set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{name} at step {newest.step}"


def test_job_completes_with_its_last_step_durable(bench: Bench, reference: Reference, tmp_path: Path) -> None:
    """The Job trains, saves to MinIO, and completes; its last step is durable and the native sidecar is gone."""
    job = bench.job("completes", steps=400)
    began = bench.witness.began(job.name, 0)
    assert began["step"] == 0
    assert began["library"].startswith("/opt/deltashard/"), "what runs must be the wheel"
    assert not began["secrets"], "the store's credentials reach the sidecar only"
    job.wait_complete()
    finished = bench.witness.wait(job.name, lambda e: e["kind"] == "finished", timeout_s=5, what="finished")
    assert finished["digest"] == reference.digest(400)
    assert newest_step(bench.url, job.run) == 400
    assert_store_whole(bench, job, tmp_path)
    (pod,) = job.pods()
    assert pod["status"]["phase"] == "Succeeded"
    sidecar = job.container(pod["metadata"]["name"], "deltashard-sidecar")
    assert sidecar["state"]["terminated"]["exitCode"] == 0
    assert sidecar["restartCount"] == 0


def test_killed_containers(bench: Bench, reference: Reference, tmp_path: Path) -> None:
    """A killed trainer resumes from its pod's cache; a killed sidecar does not stop training, the next save covers all."""
    job = bench.job("killed", steps=ENDLESS)
    began = bench.witness.began(job.name, 0)
    node, pod = bench.cluster.nodes[began["node"]], began["pod"]
    wait_commits(bench, job, count=2)
    os.kill(node.container_pid(job.container(pod, "trainer")["containerID"]), signal.SIGKILL)
    again = bench.witness.began(job.name, 1)
    assert again["pod"] == pod
    assert again["source"] == "cache"
    assert_resumed(again, reference)
    assert again["seq"] in {each.seq for each in checkpoints(bench.url, job.run)}
    assert job.container(pod, "trainer")["restartCount"] == 1

    wait_commits(bench, job, beyond=again["step"])
    os.kill(node.container_pid(job.container(pod, "deltashard-sidecar")["containerID"]), signal.SIGKILL)
    at_kill = bench.witness.last_step(again["life"])
    wait_until(
        lambda: job.container(pod, "deltashard-sidecar")["restartCount"] == 1,
        timeout_s=30,
        what="the sidecar restarted",
    )
    wait_commits(bench, job, beyond=at_kill)
    assert bench.witness.last_step(again["life"]) > at_kill
    assert job.container(pod, "trainer")["restartCount"] == 1
    assert_store_whole(bench, job, tmp_path)


def test_preempted_pods(bench: Bench, reference: Reference, tmp_path: Path) -> None:
    """An evicted and a deleted pod commit an urgent cut within the grace period; the next loses at most one step."""
    # No timer worth its name: what is committed is committed because of the notice.
    job = bench.job("preempted", steps=ENDLESS, every_s=3600.0)
    life = bench.witness.began(job.name, 0)
    for number, leave in enumerate((job.evict, job.delete_pod), start=1):
        first, pod = life["step"], life["pod"]
        bench.witness.wait_step(life["life"], first + 50, timeout_s=60)
        leave(pod)
        job.wait_gone(pod, timeout_s=job.grace_s)
        done = bench.witness.last_step(life["life"])
        assert newest_step(bench.url, job.run) >= done - 1
        life = bench.witness.began(job.name, number)
        assert life["pod"] != pod
        assert life["step"] >= done - 1
        assert_resumed(life, reference)
    assert_store_whole(bench, job, tmp_path)


def test_lost_node(bench: Bench, reference: Reference, tmp_path: Path) -> None:
    """A node stops without a word: the other one goes on from the last commit. Its zombie, back again, is fenced."""
    job = bench.job("orphaned", steps=ENDLESS)
    zombie = bench.witness.began(job.name, 0)
    lost = bench.cluster.nodes[zombie["node"]]
    wait_commits(bench, job, count=2)
    lost.freeze()
    committed = newest_step(bench.url, job.run)
    heir = bench.witness.began(job.name, 1, timeout_s=90)
    assert heir["node"] != zombie["node"]
    assert heir["source"] == "store"
    assert heir["step"] == committed
    assert_resumed(heir, reference)

    lost.thaw_containers()  # and nobody there yet who would end them
    fenced = bench.witness.wait(
        job.name,
        lambda e: e["life"] == zombie["life"] and e["kind"] == "fenced",
        timeout_s=60,
        what="the zombie is fenced",
    )
    assert fenced["step"] > 0
    wait_commits(bench, job, beyond=heir["step"])
    newest = checkpoints(bench.url, job.run)[-1]
    assert newest.attempt == heir["attempt"]
    lost.thaw()
    wait_until(lambda: bench.cluster.node_ready(lost.name), timeout_s=30, what="the node Ready again")
    job.wait_gone(zombie["pod"], timeout_s=60)
    assert bench.witness.last_step(heir["life"]) > heir["step"]
    assert_store_whole(bench, job, tmp_path)
