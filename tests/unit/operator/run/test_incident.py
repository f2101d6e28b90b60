"""What interruptions count for: once each, lossy only where steps were lost, and never what somebody wanted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltashard_checkpoint.deciding.evidence import Evidence
from deltashard_operator.fleet.sidecar_report import (
    Commit,
    Heartbeat,
    Hello,
    Incident,
    IncidentKind,
    Rank,
)
from deltashard_operator.fleet.sidecar_report import Phase as At
from deltashard_operator.run import failure, incident, judgement, run_record, watched_run
from deltashard_operator.run.failure import Interruption, LossCause
from deltashard_operator.run.incident import Incidents
from deltashard_operator.run.observed_object import NodeView
from deltashard_operator.run.watched_run import Run
from deltashard_proto.v1 import trainer_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.operator.run.observed import NOW_S, TRAIN, ended, job, pod

HOUR_S = 3600.0
NODES = {name: NodeView(name=name, ready=True) for name in ("node-a", "node-b")}


def over(cause: LossCause, **more: object) -> Incidents:
    return incident.over(Incidents(), "", (Interruption(cause=cause, **more),), parts=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("cause", LossCause)
def test_all_interruptions_are_restores_and_those_that_nobody_wanted_are_lossy(cause: LossCause) -> None:
    seen = over(cause).evidence
    assert (seen.restores, seen.lossy) == (1, 0 if cause in failure.ASKED else 1)


def evicted(*, reached: int, step: int, lost_steps: int = 0, late: bool = False) -> Incidents:
    """After an eviction at step `reached`, and a restore of `step` that was told in time or late."""
    found = incident.lost(Incidents(), "", reached)
    told = {"step": step, "lost_steps": lost_steps, "parts": 0}
    if not late:
        found = incident.restored(found, "", **told)
    found = incident.over(found, "", (Interruption(cause=LossCause.EVICTED),), parts=0)
    return incident.restored(found, "", **told) if late else found


@pytest.mark.parametrize("late", [False, True])
def test_an_eviction_that_lost_no_steps_is_no_lossy_failure(late: bool) -> None:
    found = evicted(reached=1000, step=1004, late=late)
    assert (found.evidence.restores, found.evidence.lossy) == (1, 0)
    assert found.causes["Evicted"] == incident.Times(restores=1, lossy=0)
    assert not found.pending


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("step", "lost_steps"), [(900, 0), (1000, 5)])
def test_an_eviction_that_lost_steps_is_one(late: bool, step: int, lost_steps: int) -> None:
    """By the sidecar's word, or by ours: a new pod's sidecar cannot know how far the old one's trainer was."""
    found = evicted(reached=1000, step=step, lost_steps=lost_steps, late=late)
    assert (found.evidence.restores, found.evidence.lossy) == (1, 1)


def test_an_eviction_of_which_nothing_more_is_heard_is_lossy() -> None:
    found = incident.over(
        incident.lost(Incidents(), "", 1000), "", (Interruption(cause=LossCause.EVICTED),), parts=0
    )
    assert found.evidence.lossy == 1
    crashed = incident.over(
        incident.lost(found, "", 2000), "", (Interruption(cause=LossCause.ERROR),), parts=0
    )
    assert incident.restored(crashed, "", step=2000, lost_steps=0, parts=0).evidence.lossy == 2


def test_a_crash_right_after_a_checkpoint_is_lossy_all_the_same() -> None:
    """That it lost nothing was chance."""
    found = incident.lost(Incidents(), "", 1000)
    found = incident.restored(found, "", step=1000, lost_steps=0, parts=0)
    assert incident.over(found, "", (Interruption(cause=LossCause.ERROR),), parts=0).evidence.lossy == 1


def test_a_crash_again_counts_nothing_and_blames_no_node() -> None:
    found = over(LossCause.ERROR, nodes=frozenset({"node-a"}), again=True)
    assert (found.evidence, dict(found.causes), dict(found.nodes)) == (Evidence(), {}, {})
    assert over(LossCause.ERROR, nodes=frozenset({"node-a"})).nodes == {"node-a": 1}


def test_runs_of_their_own_that_are_lost_together_are_one_incident_of_their_mean() -> None:
    found = Incidents()
    for part in map(str, range(32)):
        found = incident.over(found, part, (Interruption(cause=LossCause.NODE_LOST),), parts=32)
    assert found.evidence.lossy == pytest.approx(1)


# -- a whole run -----------------------------------------------------------------------------------------------------------


def hello(n: int) -> Hello:
    return Hello(namespace="team", pod=f"train-{n}", pod_uid=f"p-{n}", process=f"s-{n}", workload_uid="u-1")


