"""Removes finished runs' bytes where their policy says so: makes the Job that does it, and reads what came of it.

The controller has no credentials of any store: it makes a Job in the run's namespace (`reclaim_job`), if the chart
gives it the right to. The Job is what is known of a removal: it has the same name for every try, tries again by itself,
and goes a day after its end, whereupon another one is made where the bytes did not go. So a controller that begins
finds the Job of the one before, and none is made twice.

What was true at a look need not be when a Job is made: everything is judged once more just before that (`run.reclaim`),
and the workload itself asked for, since a Job that merely is not watched is not gone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import reclaim_job
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.fleet.report import RunKey
from deltashard_operator.kube.call import object_at
from deltashard_operator.run import observed_object, reclaim
from deltashard_operator.run.reclaim import FAILED, KEPT, REMOVED, REMOVING, WAITING, Reclaim, ReclaimState
from deltashard_operator.run.watched_run import Notice

MOST = 4
"""Jobs of a namespace at work at once."""
_REASONS = {REMOVED: "Reclaimed", KEPT: "ReclaimKept", FAILED: "ReclaimFailed"}


class Reclaimer:
    """Of all runs of a controller."""

    def __init__(self, books: Entries) -> None:
        self._books = books
        self._call, self._wall = books.call, books.wall
        self._making: set[RunKey] = set()

    def look(self, now_s: float) -> None:
        """Judge the finished runs, and follow those whose Job is to be made or looked at."""
        newest = self._books.newest_by_id()
        at_work = self._at_work()
        for entry in self._books:
            run = entry.run
            if not run.finished and run.reclaim is None:
                continue
            continued = newest[run.workload.namespace, run.run_id] is not entry
            found = reclaim.judged(run, self._books.policy_of(run), continued=continued, now_s=now_s)
            state = run.reclaim.state if run.reclaim is not None else WAITING
            if found is None or not found.ready or state is WAITING:
                self._set(entry, found)
            if found is None or b'"finishedAt":' not in entry.written:
                continue  # the next controller is to know the same end of it
            if state is REMOVING:
                self._offer(entry, Rank.COMMIT)
            elif found.ready and state is not WAITING:
                self._offer(entry, Rank.QUIET)
            elif found.ready and at_work[run.workload.namespace] < MOST:
                at_work[run.workload.namespace] += 1
                self._offer(entry, Rank.CONDITION)

    def _at_work(self, but: Entry | None = None) -> Counter[str]:
        """Jobs that remove, or are being made, by namespace."""
        return Counter(
            each.run.workload.namespace
            for each in self._books
            if each.run.key in self._making
            or (each is not but and each.run.reclaim is not None and each.run.reclaim.state is REMOVING)
        )

    def _offer(self, entry: Entry, rank: Rank) -> None:
        self._books.queue.offer(("reclaim", *entry.run.key), rank, partial(self._follow, entry))

    async def _follow(self, entry: Entry) -> None:
        """Make the run's Job, or see what came of it."""
        namespace, name = entry.run.workload.namespace, reclaim_job.job_name(entry.run)
        jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        job = await object_at(self._call, f"{jobs}/{name}")
        if job is None:
            await self._make(entry, jobs, name)
        elif (why := reclaim_job.outcome(job)) is None:
            self._move(entry, REMOVING, f"Job {name} removes the bytes")
        else:
            pods = f"/api/v1/namespaces/{namespace}/pods"
            said = reclaim_job.last_word(
                await self._call.every(pods, selector=f"batch.kubernetes.io/job-name={name}")
            )
            self._move(
                entry, *((FAILED, f"Job {name} failed: {said or why}") if why else reclaim_job.read(said))
            )

    async def _make(self, entry: Entry, jobs: str, name: str) -> None:
        mine = entry.run.workload
        living = bool(mine.native) and observed_object.lives(mine, await object_at(self._call, mine.path))
        # IMPORTANT: nothing is waited for between this look and the request.
        run = entry.run
        policy = self._books.policy_of(run)
        anew, continued = replace(run, reclaim=None), self._books.is_continued(entry)
        judged = reclaim.judged(anew, policy, continued=continued, now_s=self._wall())
        if judged is None or not judged.ready or self._books.by_key.get(run.key) is not entry:
            self._set(entry, judged)
            return
        if living:
            self._move(entry, KEPT, f"{run.workload.called} is there and has not ended")
            return
        if self._at_work(but=entry)[run.workload.namespace] >= MOST:
            return  # what stayed is looked at again in some minutes
        assert isinstance(policy, Policy)
        self._making.add(run.key)
        try:
            made = await self._call("POST", jobs, reclaim_job.manifest(run, policy))
        finally:
            self._making.discard(run.key)
        if made.ok or made.status == 409:
            self._move(entry, REMOVING, f"Job {name} removes the bytes")
        else:
            self._move(entry, FAILED, f"Job {name} could not be made: {made.sentence}")

    def _set(self, entry: Entry, found: Reclaim | None) -> None:
        if found != entry.run.reclaim:
            self._books.set(entry, replace(entry.run, reclaim=found))

    def _move(self, entry: Entry, state: ReclaimState, message: str) -> None:
        before = entry.run.reclaim
        found = reclaim.moved(before, state, message, self._wall())
        self._set(entry, found)
        if state in _REASONS and (before is None or before.state is not state):
            notice = Notice(reason=_REASONS[state], message=found.message, warning=state is not REMOVED)
            entry.notices.append(notice)
            self._books.metrics.reclaims.labels(state.value.lower()).inc()
