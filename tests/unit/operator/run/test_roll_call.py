"""Which ranks of a group are there, and what the run's status and phase make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deltashard_operator.fleet.sidecar_report import Commit, Heartbeat, Hello, Rank, StepSample
from deltashard_operator.fleet.sidecar_report import Phase as At
from deltashard_operator.run import condition, judgement, roll_call, run_record, watched_run
from deltashard_operator.run.observed_object import NodeView, PodView, Wish, Workload
from deltashard_operator.run.phase import Phase
from deltashard_operator.run.watched_run import Run
from deltashard_proto.v1 import trainer_pb2 as pb

NOW_S = 1_000_000.0
WORKLOAD = Workload(namespace="team", kind="Job", name="train", uid="u-1", api_version="batch/v1")
NODES = {"node-a": NodeView(name="node-a", ready=True)}


def pod(n: int, **more: object) -> PodView:
    fields: dict[str, object] = {
        "phase": "Running",
        "started": True,
        "node": "node-a",
        "index": str(n),
    } | more
    return PodView(uid=f"p-{n}", name=f"train-{n}", workload=WORKLOAD, wish=Wish(), **fields)  # type: ignore[arg-type]


def hello(n: int) -> Hello:
    return Hello(namespace="team", pod=f"train-{n}", pod_uid=f"p-{n}", process=f"s-{n}", workload_uid="u-1")


def said(
    n: int, *, step: int = 50, size: int = 4, phase: At = At.TRAINING, attempt: int = 7, **more: object
) -> Heartbeat:
    ranks = () if phase in {At.WAITING, At.CLOSED} else (Rank(rank=n, world_size=size, step=step),)
    policy = pb.Policy(every_s=60.0, encoding="q8")
    return Heartbeat(
        run="team/train-u-1", phase=phase, attempt=attempt, openings=1, ranks=ranks, policy=policy, **more
    )  # type: ignore[arg-type]


def heard(run: Run, n: int, beat: Heartbeat) -> Run:
    return watched_run.with_report(watched_run.with_connected(run, hello(n)), hello(n), beat, NOW_S)[0]


def group(pods: int = 4) -> Run:
    """All of them train."""
    run = Run(workload=WORKLOAD)
    for n in range(pods):
        run = watched_run.with_pod(run, pod(n), node_ready=True, now_s=NOW_S)
    for n in range(pods):
        run = heard(run, n, said(n, size=pods))
    return judged(run)


def judged(run: Run) -> Run:
    return judgement.judged(run, NODES, NOW_S)[0]


def test_all_are_there() -> None:
    run = group()
    assert roll_call.of_run(run) == roll_call.RollCall(expected=4, present=4)
    assert roll_call.of_run(run).complete
    assert run.phase is Phase.TRAINING
    status = run_record.status(run, NOW_S)
    assert (status["ranks"], status["worldSize"], status["ranksPresent"]) == ("4/4", 4, 4)
    assert "slowestPod" not in status


def sampled(run: Run, n: int, *samples: tuple[int, int], **more: Any) -> Run:
    """After a heartbeat of pod n that has looked at its rank at these times."""
    found = tuple(StepSample(at_s=at_s, steps={n: step}) for at_s, step in samples)
    return heard(run, n, replace(said(n, **more), samples=found))


def test_the_one_that_is_behind_is_named_by_what_all_looked_at_in_one_moment() -> None:
    """Not by the steps of heartbeats, which are of different times."""
    run = sampled(group(), 0, (100, 40), (110, 80), (120, 120), step=500)
    for n in (1, 3):
        run = sampled(run, n, (110, 80), (120, 120), step=120)
    assert run_record.status(run, NOW_S).get("stepSkew") is None, "pod 2 has not said yet"
    run = sampled(run, 2, (100, 40), (110, 77), step=90)
    status = run_record.status(run, NOW_S)
    assert (status["stepSkew"], status["slowestRank"], status["slowestPod"]) == (3, 2, "train-2")
    run = sampled(run, 2, (110, 77), (120, 120), step=130)
    status = run_record.status(run, NOW_S)
    assert status["stepSkew"] == 0
    assert "slowestPod" not in status


def test_a_replacement_that_waits_for_its_node_is_nobody_yet() -> None:
    """Pending, for as long as an image is pulled: the ranks are not there because a pod object is."""
    run = watched_run.without_connected(group(), hello(3))
    run = judged(watched_run.without_pod(run, "p-3", node_ready=True, now_s=NOW_S))
    fresh = replace(pod(3, phase="Pending", started=False), uid="q-3")
    run = judged(watched_run.with_pod(run, fresh, node_ready=True, now_s=NOW_S + 1))
    assert run.phase is Phase.RECOVERING
    run = judged(watched_run.with_pod(run, replace(fresh, started=True), node_ready=True, now_s=NOW_S + 2))
    assert run.phase is Phase.RECOVERING, "it runs, and nobody trains in it yet"


def test_a_pod_on_a_lost_node_holds_no_rank() -> None:
    run = watched_run.without_connected(group(), hello(3))
    nodes = {**NODES, "node-b": NodeView(name="node-b", ready=False)}
    run = watched_run.with_pod(run, pod(3, node="node-b"), node_ready=False, now_s=NOW_S)
    run, _ = judgement.judged(run, nodes, NOW_S)
    assert run.phase is Phase.RECOVERING


def test_a_pod_that_waits_to_join_a_complete_group_stops_nobody() -> None:
    """Three of at most four train, or one alone where the workload says `runs: one`."""
    for size in (3, 1):
        run = group(size)
        run = watched_run.with_pod(run, pod(size), node_ready=True, now_s=NOW_S)
        run = judged(heard(run, size, said(size, phase=At.WAITING)))
        assert (roll_call.of_run(run).sentence, run.phase) == (f"{size}/{size}", Phase.TRAINING)


def test_ranks_of_an_attempt_that_is_over_are_not_counted() -> None:
    run = heard(group(), 3, said(3, attempt=5))
    for n in range(3):
        run = heard(run, n, said(n, attempt=9))
    assert roll_call.of_run(run).sentence == "3/4"


def test_a_pod_that_goes_leaves_its_run_with_three_of_four() -> None:
    run = watched_run.without_connected(group(), hello(3))
    run = judged(watched_run.without_pod(run, "p-3", node_ready=True, now_s=NOW_S))
    assert roll_call.of_run(run).sentence == "3/4"
    assert run.phase is Phase.RECOVERING
    ready = condition.by_type(run.conditions)["Ready"]
    assert "3 of 4 ranks are there" in ready.message
    for n in range(3):  # torchrun ends the others, and waits for the fourth
        run = heard(run, n, said(n, phase=At.WAITING))
    run = judged(run)
    assert (roll_call.of_run(run).sentence, run.phase) == ("0/4", Phase.RECOVERING)
    back = run_record.run_of(run_record.document(run) | {"status": run_record.status(run, NOW_S)})
    assert back.progress.world_size == 4
    # Three come together without it: they are complete.
    for n in range(3):
        run = heard(run, n, said(n, size=3, attempt=20))
    run = judged(run)
    assert (roll_call.of_run(run).sentence, run.phase) == ("3/3", Phase.TRAINING)


@pytest.mark.parametrize("unheard", ["the stream broke", "it has not connected yet"])
def test_who_is_not_heard_is_not_taken_for_lost(unheard: str) -> None:
    """A controller that starts, or a stream that is renewed."""
    run = watched_run.without_connected(group(), hello(1))
    if unheard == "it has not connected yet":
        run = replace(run, reports={uid: each for uid, each in run.reports.items() if uid != "p-1"})
    run = judged(run)
    assert roll_call.of_run(run).sentence == "3/4"
    assert (roll_call.of_run(run).missing, run.phase) == (False, Phase.TRAINING)


def test_ranks_that_closed_first_are_not_missed() -> None:
    run = judged(heard(group(), 0, said(0, phase=At.CLOSED)))
    assert run.phase is Phase.TRAINING


def test_of_pods_that_are_runs_of_their_own_nobody_is_expected() -> None:
    run = Run(workload=WORKLOAD)
    for n in range(2):
        own = replace(pod(n), wish=Wish(runs="per-pod"))
        run = watched_run.with_pod(run, own, node_ready=True, now_s=NOW_S)
        assert roll_call.of_run(run) == roll_call.NOBODY
        run = heard(run, n, replace(said(0, size=1), run=f"team/train-u-1-{n}"))
    run = judged(run)
    assert (roll_call.of_run(run), run.phase) == (roll_call.NOBODY, Phase.TRAINING)
    assert "ranks" not in run_record.status(run, NOW_S)


def test_what_partial_recoveries_and_stalls_cost_is_shown_and_read_back() -> None:
    commit = Commit(seq=9, attempt=7, step=50)
    run = heard(
        group(), 3, said(3, last_commit=commit, stall_s=0.125, lost_share=0.00075, partial_recoveries=2)
    )
    status = run_record.status(run, NOW_S)
    assert (status["stallSeconds"], status["lostSamplesShare"], status["partialRecoveries"]) == (
        "0.125",
        "0.00075",
        2,
    )
    back = run_record.run_of(run_record.document(run) | {"status": status}).progress
    assert (back.stall_s, back.lost_share, back.partial_recoveries) == (0.125, 0.00075, 2)