def beat(run: Run, n: int, *, attempt: int, at_s: float, seq: int = 1, step: int = 10) -> Run:
    said = Heartbeat(
        phase=At.TRAINING,
        run="team/train-u-1",
        attempt=10 * attempt,
        openings=attempt,
        policy=pb.Policy(every_s=60.0, encoding="q8"),
        ranks=(Rank(rank=0, world_size=1, step=step),),  # whose they are does not matter here
        last_commit=Commit(seq=seq, attempt=10 * attempt, step=step),
    )
    return judged(watched_run.with_report(run, hello(n), said, at_s)[0], at_s)


def judged(run: Run, at_s: float) -> Run:
    return judgement.judged(run, NODES, at_s)[0]


def begun(pods: int, at_s: float = NOW_S) -> Run:
    run = watched_run.with_job(Run(workload=TRAIN), job(), at_s)
    for n in range(pods):
        run = watched_run.with_pod(run, pod(uid=f"p-{n}", name=f"train-{n}"), node_ready=True, now_s=at_s)
        run = beat(run, n, attempt=1, at_s=at_s)
    return run


def test_32_pods_lost_at_once_are_one_failure_and_shrink_nothing() -> None:
    """They filled the list of losses; the window of the estimate shrank to an hour, and 90 h between failures to 6.5 h."""
    run = begun(32)
    before = judged(run, NOW_S + 90 * HOUR_S)
    assert before.trained_s == 90 * HOUR_S
    run, at_s = before, NOW_S + 90 * HOUR_S
    for n in range(32):
        seen = pod(uid=f"p-{n}", name=f"train-{n}", phase="Failed", disruption="DeletionByPodGC")
        run = watched_run.with_pod(run, seen, node_ready=False, now_s=at_s + n)
    assert len(failure.newest(run.tallies)) == failure.MAX_LOSSES
    for n in range(32):
        run = watched_run.with_pod(
            run, pod(uid=f"q-{n}", name=f"train-{n}"), node_ready=True, now_s=at_s + 60
        )
    said = Heartbeat(
        phase=At.TRAINING,
        run="team/train-u-1",
        attempt=20,
        openings=2,
        policy=pb.Policy(every_s=60.0, encoding="q8"),
        ranks=(Rank(rank=0, world_size=32, step=10),),
    )
    mine = replace(hello(0), pod_uid="q-0", process="t-0")
    run = judged(watched_run.with_report(run, mine, said, at_s + 61)[0], at_s + 61)
    run = judged(run, at_s + 61 + failure.SETTLE_S)
    assert run.failures == 1
    assert run.incidents.evidence.lossy == pytest.approx(1, rel=1e-3)
    assert run.incidents.evidence.exposure_s > 70 * HOUR_S
    prior_s = 30 * 24 * HOUR_S / 32
    assert before.rates.mtbf_s == pytest.approx(prior_s + before.incidents.evidence.exposure_s)
    assert run.rates.mtbf_s == pytest.approx(before.rates.mtbf_s / 2, rel=0.01), "one failure is one failure"


def test_a_suspended_week_counts_nothing() -> None:
    run = judged(begun(1), NOW_S + HOUR_S)
    before = run.incidents.evidence
    run = watched_run.with_job(run, job(suspended=True), NOW_S + HOUR_S)
    run = watched_run.with_pod(
        run,
        pod(uid="p-0", name="train-0", terminating_at_s=NOW_S + HOUR_S),
        node_ready=True,
        now_s=NOW_S + HOUR_S,
    )
    run = watched_run.without_pod(run, "p-0", node_ready=True, now_s=NOW_S + HOUR_S + 1)
    run = watched_run.without_connected(run, hello(0))
    run = judged(run, NOW_S + HOUR_S + 2)
    week_s = NOW_S + HOUR_S + 7 * 24 * HOUR_S
    for at_s in (NOW_S + 2 * HOUR_S, week_s):
        run = judged(run, at_s)
    run = watched_run.with_job(run, job(), week_s)
    run = watched_run.with_pod(run, pod(uid="p-1", name="train-1"), node_ready=True, now_s=week_s)
    run = beat(run, 1, attempt=2, at_s=week_s)
    run = judged(run, week_s + failure.SETTLE_S)
    seen = run.incidents.evidence
    assert seen.exposure_s == pytest.approx(before.exposure_s + failure.SETTLE_S, rel=1e-3)
    assert (round(seen.restores, 3), seen.lossy) == (1, 0)


