"""Partial recovery over pods: a pod of a group is lost without notice, and the others keep their rows."""

from __future__ import annotations

import pytest

from tests.cluster.scenario.bench import NO_TIMER, ScenarioBench
from tests.cluster.scenario.group import TABLE_ROWS, Round, TrainingGroup, indexed_job

pytestmark = pytest.mark.timeout(900, func_only=True)

WORLD, PLANNED = 3, 2000
FIRST, SECOND = (20, 40, 2), (65, 130, 0)
"""(step of the checkpoint, last step of all ranks, rank that is lost before it ends that step)."""
LAST_SAVE = 150
VOLUME = "/staged"


def test_survivors_keep_rows_after_pod_loss(bench: ScenarioBench) -> None:
    """Pod 2 is lost, and the other launchers stay. Then pod 0 with the rendezvous is lost: the other containers restart.

    A survivor's rows are in a volume of its pod. The lost rank has the rows of the newest checkpoint. The CheckpointRun
    reports the cost: the share of lost samples.
    """
    group = indexed_job(
        bench,
        "keep",
        pods=WORLD,
        notes=NO_TIMER,
        volume=VOLUME,
        env={
            "DELTASHARD_STAGED_DIR": VOLUME,
            "PLANNED_STEPS": f"{PLANNED}",
            "SAVE_AT": f"{FIRST[0]} {SECOND[0]} {LAST_SAVE}",
            "PAUSE_AT": f"{FIRST[1]}:{FIRST[2]} {SECOND[1]}:{SECOND[2]}",
        },
    )
    begun = group.wait_round(world_size=WORLD)
    second = lose_pod_at(group, begun, *FIRST)
    lost = portion(*FIRST)
    assert second.ranks[0]["pls"] == pytest.approx(lost)
    assert [group.job.container(pod, "trainer")["restartCount"] for pod in second.pods] == [0] * WORLD

    status = group.job.wait_status(
        "the next checkpoint records the loss", lambda each: each.get("partialRecoveries") == 1
    )
    assert float(status["lostSamplesShare"]) == pytest.approx(lost, rel=1e-5)
    snapshots = [each["stall_s"] for each in group.events("snapshot") if each["step"] == SECOND[0]]
    assert len(snapshots) == WORLD
    assert 0 < float(status["stallSeconds"]) <= max(snapshots) * 1.01

    third = lose_pod_at(group, second, *SECOND)
    assert [group.job.container(pod, "trainer")["restartCount"] > 0 for pod in third.pods] == [
        False,
        True,
        True,
    ]
    lost += portion(*SECOND)
    assert third.ranks[0]["pls"] == pytest.approx(lost)
    status = group.job.wait_status("both are counted", lambda each: each.get("partialRecoveries") == 2)
    assert float(status["lostSamplesShare"]) == pytest.approx(lost, rel=1e-5)
    group.wait_step(LAST_SAVE + 20, attempt=third.attempt)
    group.assert_every_sample_once()


def lose_pod_at(group: TrainingGroup, before: Round, saved: int, at: int, rank: int) -> Round:
    """Lose a pod after step `at`, where all ranks wait; return the next round, in which all others kept their rows."""
    job, pod = group.job, before.pods[rank]
    group.bench.wait_commits(job, beyond=saved - 1)
    group.bench.event_server.wait(
        job.key,
        lambda each: each["kind"] == "paused" and each["pod"] == pod and each["step"] == at,
        timeout_s=180,
        what=f"{pod} pauses at step {at}",
    )
    for other in range(WORLD):  # their next collective waits for the paused rank
        group.wait_rank_step(other, at, attempt=before.attempt)
    group.lose_pod(before, rank)
    back = group.wait_round(after=before.attempt, world_size=WORLD)
    assert [now != then for now, then in zip(back.pods, before.pods, strict=True)] == [
        each == rank for each in range(WORLD)
    ]
    group.assert_kept(back, before, lost=rank, at=at, saved=saved)
    return back


def portion(saved: int, at: int, rank: int) -> float:
    """Return PLS of one recovery: the lost fraction of the planned steps, times the rank's share of rows, in equal blocks."""
    held = 0
    for rows in TABLE_ROWS.values():
        block = -(-rows // WORLD)
        held += min(block, rows - rank * block)
    return (at - saved) / PLANNED * held / sum(TABLE_ROWS.values())
