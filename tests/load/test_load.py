"""Two hundred annotated pods in runs of 1, 5 and 32 pods: all are reported, and no user object is written.

The API server and the Job controller are real, as are the webhook over TLS, the controller with the chart's
permissions, and each sidecar's reports over TLS with its own token. kwok replaces the kubelets. `make bench-fleet`
measures the same with 25 times as many pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.load.simulation import admission, control_plane, measure, workload
from tests.load.simulation.system import LoadSystem
from tests.support.machine import limit_s

SIZES = (*[5] * 22, *[1] * 26, *[32] * 2)
"""The number of pods of each run."""
RUNS, NODES = len(SIZES), 20
EVERY_S = 60.0
LOSS_DEADLINE_S = 30.0 + limit_s(15.0)
"""A run's status is written at most every 30 s; the rest allows for a loaded machine."""
CONTROLLER_RSS_BYTES = 240 << 20
"""With 200 sidecars; `make bench-fleet` has the limit for 5,000."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadSystem]:
    folder = tmp_path_factory.mktemp("load")
    with LoadSystem(folder, sizes=SIZES, nodes=NODES, every_s=EVERY_S) as system:
        yield system


def test_every_run_is_reported_training(system: LoadSystem) -> None:
    print(system.took_s)
    assert system.view.training() == sum(system.view.phases().values()) == RUNS
    for job_uid, pods in Counter(pod.job_uid for pod in workload.live_pods(system.plane)).items():
        status = system.view.status(job_uid)
        assert len(status["pods"]) == pods, status
        assert status["ranks"].endswith(f"/{pods}"), status
        assert status["lastCommittedStep"] > 0, status
        assert status.get("failures", 0) == 0, status
    assert system.swarm.report()["refusals"].get("403", 0) == 0


def test_no_admission_fails(system: LoadSystem) -> None:
    """Annotated Jobs and pods are dry runs at a fixed rate. Each gets its sidecar, and the webhook is fast."""
    outcome = admission.admit(system.plane, system.webhook.metrics, per_s=20, duration_s=10)
    print(measure.spread(outcome.latencies_s), outcome.webhook, outcome.hooks)
    assert not outcome.failures
    assert len(outcome.latencies_s) == 200
    # The webhook reviews an injected pod twice, because the API server adds a volume to the new container.
    assert outcome.webhook.count == outcome.hooks.count <= 300
    assert outcome.webhook.quantile(0.5) < limit_s(0.5)


def test_lost_pod_is_reported_in_its_run(system: LoadSystem) -> None:
    """An evicted or killed pod appears only in its run's status, within a bound. Its successor trains."""
    by_run = {pod.job_uid: pod for pod in workload.live_pods(system.plane)}
    victims = list(by_run.values())[: RUNS // 4]
    evicted = {pod.uid for pod in victims[::2]}

    def end(plane: control_plane.ControlPlane, pod: workload.ClusterPod) -> None:
        (workload.evict if pod.uid in evicted else workload.kill)(plane, pod)

    seconds = system.lose(victims, end)
    print(measure.spread(seconds))
    assert max(seconds.values()) < LOSS_DEADLINE_S
    system.wait_reported(system.pods)
    system.view.wait_training(RUNS)
    lost = {pod.name for pod in victims}
    for job_uid, pod in by_run.items():
        reported = {each["pod"] for each in system.view.status(job_uid).get("losses", ())}
        assert (pod.name in reported) == (pod.name in lost)


def test_requested_save_reaches_sidecar_immediately(system: LoadSystem) -> None:
    """A nudge starts the report before the next interval ends."""
    pods = list({pod.job_uid: pod for pod in workload.live_pods(system.plane)}.values())
    report_delays, over = system.request_saves(pods[:10])
    print(measure.spread(report_delays), measure.spread(over))
    assert max(report_delays.values()) < limit_s(10.0)


def test_restarted_controller_recovers_all_runs(system: LoadSystem) -> None:
    before = {uid: system.view.status(uid).get("failures", 0) for uid in _jobs(system)}
    print(system.restart(), system.swarm.report()["refusals"])
    assert {uid: system.view.status(uid).get("failures", 0) for uid in _jobs(system)} == before


def _jobs(system: LoadSystem) -> set[str]:
    return {pod.job_uid for pod in workload.live_pods(system.plane)}


def test_finished_job_finishes_its_run(system: LoadSystem) -> None:
    done = sorted(_jobs(system))[:3]
    pods = [pod for pod in workload.live_pods(system.plane) if pod.job_uid in done]
    system.swarm.remove([pod.uid for pod in pods])
    workload.in_threads(lambda pod: workload.complete(system.plane, pod), pods)
    system.view.wait(
        lambda view: view.phases()["Finished"] == len(done),
        "Finished runs",
        timeout_s=control_plane.TIMEOUT_S,
    )
    assert system.view.training() == RUNS - len(done)
    assert {system.view.status(uid)["finishedReason"] for uid in done} == {"Completed"}


def test_controller_memory_is_within_budget(system: LoadSystem) -> None:
    for name, usage in system.usages().items():
        print(name, usage)
    usage = system.controller.usage()
    assert usage.peak_rss_bytes < CONTROLLER_RSS_BYTES


def test_controller_writes_no_user_objects(system: LoadSystem) -> None:
    print(system.requests())
    assert system.violations() == []
    assert "create deltashard.io/checkpointruns" in system.requests(), "the log has the controller's requests"
