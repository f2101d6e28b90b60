"""Removes finished runs' bytes where their policy says so: makes the Job that does it, and reads what came of it.

The controller has no credentials of any store: it makes a Job in the run's namespace (`reclaim_job`), if the chart
gives it the right to, and looks at it until it has ended. A Job has the same name for every try, so one that was made
by a controller that died before it could say so is found again, and is never made twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.controller import reclaim_job
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.kube.call import ApiUnavailable, Caller
from deltashard_operator.policy import workload_policy
from deltashard_operator.policy.chart_defaults import Defaults
from deltashard_operator.policy.refusal import Refusal
from deltashard_operator.policy.workload_policy import Policy
from deltashard_operator.run import reclaim_judgement
from deltashard_operator.run.reclaim import ReclaimState

LOOK_S = 2.0
MOST = 8
"""Jobs at work at once."""
_log = structlog.get_logger("deltashard.reclaim")


class Reclaimer:
    """Of all runs of a controller."""

    def __init__(
        self,
        books: Entries,
        *,
        call: Caller,
        defaults: Defaults,
        metrics: ControllerMetrics,
        wall: Callable[[], float],
    ) -> None:
        self._books = books
        self._call = call
        self._defaults = defaults
        self._metrics = metrics
        self._wall = wall
        self._looked_s = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._policies: dict[tuple[str, str], Policy | None] = {}
        self._serial = -1

    def tick(self) -> None:
        """Begin a round, when it is time and none is under way."""
        now_s = self._wall()
        if abs(now_s - self._looked_s) < LOOK_S or (self._task is not None and not self._task.done()):
            return
        self._looked_s = now_s
        due = self._due(now_s)
        self._task = asyncio.create_task(self._round(due)) if due else None

    async def settle(self) -> None:
        """Wait for the round that is under way."""
        if self._task is not None:
            await self._task

    def _due(self, now_s: float) -> list[Entry]:
        """Runs whose Job is to be made, or looked at."""
        removing: list[Entry] = []
        due: list[Entry] = []
        for entry in self._books:
            if not entry.run.finished and entry.run.reclaim is None:
                continue
            self._look(entry, now_s)
            reclaim = entry.run.reclaim
            if reclaim is not None and entry.served is not None:
                if reclaim.state is ReclaimState.REMOVING:
                    removing.append(entry)
                elif reclaim_judgement.is_due(entry.run, now_s):
                    due.append(entry)
        due.sort(key=lambda each: each.run.finished_at_s)
        return removing + due[: max(MOST - len(removing), 0)]

    def _look(self, entry: Entry, now_s: float) -> None:
        try:
            policy = self._policy_of(entry)
        except (Refusal, DeltashardError):
            return  # as it was: `Controller` says that the policy cannot be read
        found = reclaim_judgement.looked(
            entry.run, policy, continued=self._books.is_continued(entry), now_s=now_s
        )
        if found != entry.run.reclaim:
            self._books.set(entry, replace(entry.run, reclaim=found))

    def _policy_of(self, entry: Entry) -> Policy | None:
        """The run's policy as it is now, read once for all its runs until one changes."""
        if self._serial != self._books.serial:
            self._policies, self._serial = {}, self._books.serial
        key = entry.run.workload.namespace, entry.run.wish.policy
        if key not in self._policies:
            spec = self._books.spec_of(entry.run, self._defaults)
            merged = None if spec is None else workload_policy.merged(spec, self._defaults.spec())
            self._policies[key] = None if merged is None else workload_policy.read(key[1], merged)
        return self._policies[key]

    async def _round(self, due: list[Entry]) -> None:
        for entry in due:
            try:
                await self._follow(entry)
            except ApiUnavailable as error:
                _log.warning("reclaim.not_followed", run=entry.run.name, error=str(error))
            except Exception:  # noqa: BLE001 - one odd run must not stop the others
                self._metrics.judge_errors.inc()
                _log.exception("reclaim.not_followed", run=entry.run.name)

    async def _follow(self, entry: Entry) -> None:
        """Make the run's Job, or see what came of it."""
        run = entry.run
        jobs = f"/apis/batch/v1/namespaces/{run.workload.namespace}/jobs"
        name = reclaim_job.job_name(run)
        found = await self._call("GET", f"{jobs}/{name}")
        if found.status == 404:
            await self._make(entry, jobs)
        elif not found.ok:
            self._end(entry, ReclaimState.FAILED, f"Job {name} cannot be read: {found.sentence}")
        elif not reclaim_job.is_ours(found.document, run):
            self._end(entry, ReclaimState.FAILED, f"there is a Job {name} that is not this run's")
        elif (why := reclaim_job.outcome(found.document)) is None:
            if run.reclaim is None or run.reclaim.state is not ReclaimState.REMOVING:
                self._books.set(entry, reclaim_judgement.begun(entry.run, name, self._wall()))
        elif run.reclaim is not None and run.reclaim.state is ReclaimState.FAILED:
            text = f"Job {name} of the try before is still there: delete it, and another is made"
            self._end(entry, ReclaimState.FAILED, text)
        else:
            pods = f"/api/v1/namespaces/{run.workload.namespace}/pods"
            said = reclaim_job.last_word(
                await self._call.every(pods, selector=f"batch.kubernetes.io/job-name={name}")
            )
            if why:
                self._end(entry, ReclaimState.FAILED, f"Job {name} failed: {said or why}")
            else:
                self._end(entry, *reclaim_job.read(said))

    async def _make(self, entry: Entry, jobs: str) -> None:
        policy = self._policy_of(entry)
        if policy is None or not entry.run.finished:
            return
        name = reclaim_job.job_name(entry.run)
        body = reclaim_job.manifest(entry.run, policy)
        made = await self._call("POST", jobs, body)
        self._books.set(entry, reclaim_judgement.begun(entry.run, name, self._wall()))
        if made.ok or made.status == 409:
            _log.info("reclaim.begun", namespace=entry.run.workload.namespace, run=entry.run.name, job=name)
        else:
            self._end(entry, ReclaimState.FAILED, f"Job {name} could not be made: {made.sentence}")

    def _end(self, entry: Entry, state: ReclaimState, message: str) -> None:
        run, notice = reclaim_judgement.ended(entry.run, state, message, self._wall())
        entry.notices.append(notice)
        self._books.set(entry, run)
        self._metrics.reclaims.labels(state.value.lower()).inc()
        _log.info(
            "reclaim.ended", namespace=run.workload.namespace, run=run.name, state=state.value, why=message
        )
