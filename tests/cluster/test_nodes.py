"""A node stops without notice, or only its kubelet does: a successor resumes, and the zombie is fenced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.cluster.kubernetes.cluster import DIRTY
from tests.cluster.scenario.bench import ScenarioBench
from tests.cluster.scenario.job import TrainingJob
from tests.cluster.scenario.reference import checkpoints
from tests.cluster.scenario.witness import Event

pytestmark = pytest.mark.timeout(600, func_only=True)


def wait_fenced(bench: ScenarioBench, job: TrainingJob, zombie: Event) -> None:
    fenced = bench.witness.wait(
        job.key,
        lambda e: e["life"] == zombie["life"] and e["kind"] == "fenced",
        timeout_s=120,
        what=f"the zombie {zombie['pod']} is fenced",
    )
    assert fenced["step"] > 0
    bench.note(f"{zombie['pod']} is fenced at step {fenced['step']}")


def assert_successor_owns_run(bench: ScenarioBench, job: TrainingJob, replacement: Event) -> None:
    """Assert that only the newest attempt writes the run, whatever the zombie does."""
    bench.wait_commits(job, beyond=replacement["step"])
    assert checkpoints(bench.url, job.run)[-1].attempt == replacement["attempt"]
    bench.witness.wait_step(replacement["life"], replacement["step"] + 1, timeout_s=60)
    bench.assert_store_whole(job)


@contextlib.contextmanager
def cordoned(bench: ScenarioBench, node: str) -> Iterator[None]:
    """No new pod is scheduled on this node meanwhile."""
    bench.cluster.kubectl("cordon", node)
    try:
        yield
    finally:
        bench.cluster.kubectl("uncordon", node)


def test_lost_node(bench: ScenarioBench) -> None:
    """The other node resumes from the last commit, also for a Job whose lost pod needs manual action.

    The cluster names that Job with both remedies; the test applies one. The zombies are fenced after their node
    resumes.
    """
    spare = bench.cluster.nodes["m2"]
    with cordoned(bench, spare.name):
        job = bench.job("orphaned", pool=DIRTY)
        # The pod is replaced only when its failure is seen, which does not happen on a lost node.
        stuck = bench.job("stuck", pool=DIRTY, spec={"podReplacementPolicy": "Failed"})
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
        for told in (condition["message"], event["message"]):
            assert remedy in told
            assert f"kubectl delete node {lost.name}" in told
        bench.note("the run is named as stuck")
        bench.cluster.kubectl(*remedy.split()[1:])
        stuck_heir = bench.start_event(stuck, 1)
        assert stuck_heir["node"] == spare.name
        bench.assert_resumed(stuck_heir, at_least=stuck_committed)
        stuck.wait_condition("StuckOnLostNode", "False")

        lost.thaw_containers()  # and no kubelet runs yet that would end them
        for each, back, successor in ((job, zombie, replacement), (stuck, stuck_zombie, stuck_heir)):
            wait_fenced(bench, each, back)
            assert_successor_owns_run(bench, each, successor)
    finally:
        lost.thaw()
        bench.cluster.kubectl("taint", "node", lost.name, "node.kubernetes.io/out-of-service-", check=False)
    bench.cluster.wait_node(lost.name)
    job.wait_gone(zombie["pod"], timeout_s=120)


def test_lost_kubelet(bench: ScenarioBench) -> None:
    job = bench.job("doubled", pool=DIRTY)
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
