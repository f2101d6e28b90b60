"""A node stops without notice, or only its kubelet does: a successor resumes, and the zombie is fenced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.cluster.kubernetes.cluster import UNRELIABLE
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.event_server import Event
from tests.cluster.scenario.job import TrainingJob
from tests.cluster.scenario.reference import checkpoints

pytestmark = pytest.mark.timeout(600, func_only=True)


def wait_fenced(bench: ScenarioBench, job: TrainingJob, zombie: Event) -> None:
    fenced = bench.event_server.wait(
        job.key,
        lambda e: e["process"] == zombie["process"] and e["kind"] == "fenced",
        timeout_s=120,
        what=f"the zombie {zombie['pod']} is fenced",
    )
    assert fenced["step"] > 0
    bench.note(f"{zombie['pod']} is fenced at step {fenced['step']}")


def assert_successor_owns_run(bench: ScenarioBench, job: TrainingJob, replacement: Event) -> None:
    """Assert that the newest attempt commits and the run's data is valid while the zombie runs."""
    bench.wait_commits(job, beyond=replacement["step"])
    assert checkpoints(bench.url, job.run)[-1].attempt == replacement["attempt"]
    bench.event_server.wait_step(replacement["process"], replacement["step"] + 1, timeout_s=60)
    bench.assert_store_whole(job)


@contextlib.contextmanager
def cordoned(bench: ScenarioBench, node: str) -> Iterator[None]:
    """Keep new pods off this node inside the context."""
    bench.cluster.kubectl("cordon", node)
    try:
        yield
    finally:
        bench.cluster.kubectl("uncordon", node)


def test_job_of_lost_node_resumes_on_other_node(bench: ScenarioBench) -> None:
    """The other node resumes from the last commit, also for a Job whose lost pod needs manual action.

    That run's condition and event name both remedies; the test applies one. The zombies are fenced after their node
    resumes.
    """
    spare = bench.cluster.nodes["m2"]
    with cordoned(bench, spare.name):
        job = bench.job("orphaned", pool=UNRELIABLE)
        # The pod is replaced only when its failure is seen, which does not happen on a lost node.
        stuck = bench.job("stuck", pool=UNRELIABLE, spec={"podReplacementPolicy": "Failed"})
        zombie, stuck_zombie = bench.start_event(job, 0), bench.start_event(stuck, 0)
    lost = bench.cluster.nodes[zombie["node"]]
    assert stuck_zombie["node"] == lost.name != spare.name
    bench.wait_commits(job, count=2)
    bench.wait_commits(stuck, count=2)
    try:
        lost.freeze()
        bench.note(f"{lost.name} is frozen")
        # An upload in flight at that instant may still arrive after this check.
        committed, stuck_committed = bench.newest(job), bench.newest(stuck)
        replacement = bench.start_event(job, 1)
        assert replacement["node"] == spare.name
        assert replacement["source"] == "store"
        bench.assert_resumed(replacement, at_least=committed)

        condition = stuck.wait_condition("StuckOnLostNode", timeout_s=120)
        event = stuck.wait_event("StuckOnLostNode")
        remedy = f"kubectl taint node {lost.name} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        for message in (condition["message"], event["message"]):
            assert remedy in message
            assert f"kubectl delete node {lost.name}" in message
        bench.note("the run is reported as stuck")
        bench.cluster.kubectl(*remedy.split()[1:])
        stuck_successor = bench.start_event(stuck, 1)
        assert stuck_successor["node"] == spare.name
        bench.assert_resumed(stuck_successor, at_least=stuck_committed)
        stuck.wait_condition("StuckOnLostNode", "False")

        lost.thaw_containers()  # the kubelet, which would end them, is still frozen
        for each, back, successor in ((job, zombie, replacement), (stuck, stuck_zombie, stuck_successor)):
            wait_fenced(bench, each, back)
            assert_successor_owns_run(bench, each, successor)
    finally:
        lost.thaw()
        bench.cluster.kubectl("taint", "node", lost.name, "node.kubernetes.io/out-of-service-", check=False)
    bench.cluster.wait_node(lost.name)
    job.wait_gone(zombie["pod"], timeout_s=120)


def test_pod_of_lost_kubelet_is_fenced(bench: ScenarioBench) -> None:
    job = bench.job("doubled", pool=UNRELIABLE)
    zombie = bench.start_event(job, 0)
    node = bench.cluster.nodes[zombie["node"]]
    bench.wait_commits(job, count=2)
    node.kubelet.kill()
    bench.note(f"the kubelet of {node.name} is killed")
    try:
        replacement = bench.start_event(job, 1)
        assert replacement["node"] != zombie["node"]
        bench.assert_resumed(replacement)
        wait_fenced(bench, job, zombie)
        fence = job.wait_event("Fenced")
        assert f"pod {zombie['pod']}, which was replaced" in fence["message"], fence
        bench.note(f"Fenced: {fence['message']}")
        assert_successor_owns_run(bench, job, replacement)
    finally:
        node.kubelet.start()
    bench.cluster.wait_node(node.name)
    job.wait_gone(zombie["pod"], timeout_s=120)
