"""Removes the bytes of finished runs if their policy requests it: creates a Job and processes its result.

The controller has no store credentials, so it creates a Job in the run's namespace (`reclaim_job`) if the chart grants
the right. The Job is the only record of a removal: its name is the same for every try, it retries by itself, and it is
deleted a day after its end; then another Job is created if the bytes are still there. A new controller therefore finds
the Job of its predecessor, and no Job is created twice.

Conditions can change before the Job is created, so they are all evaluated again just before that (`run.reclaim`), and
the workload is read from the API, since a Job that is not watched may still exist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import reclaim_job
from deltashard_operator.controller.run_store import RunEntry, RunStore
from deltashard_operator.controller.write_queue import Priority
from deltashard_operator.fleet.report import RunKey
from deltashard_operator.kube.call import object_at
from deltashard_operator.run import observed_object, reclaim
from deltashard_operator.run.reclaim import FAILED, KEPT, REMOVED, REMOVING, WAITING, Reclaim, ReclaimState
from deltashard_operator.run.watched_run import RunEvent

MAX_JOBS = 4
"""Maximum number of active removal Jobs per namespace."""
_REASONS = {REMOVED: "Reclaimed", KEPT: "ReclaimKept", FAILED: "ReclaimFailed"}


class Reclaimer:
    """Removals of all runs of a controller."""

    def __init__(self, run_store: RunStore) -> None:
        self._run_store = run_store
        self._call, self._wall = run_store.call, run_store.wall
        self._creating: set[RunKey] = set()

    def reconcile(self, now_s: float) -> None:
        """Evaluate the finished runs, and queue those whose Job must be created or checked."""
        newest = self._run_store.newest_by_id()
        active_jobs = self._active_jobs()
        for entry in self._run_store:
            run = entry.run
            if not run.finished and run.reclaim is None:
                continue
            continued = newest[run.workload.namespace, run.run_id] is not entry
            found = reclaim.reconcile(run, self._run_store.policy_of(run), continued=continued, now_s=now_s)
            state = run.reclaim.state if run.reclaim is not None else WAITING
            if found is None or not found.ready or state is WAITING:
                self._set(entry, found)
            if found is None or b'"finishedAt":' not in entry.written:
                continue  # a new controller must find the same end time
            if state is REMOVING:
                self._offer(entry, Priority.COMMIT)
            elif found.ready and state is not WAITING:
                self._offer(entry, Priority.LOW)
            elif found.ready and active_jobs[run.workload.namespace] < MAX_JOBS:
                active_jobs[run.workload.namespace] += 1
                self._offer(entry, Priority.CONDITION)

    def _active_jobs(self, but: RunEntry | None = None) -> Counter[str]:
        """Count running and pending removal Jobs by namespace."""
        return Counter(
            each.run.workload.namespace
            for each in self._run_store
            if each.run.key in self._creating
            or (each is not but and each.run.reclaim is not None and each.run.reclaim.state is REMOVING)
        )

    def _offer(self, entry: RunEntry, priority: Priority) -> None:
        self._run_store.queue.offer(("reclaim", *entry.run.key), priority, partial(self._advance, entry))

    async def _advance(self, entry: RunEntry) -> None:
        """Create the run's Job, or process its result."""
        namespace, name = entry.run.workload.namespace, reclaim_job.job_name(entry.run)
        jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        job = await object_at(self._call, f"{jobs}/{name}")
        if job is None:
            await self._create_job(entry, jobs, name)
        elif (why := reclaim_job.outcome(job)) is None:
            self._set_state(entry, REMOVING, f"Job {name} removes the bytes")
        else:
            pods = f"/api/v1/namespaces/{namespace}/pods"
            message = reclaim_job.termination_message(
                await self._call.list_all(pods, selector=f"batch.kubernetes.io/job-name={name}")
            )
            self._set_state(
                entry,
                *((FAILED, f"Job {name} failed: {message or why}") if why else reclaim_job.read(message)),
            )

    async def _create_job(self, entry: RunEntry, jobs: str, name: str) -> None:
        mine = entry.run.workload
        alive = bool(mine.native) and observed_object.is_alive(mine, await object_at(self._call, mine.path))
        # IMPORTANT: no await between this check and the request.
        run = entry.run
        policy = self._run_store.policy_of(run)
        candidate, continued = replace(run, reclaim=None), self._run_store.is_continued(entry)
        latest = reclaim.reconcile(candidate, policy, continued=continued, now_s=self._wall())
        if latest is None or not latest.ready or self._run_store.by_key.get(run.key) is not entry:
            self._set(entry, latest)
            return
        if alive:
            self._set_state(entry, KEPT, f"{run.workload.display_name} still exists and has not ended")
            return
        if self._active_jobs(but=entry)[run.workload.namespace] >= MAX_JOBS:
            return  # retried in some minutes
        assert isinstance(policy, Policy)
        self._creating.add(run.key)
        try:
            made = await self._call("POST", jobs, reclaim_job.manifest(run, policy))
        finally:
            self._creating.discard(run.key)
        if made.ok or made.status == 409:
            self._set_state(entry, REMOVING, f"Job {name} removes the bytes")
        else:
            self._set_state(entry, FAILED, f"Job {name} cannot be created: {made.sentence}")

    def _set(self, entry: RunEntry, found: Reclaim | None) -> None:
        if found != entry.run.reclaim:
            self._run_store.set(entry, replace(entry.run, reclaim=found))

    def _set_state(self, entry: RunEntry, state: ReclaimState, message: str) -> None:
        before = entry.run.reclaim
        found = reclaim.with_state(before, state, message, self._wall())
        self._set(entry, found)
        if state in _REASONS and (before is None or before.state is not state):
            run_event = RunEvent(reason=_REASONS[state], message=found.message, warning=state is not REMOVED)
            entry.events.append(run_event)
            self._run_store.metrics.reclaims.labels(state.value.lower()).inc()
