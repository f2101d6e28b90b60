"""What interruptions came to: once each, lossy only where steps were lost, and never what somebody wanted."""

from __future__ import annotations

import pytest
from deltashard_operator.fleet.report import Incident, IncidentKind
from deltashard_operator.run import failure, incident, watched_run
from deltashard_operator.run.failure import Interruption, LossCause
from deltashard_operator.run.incident import Incidents, Times

from tests.unit.operator.run.observed import NOW_S, job, judged, pod, report, restarted, seen, told, training


def lossy(found: Incidents) -> int:
    return sum(each.lossy for each in found.causes.values())


def over(cause: LossCause, **more: object) -> Incidents:
    return incident.over(Incidents(), "", (Interruption(cause=cause, **more),))  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", LossCause)
def test_all_interruptions_are_restores_and_those_that_nobody_wanted_are_lossy(cause: LossCause) -> None:
    assert over(cause).causes == {cause: Times(restores=1, lossy=int(cause not in failure.ASKED))}


def evicted(*, reached: int, step: int, lost_steps: int = 0, late: bool = False) -> Incidents:
    """After an eviction at step `reached`, and a restore of `step` that was told in time or late."""
    found = incident.lost(Incidents(), "", reached)
    told = {"step": step, "lost_steps": lost_steps}
    if not late:
        found = incident.restored(found, "", **told)
    found = incident.over(found, "", (Interruption(cause=LossCause.EVICTED),))
    return incident.restored(found, "", **told) if late else found


@pytest.mark.parametrize("late", [False, True])
def test_an_eviction_that_lost_no_steps_is_no_lossy_failure(late: bool) -> None:
    found = evicted(reached=1000, step=1004, late=late)
    assert (found.causes, found.pending) == ({"Evicted": Times(restores=1, lossy=0)}, {})


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("step", "lost_steps"), [(900, 0), (1000, 5)])
def test_an_eviction_that_lost_steps_is_one(late: bool, step: int, lost_steps: int) -> None:
    """By the sidecar's word, or by ours: a new pod's sidecar cannot know how far the old one's trainer was."""
    found = evicted(reached=1000, step=step, lost_steps=lost_steps, late=late)
    assert found.causes == {"Evicted": Times(restores=1, lossy=1)}


def test_an_eviction_of_which_nothing_more_is_heard_is_lossy() -> None:
    found = incident.over(incident.lost(Incidents(), "", 1000), "", (Interruption(cause=LossCause.EVICTED),))
    assert lossy(found) == 1
    crashed = incident.over(incident.lost(found, "", 2000), "", (Interruption(cause=LossCause.ERROR),))
    assert lossy(incident.restored(crashed, "", step=2000, lost_steps=0)) == 2


def test_a_crash_right_after_a_checkpoint_is_lossy_all_the_same() -> None:
    """That it lost nothing was chance."""
    found = incident.lost(Incidents(), "", 1000)
    found = incident.restored(found, "", step=1000, lost_steps=0)
    assert lossy(incident.over(found, "", (Interruption(cause=LossCause.ERROR),))) == 1


def test_a_crash_again_counts_nothing_and_blames_no_node() -> None:
    found = over(LossCause.ERROR, nodes=frozenset({"node-a"}), again=True)
    assert (found.causes, found.nodes) == ({}, {})
    assert over(LossCause.ERROR, nodes=frozenset({"node-a"})).nodes == {"node-a": 1}


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_32_pods_lost_at_once_are_one_failure() -> None:
    names = [f"p-{n}" for n in range(1, 33)]
    run = seen(training(), *(pod(uid=each) for each in names))
    for n, each in enumerate(names):
        gone = pod(uid=each, phase="Failed", disruption="DeletionByPodGC")
        run = seen(run, gone, node_ready=False, at_s=NOW_S + 100 + n)
    assert len(failure.newest(run.ledger.tallies)) == failure.MAX_LOSSES
    run = told(seen(run, pod(uid="q")), report("q", attempt=2), NOW_S + 200)
    run = judged(run, NOW_S + 200 + failure.SETTLE_S)
    assert (run.failures, run.ledger.incidents.causes) == (1, {"NodeLost": Times(restores=1, lossy=1)})
    assert run.node_failures == {"node-a": 1}


def test_a_suspended_week_counts_nothing() -> None:
    run = watched_run.with_job(judged(training(), NOW_S + 3600), job(suspended=True), NOW_S + 3600)
    run = seen(run, pod(terminating_at_s=NOW_S + 3600), at_s=NOW_S + 3600)
    run = judged(watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S + 3600), NOW_S + 3601)
    week_s = NOW_S + 7 * 24 * 3600
    run = watched_run.with_job(judged(run, week_s), job(), week_s)
    run = told(seen(run, pod(uid="p-2"), at_s=week_s), report("p-2", attempt=2), week_s)
    run = judged(run, week_s + failure.SETTLE_S)
    assert (run.failures, run.trained_s) == (0, 3600 + failure.SETTLE_S)
    assert run.ledger.incidents.causes == {"Suspended": Times(restores=1, lossy=0)}


def test_a_drained_pod_that_saved_lost_no_steps() -> None:
    """From the pod's condition to the restore of the pod that follows, with a restart of the controller between."""
    run = told(training(), report(seq=4, step=500))
    evicted = pod(terminating_at_s=NOW_S, disruption="EvictionByEvictionAPI")
    run = judged(seen(run, evicted), NOW_S + 1)
    run = watched_run.without_pod(run, "p-1", node_ready=True, now_s=NOW_S + 5)
    run = seen(restarted(judged(run, NOW_S + 5), NOW_S + 5), pod(uid="p-2"), at_s=NOW_S + 9)
    restored = Incident(id=1, kind=IncidentKind.RESTORED, step=501, attempt=2)
    run = told(run, report("p-2", seq=5, step=501, attempt=2, incidents=[restored]), NOW_S + 10)
    run = judged(run, NOW_S + 40)
    assert run.ledger.incidents.causes == {"Evicted": Times(restores=1, lossy=0)}
    assert run.failures == 1, "an interruption that nobody wanted all the same"
