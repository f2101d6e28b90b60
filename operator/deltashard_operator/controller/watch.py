"""Watch handlers: update runs from watched objects.

Handlers update and mark the run of the object; they draw no conclusions and never block. A pod that is seen before its
Job waits for the Job, because only the Job names the owner. It does not wait if the API shows that the watch will not
deliver the Job: a Job older than the webhook lacks the label, and one that ended long ago is ignored. In that case only
live pods are kept. A known pod stays with its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from deltashard_operator.api.policy_cache import policy_kinds
from deltashard_operator.controller.run_store import RunStore
from deltashard_operator.controller.status import ALL
from deltashard_operator.fleet.report import SaveOrder
from deltashard_operator.kube.call import ApiUnavailable, object_at
from deltashard_operator.kube.cluster_name import MANAGED_BY, MANAGED_BY_VALUE
from deltashard_operator.kube.object_watch import ObjectKey, WatchedKind
from deltashard_operator.run import observed_object, watched_run
from deltashard_operator.run.observed_object import ABSENT_S, JobView, PodView, Workload
from deltashard_operator.run.watched_run import WatchedRun

SELECTOR = f"{MANAGED_BY}={MANAGED_BY_VALUE}"
TICK_S = 0.25
RESOLVE_INTERVAL_S = 5.0
ABSENT_JOB_TTL_S = 600.0
"""Time for which the absence of a Job is cached."""
DRAIN_SAVE_TIMEOUT_S = 60.0
"""Deadline of the save that is ordered before the end of a node."""
NO_RUN = ("", "")
Document = Mapping[str, Any]
_log = structlog.get_logger("deltashard.controller")


class WatchHandlers:
    """Callbacks of `ObjectWatch`."""

    def __init__(
        self,
        run_store: RunStore,
        *,
        keep_finished_s: float,
        disruption_taints: Container[str] = (),
        more: Sequence[WatchedKind] = (),
    ) -> None:
        """`disruption_taints`: keys of taints that announce the end of a node. `more`: kinds with other handlers."""
        self._run_store = run_store
        self._wall = run_store.wall
        self._keep_finished_s = keep_finished_s
        self._disruption_taints = disruption_taints
        self._waiting: dict[str, dict[str, PodView]] = {}
        """Pods that were seen before their Job: Job UID -> pod UID -> pod."""
        self._absent_jobs: dict[str, float] = {}
        """UID of a Job that the watch will not deliver -> end of the cached answer."""
        self._listed = False
        self.kinds = (
            WatchedKind("jobs", "/apis/batch/v1/jobs", self.on_job, self.on_job_deleted, SELECTOR),
            WatchedKind("pods", "/api/v1/pods", self.on_pod, self.on_pod_deleted, SELECTOR),
            WatchedKind("nodes", "/api/v1/nodes", self.on_node, self.on_node_deleted, namespaced=False),
            *policy_kinds(self.on_policy, lambda key, _last: self._run_store.set_policy(key[:2], None)),
            WatchedKind("runs", ALL, lambda _run: None, self.on_run_deleted),
            *more,
        )
        self.synced = False
        """Whether the initial lists are complete. Before, an earlier controller's runs are not reconciled."""

    def on_job(self, document: Document) -> None:
        job = observed_object.job_of(document)
        entry = self._run_store.by_key.get(job.workload.key)
        if entry is None:
            if self._is_expired(job):
                self._mark_job_absent(job.uid)
                return
            entry = self._run_store.add(WatchedRun(workload=job.workload, requested=job.requested))
        self._run_store.jobs[job.uid] = job.workload.key
        self._run_store.set(entry, watched_run.with_job(entry.run, job, self._wall()))
        for pod in self._waiting.pop(job.uid, {}).values():
            self._handle_pod(pod)

    def on_job_deleted(self, job: ObjectKey, last: Document | None) -> None:
        entry = self._run_store.by_key.get(self._run_store.jobs.pop(job.uid, NO_RUN))
        if entry is None:
            return
        run, now_s = entry.run, self._wall()
        if last is not None:  # has the outcome
            run = watched_run.with_job(run, observed_object.job_of(last), now_s)
        self._run_store.set(entry, watched_run.without_job(run, job.uid, now_s))

    def _is_expired(self, job: JobView) -> bool:
        """Return whether an unknown Job ended so long ago that its CheckpointRun has been deleted."""
        return bool(job.outcome) and self._wall() - job.ended_at_s > self._keep_finished_s

    def on_pod(self, document: Document) -> None:
        self._handle_pod(observed_object.pod_of(document))

    def _handle_pod(self, seen: PodView) -> None:
        pod = self._with_owner(seen)
        if pod is not None:
            self._set_pod(pod)
        elif self._wall() >= self._absent_jobs.get(seen.job_uid, 0.0):
            self._waiting.setdefault(seen.job_uid, {})[seen.uid] = seen
        elif seen.alive:
            self._set_pod(seen)

    def _with_owner(self, pod: PodView) -> PodView | None:
        """Return the pod with its run's workload, or None while its Job is unknown."""
        known = self._run_store.pods.get(pod.uid)
        entry = self._run_store.by_key.get(known or self._run_store.jobs.get(pod.job_uid, NO_RUN))
        job = entry.run.jobs.get(pod.job_uid) if entry is not None else None
        if job is not None:
            return observed_object.with_job(pod, job)
        if known is not None and entry is not None:
            before = entry.run.pods.get(pod.uid, pod)
            return replace(pod, workload=entry.run.workload, index=before.index)
        return None if pod.job_uid and pod.workload.key not in self._run_store.by_key else pod

    def _set_pod(self, pod: PodView) -> None:
        now_s = self._wall()
        entry = self._run_store.by_key.get(pod.workload.key)
        if entry is None:
            ended_at_s = pod.ending.at_s if pod.ending is not None and not pod.alive else now_s
            if now_s - ended_at_s > self._keep_finished_s:
                return
            entry = self._run_store.add(WatchedRun(workload=pod.workload, requested=pod.requested))
        self._run_store.pods[pod.uid] = pod.workload.key
        ready = self._node_ready(pod)
        self._run_store.set(entry, watched_run.with_pod(entry.run, pod, node_ready=ready, now_s=now_s))

    def on_pod_deleted(self, key: ObjectKey, last: Document | None) -> None:
        for pods in self._waiting.values():
            pods.pop(key.uid, None)
        if last is not None and key.uid in self._run_store.pods:  # has the cause of its end
            self.on_pod(last)
        entry = self._run_store.by_key.get(self._run_store.pods.pop(key.uid, NO_RUN))
        self._run_store.queue.forget(("pod", key.uid))
        pod = entry.run.pods.get(key.uid) if entry is not None else None
        if entry is not None and pod is not None:
            ready, now_s = self._node_ready(pod), self._wall()
            self._run_store.set(
                entry, watched_run.without_pod(entry.run, key.uid, node_ready=ready, now_s=now_s)
            )

    def _node_ready(self, pod: PodView) -> bool:
        node = self._run_store.nodes.get(pod.node)
        return node is not None and node.ready

    def on_node(self, document: Document) -> None:
        """Handle a new or changed node. Before its end, the runs with pods on it are ordered to save."""
        node = observed_object.node_of(document, self._disruption_taints)
        before = self._run_store.nodes.get(node.name)
        self._run_store.nodes[node.name] = node
        if not node.ending or before is None or before.ending:
            return
        now_s = self._wall()
        order = SaveOrder(id=f"drain/{node.name}/{now_s:.0f}", reason="drain")
        for entry in self._run_store:
            there = any(each.node == node.name and each.alive for each in entry.run.pods.values())
            if there and not entry.run.finished:
                self._run_store.orders.open(entry.run.key, order, now_s + DRAIN_SAVE_TIMEOUT_S)
                self._run_store.nudge(entry)
                _log.info("run.save_before_drain", namespace=entry.run.workload.namespace, node=node.name)

    def on_node_deleted(self, node: ObjectKey, _last: Document | None) -> None:
        self._run_store.nodes.pop(node.name, None)

    def on_policy(self, document: Document) -> None:
        """Handle a new or changed policy of a namespace or the cluster."""
        metadata = document["metadata"]
        self._run_store.set_policy((metadata.get("namespace", ""), metadata["name"]), document)

    def on_run_deleted(self, record: ObjectKey, _last: Document | None) -> None:
        for entry in list(self._run_store):
            if entry.object_version is not None and entry.object_version["uid"] == record.uid:
                if entry.run.finished:
                    self._run_store.drop(entry.run.key)
                else:
                    self._run_store.record_deleted(entry)

    def on_list(self) -> None:
        self._listed = True

    async def resolve_forever(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_INTERVAL_S if self.synced else TICK_S)
            await self.resolve_waiting()

    async def resolve_waiting(self) -> None:
        """Find the owners of pods whose Job is unknown, then finish runs that ended unobserved."""
        if not self._listed:
            return
        now_s = self._wall()
        self._absent_jobs = {uid: until_s for uid, until_s in self._absent_jobs.items() if now_s < until_s}
        for uid, pods in list(self._waiting.items()):
            pod = next(iter(pods.values()), None)
            try:
                if pod is None or not await self._will_appear(pod.workload):
                    self._mark_job_absent(uid)
            except ApiUnavailable as error:  # continue with the other Jobs
                _log.warning("controller.job_lookup_failed", error=str(error))
        there = {"Job": self._run_store.jobs, "Pod": self._run_store.pods}
        for entry in list(self._run_store):
            run, workload = entry.run, entry.run.workload
            known = run.jobs or workload.uid in self._waiting or any(each.alive for each in run.pods.values())
            if run.finished or known or (self.synced and self._wall() - run.last_seen_s < ABSENT_S):
                continue
            if workload.native in there and workload.uid not in there[workload.native]:
                self._run_store.set(entry, watched_run.finished(run, "Deleted", self._wall()))
        self.synced = True

    async def _will_appear(self, job: Workload) -> bool:
        """Return whether the watch will deliver this Job: it exists, has the label, and did not end long ago."""
        document = await object_at(self._run_store.call, job.path)
        if document is None or document["metadata"]["uid"] != job.uid:
            return False
        labels = document["metadata"].get("labels") or {}
        return labels.get(MANAGED_BY) == MANAGED_BY_VALUE and not self._is_expired(
            observed_object.job_of(document)
        )

    def _mark_job_absent(self, uid: str) -> None:
        """Cache that the watch will not deliver this Job, and process its waiting pods without it."""
        self._absent_jobs[uid] = self._wall() + ABSENT_JOB_TTL_S
        for pod in self._waiting.pop(uid, {}).values():
            if pod.alive:
                self._set_pod(pod)
