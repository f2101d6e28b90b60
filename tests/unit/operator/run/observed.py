"""A Job, a pod and a report as the controller observes them, healthy unless a test changes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from deltashard_operator.fleet.report import Incident, PodState, Rank, Report, RunReport, SidecarIdentity
from deltashard_operator.fleet.report import SidecarPhase as At
from deltashard_operator.run import reconcile, report_change, run_record, watched_run
from deltashard_operator.run.condition import Condition
from deltashard_operator.run.observed_object import (
    ContainerExit,
    JobView,
    NodeView,
    PodView,
    RequestedSettings,
    Workload,
)
from deltashard_operator.run.watched_run import WatchedRun
from deltashard_proto.v1 import trainer_pb2 as pb

TRAIN = Workload(namespace="team", kind="Job", name="train", uid="u-1")
NOW_S = 1_000_000.0
NODES = {"node-a": NodeView(name="node-a", ready=True)}
EVERY = pb.Policy(every_s=60.0, encoding="q8", differential="intermittent")
RUN = "team/train-u-1"
_sequence = itertools.count(1)


def pod(**changes: Any) -> PodView:
    fields: dict[str, Any] = {
        "uid": "p-1",
        "name": "train-x",
        "workload": TRAIN,
        "requested": RequestedSettings(),
        "job_uid": "u-1",
        "node": "node-a",
        "phase": "Running",
        "started": True,
    }
    return PodView(**(fields | changes))


def job(**changes: Any) -> JobView:
    fields: dict[str, Any] = {
        "uid": "u-1",
        "name": "train",
        "workload": TRAIN,
        "requested": RequestedSettings(),
    }
    return JobView(**(fields | changes))


def ended(code: int, reason: str = "Error") -> ContainerExit:
    return ContainerExit(container="trainer", reason=reason, exit_code=code, at_s=NOW_S - 5)


def report(
    uid: str = "p-1", phase: At = At.TRAINING, *, incidents: Iterable[Incident] = (), **more: Any
) -> Report:
    """Return a report that is later than all previous ones.

    `more` contains fields of `SidecarIdentity`, `Report`, `PodState` and `RunReport`. By default the pod has the only rank, and its
    sidecar reports the run's state; `seq`, `step` and `age_s` describe the newest commit.
    """
    step, seq, attempt = more.pop("step", 10), more.pop("seq", 0), more.setdefault("attempt", 1)
    more.setdefault("ranks", (Rank(rank=0, world_size=1, step=step),))
    more.setdefault("attempts_opened", attempt)
    more.setdefault("policy", EVERY)
    newest = pb.Commit(seq=seq, attempt=min(attempt or 1, 1), step=step - 1) if seq else None
    more = {"newest": newest, "newest_age_s": more.pop("age_s", 0.0), "run": RUN} | more

    def of(kind: Any) -> dict[str, Any]:
        return {key: value for key, value in more.items() if key in kind.__dataclass_fields__}

    identity = {
        "namespace": "team",
        "pod": "train-x",
        "workload_uid": "u-1",
        "node": "node-a",
        "pod_uid": uid,
    }
    return Report(
        identity=SidecarIdentity(**{**identity, **of(SidecarIdentity)}),
        process=more.get("process", f"s-{uid}"),
        sequence=more.get("sequence") or next(_sequence),
        pod=PodState(phase=phase, **of(PodState)),
        run=RunReport(**of(RunReport)) if more.get("report_run", True) else None,
        incidents=tuple(incidents),
    )


def apply_report(run: WatchedRun, received: Report, at_s: float = NOW_S) -> WatchedRun:
    return reconciled(report_change.with_report(run, received, at_s)[0], at_s)


def report_reasons(run: WatchedRun, received: Report, at_s: float = NOW_S) -> tuple[WatchedRun, list[str]]:
    """Return the run after a report, and the reasons of its Events."""
    run, first = report_change.with_report(run, received, at_s)
    run, second = reconcile.reconcile(run, NODES, at_s)
    return run, [each.reason for each in (*first, *second)]


def by_type(run: WatchedRun) -> dict[str, Condition]:
    return {each.type: each for each in run.conditions}


def reconciled(run: WatchedRun, at_s: float = NOW_S) -> WatchedRun:
    return reconcile.reconcile(run, NODES, at_s)[0]


def seen(run: WatchedRun, *pods: PodView, at_s: float = NOW_S, node_ready: bool = True) -> WatchedRun:
    for each in pods or (pod(),):
        run = watched_run.with_pod(run, each, node_ready=node_ready, now_s=at_s)
    return run


def training(**more: Any) -> WatchedRun:
    run = seen(watched_run.with_job(WatchedRun(workload=TRAIN), job(), NOW_S))
    return apply_report(run, report(**{"seq": 1} | more))


def reloaded(run: WatchedRun, at_s: float = NOW_S) -> WatchedRun:
    """Return the run as a new controller reads it before it sees a pod."""
    return run_record.run_of(run_record.document(run) | {"status": run_record.status(run, at_s)})


def restarted(run: WatchedRun, at_s: float = NOW_S) -> WatchedRun:
    """Return the run of a new controller that has seen all objects and received no report."""
    reloaded_run = reloaded(run, at_s)
    for each in run.jobs.values():
        reloaded_run = watched_run.with_job(reloaded_run, each, at_s)
    return seen(reloaded_run, *run.pods.values(), at_s=at_s) if run.pods else reloaded_run