def test_a_drained_pod_that_saved_is_a_restore_only() -> None:
    """From the pod's condition to the restore of the pod that follows."""
    run = judged(begun(1), NOW_S + HOUR_S)
    at_s = NOW_S + HOUR_S
    run = beat(run, 0, attempt=1, at_s=at_s, seq=4, step=500)
    evicted = pod(uid="p-0", name="train-0", terminating_at_s=at_s, disruption="EvictionByEvictionAPI")
    run = judged(watched_run.with_pod(run, evicted, node_ready=True, now_s=at_s), at_s)
    run = watched_run.without_pod(run, "p-0", node_ready=True, now_s=at_s + 5)
    run = watched_run.with_pod(run, pod(uid="p-1", name="train-1"), node_ready=True, now_s=at_s + 9)
    run = run_record.run_of(run_record.document(run) | {"status": run_record.status(run, at_s + 9)})
    run = watched_run.with_pod(run, pod(uid="p-1", name="train-1"), node_ready=True, now_s=at_s + 9)
    run = beat(run, 1, attempt=2, at_s=at_s + 10, seq=5, step=501)
    told = Incident(id=1, kind=IncidentKind.RESTORED, step=501)
    run, _ = watched_run.with_report(
        run,
        hello(1),
        replace(
            Heartbeat(run="team/train-u-1", attempt=20, openings=2, phase=At.TRAINING), incidents=(told,)
        ),
        at_s + 12,
    )
    run = judged(run, at_s + 40)
    assert (round(run.incidents.evidence.restores, 3), run.incidents.evidence.lossy) == (1, 0)
    assert run.failures == 1, "an interruption that nobody wanted all the same"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["lost", "told again", "trainer lost", "restarted", "opened", "time", "controller"]),
        st.integers(0, 2),
    ),
    max_size=40,
)


@given(EVENTS)
def test_no_sequence_of_events_counts_an_incident_twice(events: list[tuple[str, int]]) -> None:
    """Whatever pods, sidecars and controllers do: restores are the attempts after the first.

    Something is committed before each crash, so that none is of a loop, which would count once.
    """
    run, at_s, attempt, seq = begun(3), NOW_S, 1, 1
    uids = [0, 1, 2]  # of the pods in their places
    restarts = [0, 0, 0]
    for what, n in events:
        at_s += 7.0
        name = f"p-{uids[n]}"
        gone = pod(uid=name, name=name, phase="Failed", disruption="DeletionByPodGC")
        match what:
            case "lost" | "told again":
                for _ in range(1 + (what == "told again")):
                    run = watched_run.with_pod(run, gone, node_ready=False, now_s=at_s)
                run = watched_run.without_pod(run, name, node_ready=False, now_s=at_s + 1)
                uids[n] = max(uids) + 1
                restarts[n] = 0
                fresh = pod(uid=f"p-{uids[n]}", name=f"p-{uids[n]}")
                run = watched_run.with_pod(run, fresh, node_ready=True, now_s=at_s + 2)
            case "trainer lost":
                told = Incident(id=int(at_s), kind=IncidentKind.TRAINER_LOST, at_s=at_s)
                said = Heartbeat(
                    run="team/train-u-1",
                    attempt=10 * attempt,
                    openings=attempt,
                    phase=At.WAITING,
                    incidents=(told,),
                )
                run, _ = watched_run.with_report(run, hello(uids[n]), said, at_s)
            case "restarted":
                seq += 1
                run = beat(run, uids[0], attempt=attempt, at_s=at_s - 1.0, seq=seq)
                restarts[n] += 1
                seen = pod(uid=name, name=name, restarts=restarts[n], ending=replace(ended(1), at_s=at_s))
                for _ in range(2):
                    run = watched_run.with_pod(run, seen, node_ready=True, now_s=at_s)
            case "opened":
                attempt, seq = attempt + 1, seq + 1
                run = beat(run, uids[0], attempt=attempt, at_s=at_s, seq=seq)
            case "time":
                at_s += 30.0
            case "controller":
                document = run_record.document(run) | {"status": run_record.status(run, at_s)}
                run = run_record.run_of(document)
                for place in range(3):
                    alive = pod(uid=f"p-{uids[place]}", name=f"p-{uids[place]}", restarts=restarts[place])
                    run = watched_run.with_pod(run, alive, node_ready=True, now_s=at_s)
        run = judged(run, at_s)
        counted = sum(each.restores for each in run.incidents.causes.values())
        assert counted <= attempt - 1
        assert run.incidents.lossy <= counted
    run = beat(run, uids[0], attempt=attempt, at_s=at_s + 1, seq=seq)
    run = judged(judged(run, at_s + 2), at_s + 60)
    counted = sum(each.restores for each in run.incidents.causes.values())
    assert counted == attempt - 1
    assert run.incidents.evidence.restores == pytest.approx(counted, rel=0.01)
