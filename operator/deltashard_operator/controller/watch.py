"""What the API says: watched objects become facts of runs, and what went while nobody looked is found.

Handlers put facts into the run they are of, which marks it; they draw no conclusions and never wait.

Whose a pod is, its ownerReference says; whose the Job is that it names, the Job. A pod that is seen before its Job
waits for it, until a sweep finds that no such Job is to come (one that was made before the webhook has not our
label). Once known, a pod stays with its run.

A watch that begins anew shows what is there and not what went; so after every list, and every ten minutes, a `sweep`
asks for the names of all Jobs and pods and drops what is not among them. A new controller's first sweeps tell it, too,
when it has seen all that there is, policies included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog

from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.run_book import Entries
from deltashard_operator.kube.call import METADATA, ApiUnavailable, Caller
from deltashard_operator.kube.cluster_name import MANAGED_BY, MANAGED_BY_VALUE
from deltashard_operator.run import observed_object, run_record, watched_run
from deltashard_operator.run.observed_object import PodView
from deltashard_operator.run.watched_run import Run

SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"
JOBS = "/apis/batch/v1/jobs"
PODS = "/api/v1/pods"
POLICIES = "/apis/deltashard.io/v1alpha1/checkpointpolicies"
TICK_S = 0.25
SWEEP_S = 600.0
SWEEP_SOON_S = 1.5
SYNC_TRIES = 15
"""Sweeps after which a new controller judges although something listed was not seen."""
Document = Mapping[str, Any]
_log = structlog.get_logger("deltashard.controller")


class Watches:
    """Handlers of watched objects, and sweeps."""

    def __init__(
        self,
        books: Entries,
        *,
        call: Caller,
        metrics: ControllerMetrics,
        keep_finished_s: float,
        wall: Callable[[], float],
    ) -> None:
        self._books = books
        self._call = call
        self._metrics = metrics
        self._keep_finished_s = keep_finished_s
        self._wall = wall
        self._waiting: dict[str, dict[str, Document]] = {}
        """Job UID -> its pods that came before it, by UID."""
        self._sweep_at_s = 0.0
        self._begun = False
        self._sync_tries = 0
        self.synced = False
        """Whether all that there is was seen: before, no run of an earlier controller's is judged and none directed."""

    def begin(self) -> None:
        """What was known before is in the books: sweep from now on."""
        self._begun = True
        self._sweep_at_s = self._wall() + SWEEP_SOON_S

    def on_job(self, kind: str | None, document: Document) -> None:
        """A Job came, changed or went (`DELETED`)."""
        now_s = self._wall()
        job = observed_object.job_of(document)
        key = job.workload.key
        entry = self._books.by_key.get(key)
        if kind == "DELETED":
            if entry is not None and job.uid in entry.run.jobs:  # the last word of it says how it ended
                self._books.set(entry, watched_run.with_job(entry.run, job, now_s))
            self._forget_job(job.uid, now_s)
            return
        if entry is None:
            if self._is_old(job.ended_at_s if job.outcome else now_s, now_s):
                return
            entry = self._books.enter(Run(workload=job.workload, wish=job.wish))
        self._books.jobs[job.uid] = key, now_s
        self._books.set(entry, watched_run.with_job(entry.run, job, now_s))
        for waiting in self._waiting.pop(job.uid, {}).values():
            self.on_pod(None, waiting)

    def _forget_job(self, uid: str, now_s: float) -> None:
        known = self._books.jobs.pop(uid, None)
        entry = self._books.by_key.get(known[0]) if known is not None else None
        if entry is not None:
            self._books.set(entry, watched_run.without_job(entry.run, uid, now_s))

    def _is_old(self, ended_at_s: float, now_s: float) -> bool:
        """Whether something that nobody knows ended so long ago that its CheckpointRun is removed already."""
        return now_s - ended_at_s > self._keep_finished_s

    def on_pod(self, kind: str | None, document: Document) -> None:
        """A pod came, changed or went."""
        pod = self._owned(observed_object.pod_of(document))
        if pod is not None:
            self._on_pod(kind, pod)
            return
        waiting = self._waiting.setdefault(observed_object.workload_of(document).uid, {})
        if kind == "DELETED":
            waiting.pop(document["metadata"]["uid"], None)
        else:
            waiting[document["metadata"]["uid"]] = document
            self.sweep_soon(PODS)

    def _owned(self, pod: PodView) -> PodView | None:
        """The pod as its run's; None while its Job is not known."""
        known = self._books.pods.get(pod.uid)
        job_known = self._books.jobs.get(pod.job_uid)
        entry = self._books.by_key.get((known or job_known or (("", ""),))[0])
        job = entry.run.jobs.get(pod.job_uid) if entry is not None else None
        if job is not None:
            return observed_object.of_job_pod(pod, job)
        if known is not None and entry is not None:
            before = entry.run.pods.get(pod.uid, pod)
            return replace(pod, workload=entry.run.workload, index=before.index)
        return None if pod.job_uid and pod.workload.key not in self._books.by_key else pod

    def _on_pod(self, kind: str | None, pod: PodView) -> None:
        now_s = self._wall()
        key = pod.workload.key
        entry = self._books.by_key.get(key)
        if entry is None:
            ended_at_s = pod.ending.at_s if pod.ending is not None and not pod.alive else now_s
            if kind == "DELETED" or self._is_old(ended_at_s, now_s):
                return
            entry = self._books.enter(Run(workload=pod.workload, wish=pod.wish))
        ready = self._node_ready(pod)
        if entry.reloaded_s and pod.uid not in entry.run.pods:
            self._books.set(entry, _known_before(entry.run, pod, entry.reloaded_s))
        if kind == "DELETED":
            if pod.uid in entry.run.pods:  # the last word of it says how it went
                self._books.set(entry, watched_run.with_pod(entry.run, pod, node_ready=ready, now_s=now_s))
            self._forget_pod(pod.uid, now_s)
            return
        self._books.pods[pod.uid] = key, now_s
        self._books.set(entry, watched_run.with_pod(entry.run, pod, node_ready=ready, now_s=now_s))

    def _forget_pod(self, uid: str, now_s: float) -> None:
        known = self._books.pods.pop(uid, None)
        entry = self._books.by_key.get(known[0]) if known is not None else None
        pod = entry.run.pods.get(uid) if entry is not None else None
        if entry is None or pod is None:
            return
        ready = self._node_ready(pod)
        self._books.set(entry, watched_run.without_pod(entry.run, uid, node_ready=ready, now_s=now_s))

    def _node_ready(self, pod: PodView) -> bool:
        node = self._books.nodes.get(pod.node)
        return node is not None and node.ready

    def on_node(self, kind: str | None, document: Document) -> None:
        """A node came, changed or went."""
        node = observed_object.node_of(document)
        if kind == "DELETED":
            self._books.nodes.pop(node.name, None)
            return
        before = self._books.nodes.get(node.name)
        self._books.nodes[node.name] = node
        if node.cordoned and before is not None and not before.cordoned:
            self._save_before_drain(node.name)

    def _save_before_drain(self, node: str) -> None:
        """Its evictions are to come: a checkpoint now leaves them less to save within the grace period."""
        for entry in self._books:
            there = any(each.node == node and each.alive for each in entry.run.pods.values())
            if there and not entry.run.finished and self._books.fleet is not None:
                told = self._books.fleet.save_now(entry.run.key, "drain", urgent=False, deadline_s=0.0)
                _log.info(
                    "run.save_before_drain", namespace=entry.run.workload.namespace, node=node, told=told
                )

    def on_policy(self, kind: str | None, document: Document) -> None:
        """A CheckpointPolicy came, changed or went."""
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        spec = document.get("spec") or {}
        if kind == "DELETED":
            self._books.specs.pop(key, None)
        elif self._books.specs.get(key) != spec:
            self._books.specs[key] = spec
        else:
            return
        self._books.serial += 1
        for each in self._books:
            if (each.run.workload.namespace, each.run.wish.policy) == key:
                self._books.mark(each.run.key)

    def on_run(self, kind: str | None, document: Document) -> None:
        """A CheckpointRun changed: of interest is only that somebody deleted one."""
        if kind != "DELETED":
            return
        run = run_record.run_of(document)
        entry = self._books.by_key.get(run.key)
        if entry is None or entry.served is None or entry.served.uid != document["metadata"]["uid"]:
            return
        if entry.run.finished:
            self._books.drop(run.key)
        else:
            self._books.lost(entry)

    # -- what went while nobody looked ------------------------------------------------------------------------------

    def sweep_soon(self, path: str) -> None:
        """A list of this path was made: a watch began anew."""
        if path in {JOBS, PODS} and self._begun:
            self._sweep_at_s = min(self._sweep_at_s, self._wall() + SWEEP_SOON_S)

    async def sweep_for_ever(self) -> None:
        """Sweep when it is due."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._wall() < self._sweep_at_s:
                continue
            self._sweep_at_s = self._wall() + SWEEP_S
            try:
                await self.sweep()
                if not self.synced:
                    self._sweep_at_s = self._wall() + 1.0
            except ApiUnavailable as error:
                self._sweep_at_s = self._wall() + 10 * SWEEP_SOON_S
                _log.warning("controller.sweep_failed", error=str(error))

    async def sweep(self) -> None:
        """Drop what is not there any more; raises `ApiUnavailable`."""
        begun_s = self._wall()
        jobs, pods = [
            {
                each["metadata"]["uid"]
                for each in await self._call.every(path, selector=SELECTOR, accept=METADATA)
            }
            for path in (JOBS, PODS)
        ]
        now_s = self._wall()
        for uid in self._waiting.keys() - jobs:
            for pod in map(observed_object.pod_of, self._waiting.pop(uid).values()):
                if pod.alive:
                    self._on_pod(None, pod)
        gone = [uid for uid, (_, seen_s) in self._books.pods.items() if uid not in pods and seen_s < begun_s]
        for uid in gone:
            self._forget_pod(uid, now_s)
        for uid in [
            uid for uid, (_, seen_s) in self._books.jobs.items() if uid not in jobs and seen_s < begun_s
        ]:
            self._forget_job(uid, now_s)
        for entry in list(self._books):
            run = entry.run
            there = {"Job": jobs, "Pod": pods}.get(run.workload.native)
            known = run.jobs or any(each.alive for each in run.pods.values())
            if there is None or run.finished or known or run.workload.uid in there:
                continue
            if run.seen_s < begun_s:
                self._books.set(entry, watched_run.finished(run, "Deleted", now_s))
        self._metrics.sweeps.inc()
        if gone:
            _log.info("controller.swept", pods=len(gone))
        if not self.synced:
            self._sync_tries += 1
            listed = await self._call.every(POLICIES, accept=METADATA)
            specs = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in listed}
            # Watches bring what the lists name, but for what ended so long ago that nobody keeps it.
            seen = (
                jobs <= set(self._books.jobs)
                and pods <= set(self._books.pods)
                and specs <= set(self._books.specs)
            )
            self.synced = seen or self._sync_tries >= SYNC_TRIES


def _known_before(run: Run, pod: PodView, written_s: float) -> Run:
    """The run, a pod's end or restarts marked as counted that the status before was written after."""
    if pod.uid in run.restarts or pod.ending is None or not 0 < pod.ending.at_s <= written_s:
        return run
    lost = run.lost if pod.alive else run.lost | {pod.uid}
    return replace(run, restarts={**run.restarts, pod.uid: pod.restarts}, lost=lost)
