"""Two hundred annotated pods, of runs of one, five and 32: all are followed, none is missed, nothing of the users' is written.

What is real: the API server, the Job controller, the webhook over TLS, the controller with the rights the chart gives
it, and every sidecar's own reports over TLS with a token of its own. kwok plays the kubelets. `make bench-fleet` does the
same with 25 times as many, and measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.load.simulation import admission, control_plane, measure, workload
from tests.load.simulation.system import System
from tests.support.machine import limit_s

SIZES = (*[5] * 22, *[1] * 26, *[32] * 2)
"""Pods of each run."""
RUNS, NODES = len(SIZES), 20
EVERY_S = 60.0
LOSS_SHOWS_S = 30.0 + limit_s(15.0)
"""A status is written at most every 30 s per run; the rest is for a machine that has other things to do."""
CONTROLLER_RSS_BYTES = 240 << 20
"""With 200 sidecars; `make bench-fleet` has its figure for 5,000."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """All of it, up and training."""
    folder = tmp_path_factory.mktemp("load")
    with System(folder, sizes=SIZES, nodes=NODES, every_s=EVERY_S) as system:
        yield system


def test_every_run_is_reported_training(system: System) -> None:
    """One CheckpointRun a Job, with the step and the checkpoint its sidecars tell of and all of its pods."""
    print(system.took_s)
    assert system.view.training() == sum(system.view.phases().values()) == RUNS
    for job_uid, pods in Counter(pod.job_uid for pod in workload.living(system.plane)).items():
        status = system.view.status(job_uid)
        assert len(status["pods"]) == pods, status
        assert status["ranks"].endswith(f"/{pods}"), status
        assert status["lastCommittedStep"] > 0, status
        assert status.get("failures", 0) == 0, status
    assert system.swarm.report()["refusals"].get("403", 0) == 0


def test_no_admission_fails(system: System) -> None:
    """Dry runs of annotated Jobs and pods at a rate: each gets its sidecar, and the webhook is quick."""
    outcome = admission.admit(system.plane, system.webhook.metrics, per_s=20, lasts_s=10)
    print(measure.spread(outcome.latencies_s), outcome.webhook, outcome.hooks)
    assert not outcome.failures
    assert len(outcome.latencies_s) == 200
    # An injected pod is shown again, since the API server puts its own volume into the container that is new.
    assert outcome.webhook.count == outcome.hooks.count <= 300
    assert outcome.webhook.quantile(0.5) < limit_s(0.5)


def test_a_lost_pod_shows_in_its_run(system: System) -> None:
    """Evicted or out of memory: within a bound in the status of its run and of no other; then its successor trains."""
    by_run = {pod.job_uid: pod for pod in workload.living(system.plane)}
    victims = list(by_run.values())[: RUNS // 4]
    evicted = {pod.uid for pod in victims[::2]}

    def end(plane: control_plane.Plane, pod: workload.Pod) -> None:
        (workload.evict if pod.uid in evicted else workload.kill)(plane, pod)

    seconds = system.lose(victims, end)
    print(measure.spread(seconds))
    assert max(seconds.values()) < LOSS_SHOWS_S
    system.wait_taken(system.pods)
    system.view.wait_training(RUNS)
    lost = {pod.name for pod in victims}
    for job_uid, pod in by_run.items():
        told = {each["pod"] for each in system.view.status(job_uid).get("losses", ())}
        assert (pod.name in told) == (pod.name in lost)


def test_an_ordered_save_is_heard_at_once(system: System) -> None:
    """By a nudge, not by the next beat."""
    pods = list({pod.job_uid: pod for pod in workload.living(system.plane)}.values())
    heard, over = system.order(pods[:10])
    print(measure.spread(heard), measure.spread(over))
    assert max(heard.values()) < limit_s(10.0)


def test_a_controller_that_comes_back_finds_all_as_it_was(system: System) -> None:
    """Killed and started anew: every run is heard at once, no loss is invented, none is counted twice."""
    before = {uid: system.view.status(uid).get("failures", 0) for uid in _jobs(system)}
    print(system.restart(), system.swarm.report()["refusals"])
    assert {uid: system.view.status(uid).get("failures", 0) for uid in _jobs(system)} == before


def _jobs(system: System) -> set[str]:
    return {pod.job_uid for pod in workload.living(system.plane)}


def test_a_finished_job_finishes_its_run(system: System) -> None:
    """All pods of some Jobs succeed: their runs are Finished, the others train on."""
    done = sorted(_jobs(system))[:3]
    pods = [pod for pod in workload.living(system.plane) if pod.job_uid in done]
    system.swarm.remove([pod.uid for pod in pods])
    workload.in_threads(lambda pod: workload.complete(system.plane, pod), pods)
    system.view.wait(
        lambda view: view.phases()["Finished"] == len(done),
        "Finished runs",
        timeout_s=control_plane.PATIENCE_S,
    )
    assert system.view.training() == RUNS - len(done)
    assert {system.view.status(uid)["finishedReason"] for uid in done} == {"Completed"}


def test_the_controller_is_within_its_budget(system: System) -> None:
    """Memory, at its worst so far."""
    for name, usage in system.usages().items():
        print(name, usage)
    usage = system.controller.usage()
    assert usage.peak_rss_bytes < CONTROLLER_RSS_BYTES


def test_nothing_of_the_users_was_written(system: System) -> None:
    """By the API server's audit log: only what is the controller's own to write, and nothing was forbidden to it."""
    print(system.requests())
    assert system.findings() == []
    assert "create deltashard.io/checkpointruns" in system.requests(), "the log has the controller's requests"
