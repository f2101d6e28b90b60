"""Removes finished runs' bytes where their policy says so: makes the Job that does it, and reads what came of it.

The controller has no credentials of any store: it makes a Job in the run's namespace (`reclaim_job`), if the chart
gives it the right to, and looks at it until it has ended. A Job has the same name for every try, so one that was made
by a controller that died before it could say so is found again, and is never made twice.

What was true at a look need not be when a Job is made: everything is judged once more just before that (`run.reclaim`),
and the workload itself asked for, since a Job that merely is not watched is not gone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import structlog
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.api import workload_policy
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import reclaim_job
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.fleet.report import RunKey
from deltashard_operator.kube.call import ApiUnavailable
from deltashard_operator.run import observed_object, reclaim
from deltashard_operator.run.reclaim import ReclaimState
from deltashard_operator.run.watched_run import Notice

LOOK_S = 2.0
MOST = 4
"""Jobs of a namespace at work at once, so that Jobs which hang keep no other namespace from theirs."""
PAUSE_S = 60.0
"""After a look that could not be had, or that found a workload living."""
_REASONS = {ReclaimState.REMOVED: "Reclaimed", ReclaimState.KEPT: "ReclaimKept"}
_log = structlog.get_logger("deltashard.reclaim")


class Reclaimer:
    """Of all runs of a controller."""

    def __init__(self, books: Entries) -> None:
        self._books = books
        self._call, self._wall = books.call, books.wall
        self._looked_s = float("-inf")
        self._policies: dict[tuple[str, str], Policy | Refusal | None] = {}
        self._serial = -1
        self._held: dict[RunKey, tuple[float, str]] = {}
        """Not to be followed before; and, of a workload that seemed over and lives, what was found."""

    def tick(self) -> None:
        """Judge the finished runs, when it is time, and follow those whose Job is to be made or looked at."""
        now_s = self._wall()
        if abs(now_s - self._looked_s) < LOOK_S:
            return
        self._looked_s = now_s
        self._held = {
            key: (until_s, why)
            for key, (until_s, why) in self._held.items()
            if key in self._books.by_key and (why or now_s < until_s)
        }
        newest = self._books.newest_by_id()
        due: list[Entry] = []
        at_work: Counter[str] = Counter()
        for entry in self._books:
            run = entry.run
            if not run.finished and run.reclaim is None:
                continue
            self._judge(entry, now_s, continued=newest[run.workload.namespace, run.run_id] is not entry)
            found, (until_s, why) = entry.run.reclaim, self._held.get(run.key, (0.0, ""))
            if found is None or entry.served is None:
                continue
            if found.state is ReclaimState.REMOVING:
                at_work[run.workload.namespace] += 1
                self._offer(entry, Rank.COMMIT)
            elif now_s >= until_s and (found.ready or why):
                due.append(entry)
        for entry in sorted(due, key=lambda each: each.run.finished_at_s):
            namespace = entry.run.workload.namespace
            if at_work[namespace] < MOST:
                at_work[namespace] += 1
                self._offer(entry, Rank.CONDITION)

    def _offer(self, entry: Entry, rank: Rank) -> None:
        self._books.queue.offer(("reclaim", *entry.run.key), rank, partial(self._follow, entry))

    def _judge(self, entry: Entry, now_s: float, *, continued: bool) -> None:
        try:
            policy = self._policy_of(entry)
        except DeltashardError:
            return  # the chart's authority is not there yet
        _, objection = self._held.get(entry.run.key, (0.0, ""))
        if isinstance(policy, Refusal):
            objection, policy = f"the policy cannot be used: {policy.what}", None
        found = reclaim.judged(entry.run, policy, objection=objection, continued=continued, now_s=now_s)
        if found != entry.run.reclaim:
            self._books.set(entry, replace(entry.run, reclaim=found))

    def _policy_of(self, entry: Entry) -> Policy | Refusal | None:
        """The run's policy as it is now, read once for all its runs until one changes; or why it cannot be used."""
        if self._serial != self._books.serial:
            self._policies, self._serial = {}, self._books.serial
        name = entry.run.wish.policy
        key = workload_policy.key_of(entry.run.workload.namespace, name)
        if key not in self._policies:
            spec = self._books.spec_of(entry.run)
            try:
                whole = None if spec is None else workload_policy.merged(spec, self._books.defaults.spec())
                self._policies[key] = None if whole is None else workload_policy.read(name, whole)
            except Refusal as refusal:
                self._policies[key] = refusal
        return self._policies[key]

    async def _follow(self, entry: Entry) -> None:
        """Make the run's Job, or see what came of it."""
        try:
            await self._follow_job(entry)
        except ApiUnavailable as error:
            self._held[entry.run.key] = self._wall() + PAUSE_S, ""
            _log.warning("reclaim.not_followed", run=entry.run.name, error=str(error))
        if self._state_of(entry) is not ReclaimState.REMOVING:
            self._books.queue.forget(("reclaim", *entry.run.key))

    async def _follow_job(self, entry: Entry) -> None:
        namespace, name = entry.run.workload.namespace, reclaim_job.job_name(entry.run)
        jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        found = await self._call("GET", f"{jobs}/{name}")
        state = self._state_of(entry)
        at_work = state is ReclaimState.REMOVING
        if state is None:
            return
        if found.status == 404 and not at_work:
            await self._make(entry, jobs)
        elif found.status == 404:
            self._end(entry, ReclaimState.FAILED, f"Job {name} is gone, and how it ended could not be read")
        elif not found.ok:
            raise ApiUnavailable(f"cannot be read: {found.sentence}", where=f"{jobs}/{name}")
        elif not reclaim_job.is_ours(found.document, entry.run):
            text = f"there is a Job {name} that was not made for this end of the run: delete it"
            self._end(entry, ReclaimState.FAILED, text)
        elif (why := reclaim_job.outcome(found.document)) is None:
            if not at_work:
                self._set(entry, reclaim.begun(entry.run.reclaim, name, self._wall()))
        else:
            pods = f"/api/v1/namespaces/{namespace}/pods"
            said = reclaim_job.last_word(
                await self._call.every(pods, selector=f"batch.kubernetes.io/job-name={name}")
            )
            if self._state_of(entry) is state:
                failed = ReclaimState.FAILED, f"Job {name} failed: {said or why}"
                self._end(entry, *(failed if why else reclaim_job.read(said)))

    def _state_of(self, entry: Entry) -> ReclaimState | None:
        """Where the run's removal stands; None: it has none any more, or the run was let go of."""
        here = self._books.by_key.get(entry.run.key) is entry
        return entry.run.reclaim.state if here and entry.run.reclaim is not None else None

    async def _make(self, entry: Entry, jobs: str) -> None:
        name = reclaim_job.job_name(entry.run)
        living = await self._life_of(entry)
        # IMPORTANT: nothing is waited for between this look and the request.
        now_s = self._wall()
        self._held.pop(entry.run.key, None)
        if living:
            self._held[entry.run.key] = now_s + PAUSE_S, living
        if self._state_of(entry) is not None:
            self._judge(entry, now_s, continued=self._books.is_continued(entry))
        if entry.run.reclaim is None or not entry.run.reclaim.ready:
            return
        policy = self._policy_of(entry)
        assert isinstance(policy, Policy)
        self._set(entry, reclaim.begun(entry.run.reclaim, name, now_s))
        # One that is made without an answer is found at the next look.
        made = await self._call("POST", jobs, reclaim_job.manifest(entry.run, policy))
        if made.ok or made.status == 409:
            _log.info("reclaim.begun", namespace=entry.run.workload.namespace, run=entry.run.name, job=name)
        elif self._state_of(entry) is not None:
            self._end(entry, ReclaimState.FAILED, f"Job {name} could not be made: {made.sentence}")

    async def _life_of(self, entry: Entry) -> str:
        """Why a workload that can be asked for is not over; empty: it is, or it cannot."""
        workload = entry.run.workload
        if not workload.native:
            return ""
        root = {"Pod": "/api/v1/namespaces/{}/pods/{}", "Job": "/apis/batch/v1/namespaces/{}/jobs/{}"}
        path = root[workload.native].format(workload.namespace, workload.name)
        answer = await self._call("GET", path)
        if answer.status == 404:
            return ""
        if not answer.ok:
            raise ApiUnavailable(f"cannot be read: {answer.sentence}", where=path)
        if observed_object.is_over(answer.document) or answer.document["metadata"]["uid"] != workload.uid:
            return ""
        return f"{workload.called} is there and has not ended"

    def _set(self, entry: Entry, found: reclaim.Reclaim) -> None:
        self._books.set(entry, replace(entry.run, reclaim=found))

    def _end(self, entry: Entry, state: ReclaimState, message: str) -> None:
        found = reclaim.ended(entry.run.reclaim, state, message, self._wall())
        reason, warning = _REASONS.get(state, "ReclaimFailed"), state is not ReclaimState.REMOVED
        entry.notices.append(Notice(reason=reason, message=found.message, warning=warning))
        self._set(entry, found)
        self._books.metrics.reclaims.labels(state.value.lower()).inc()
        run = entry.run
        _log.info(
            "reclaim.ended", namespace=run.workload.namespace, run=run.name, state=state.value, why=message
        )
