"""Removes finished runs' bytes where their policy says so: makes the Job that does it, and reads what came of it.

The controller has no credentials of any store: it makes a Job in the run's namespace (`reclaim_job`), if the chart
gives it the right to, and looks at it until it has ended. A Job has the same name for every try, so one that was made
by a controller that died before it could say so is found again, and is never made twice.

What was true when a round began need not be when a Job is made: everything is judged once more just before that, and
the workload itself asked for, since a Job that merely is not watched is not gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.api import workload_policy
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import reclaim_job
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.round import Rounds
from deltashard_operator.controller.run_book import Entries, Entry
from deltashard_operator.fleet.sidecar_report import RunKey
from deltashard_operator.kube.call import ApiUnavailable, Caller
from deltashard_operator.run import observed_object, reclaim_judgement
from deltashard_operator.run.reclaim import ReclaimState

LOOK_S = 2.0
MOST = 16
"""Jobs at work at once."""
MOST_OF_ONE = 4
"""... of one namespace, so that Jobs which hang keep nobody else from theirs."""
PAUSE_S = 60.0
"""After a look that could not be had, or that found a workload living."""
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
        self._rounds = Rounds(LOOK_S, wall)
        self._policies: dict[tuple[str, str], Policy | Refusal | None] = {}
        self._serial = -1
        self._again_s: dict[RunKey, float] = {}
        """Not to be followed before."""
        self._living: dict[RunKey, str] = {}
        """Of workloads that were said to be over and are not: what was found. Asked for again after each pause."""

    def tick(self) -> None:
        """Begin a round, when it is time and none is under way."""
        if self._rounds.is_due() and (due := self._due(self._wall())):
            self._rounds.begin(self._round(due))

    async def settle(self) -> None:
        await self._rounds.settle()

    def _due(self, now_s: float) -> list[Entry]:
        """Runs whose Job is to be made, or looked at."""
        newest = self._books.newest_by_id()
        removing: list[Entry] = []
        due: list[Entry] = []
        for entry in self._books:
            run = entry.run
            if not run.finished and run.reclaim is None:
                continue
            self._look(entry, now_s, continued=newest[run.workload.namespace, run.run_id] is not entry)
            reclaim = entry.run.reclaim
            if reclaim is None or entry.served is None:
                continue
            if reclaim.state is ReclaimState.REMOVING:
                removing.append(entry)
            elif reclaim_judgement.is_due(entry.run, now_s) or run.key in self._living:
                due.append(entry)
        self._again_s = {key: until_s for key, until_s in self._again_s.items() if now_s < until_s}
        self._living = {key: why for key, why in self._living.items() if key in self._books.by_key}
        at_work = Counter(each.run.workload.namespace for each in removing)
        for entry in sorted(due, key=lambda each: each.run.finished_at_s):
            namespace = entry.run.workload.namespace
            if entry.run.key in self._again_s or at_work.total() >= MOST or at_work[namespace] >= MOST_OF_ONE:
                continue
            at_work[namespace] += 1
            removing.append(entry)
        return [each for each in removing if each.run.key not in self._again_s]

    def _look(self, entry: Entry, now_s: float, *, continued: bool) -> None:
        try:
            policy = self._policy_of(entry)
        except DeltashardError:
            return  # the chart's authority is not there yet
        objection = self._living.get(entry.run.key, "")
        if isinstance(policy, Refusal):
            objection = f"the policy cannot be used: {policy.what}"
            policy = None
        found = reclaim_judgement.looked(
            entry.run, policy, objection=objection, continued=continued, now_s=now_s
        )
        if found != entry.run.reclaim:
            self._books.set(entry, replace(entry.run, reclaim=found))

    def _policy_of(self, entry: Entry) -> Policy | Refusal | None:
        """The run's policy as it is now, read once for all its runs until one changes; or why it cannot be used."""
        if self._serial != self._books.serial:
            self._policies, self._serial = {}, self._books.serial
        key = workload_policy.key_of(entry.run.workload.namespace, entry.run.wish.policy)
        if key not in self._policies:
            spec = self._books.spec_of(entry.run, self._defaults)
            try:
                self._policies[key] = None if spec is None else self._read(entry.run.wish.policy, spec)
            except Refusal as refusal:
                self._policies[key] = refusal
        return self._policies[key]

    def _read(self, name: str, spec: Mapping[str, Any]) -> Policy:
        return workload_policy.read(name, workload_policy.merged(spec, self._defaults.spec()))

    async def _round(self, due: list[Entry]) -> None:
        for entry in due:
            try:
                await self._follow(entry)
            except ApiUnavailable as error:
                self._pause(entry)
                _log.warning("reclaim.not_followed", run=entry.run.name, error=str(error))
            except Exception:  # noqa: BLE001 - one odd run must not stop the others
                self._pause(entry)
                self._metrics.judge_errors.inc()
                _log.exception("reclaim.not_followed", run=entry.run.name)

    def _pause(self, entry: Entry) -> None:
        self._again_s[entry.run.key] = self._wall() + PAUSE_S

    async def _follow(self, entry: Entry) -> None:
        """Make the run's Job, or see what came of it."""
        namespace, name = entry.run.workload.namespace, reclaim_job.job_name(entry.run)
        jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        found = await self._call("GET", f"{jobs}/{name}")
        state = self._state_of(entry)
        if state is None:
            return
        at_work = state is ReclaimState.REMOVING
        if found.status == 404:
            if at_work:
                text = f"Job {name} is gone, and how it ended could not be read"
                self._end(entry, ReclaimState.FAILED, text)
            else:
                await self._make(entry, jobs)
        elif not found.ok:
            raise ApiUnavailable(f"cannot be read: {found.sentence}", where=f"{jobs}/{name}")
        elif not reclaim_job.is_ours(found.document, entry.run):
            text = f"there is a Job {name} that was not made for this end of the run: delete it"
            self._end(entry, ReclaimState.FAILED, text)
        elif (why := reclaim_job.outcome(found.document)) is None:
            if not at_work:
                self._books.set(entry, reclaim_judgement.begun(entry.run, name, self._wall()))
        elif state is ReclaimState.FAILED:
            self._end(entry, state, f"Job {name} of the try before is still there: delete it")
        else:
            said = reclaim_job.last_word(
                await self._call.every(
                    f"/api/v1/namespaces/{namespace}/pods", selector=f"batch.kubernetes.io/job-name={name}"
                )
            )
            if self._state_of(entry) is not state:
                return
            if why:
                self._end(entry, ReclaimState.FAILED, f"Job {name} failed: {said or why}")
            else:
                self._end(entry, *reclaim_job.read(said))

    def _state_of(self, entry: Entry) -> ReclaimState | None:
        """Where the run's removal stands; None: it has none any more, or the run was let go of."""
        here = self._books.by_key.get(entry.run.key) is entry
        return entry.run.reclaim.state if here and entry.run.reclaim is not None else None

    async def _make(self, entry: Entry, jobs: str) -> None:
        name = reclaim_job.job_name(entry.run)
        living = await self._life_of(entry)
        # IMPORTANT: nothing is waited for between this look and the request.
        now_s = self._wall()
        if self._state_of(entry) is None:
            return
        self._living.pop(entry.run.key, None)
        if living:
            self._living[entry.run.key] = living
            self._pause(entry)
        self._look(entry, now_s, continued=self._books.is_continued(entry))
        if not reclaim_judgement.is_due(entry.run, now_s):
            return
        policy = self._policy_of(entry)
        assert isinstance(policy, Policy)
        self._books.set(entry, reclaim_judgement.begun(entry.run, name, now_s))
        try:
            made = await self._call("POST", jobs, reclaim_job.manifest(entry.run, policy))
        except ApiUnavailable as error:  # perhaps it is made: then the next try finds it
            why: str | None = error.what
        else:
            why = None if made.ok or made.status == 409 else made.sentence
        if self._state_of(entry) is None:
            return
        if why is not None:
            self._end(entry, ReclaimState.FAILED, f"Job {name} could not be made: {why}")
            return
        _log.info("reclaim.begun", namespace=entry.run.workload.namespace, run=entry.run.name, job=name)

    async def _life_of(self, entry: Entry) -> str:
        """Why a workload that can be asked for is not over; empty: it is, or it cannot."""
        workload = entry.run.workload
        if not workload.native:
            return ""
        plural = "/api/v1/{}/pods" if workload.native == "Pod" else "/apis/batch/v1/{}/jobs"
        path = f"{plural.format(f'namespaces/{workload.namespace}')}/{workload.name}"
        answer = await self._call("GET", path)
        if answer.status == 404:
            return ""
        if not answer.ok:
            raise ApiUnavailable(f"cannot be read: {answer.sentence}", where=path)
        if observed_object.is_over(answer.document) or answer.document["metadata"]["uid"] != workload.uid:
            return ""
        return f"{workload.called} is there and has not ended"

    def _end(self, entry: Entry, state: ReclaimState, message: str) -> None:
        run, notice = reclaim_judgement.ended(entry.run, state, message, self._wall())
        entry.notices.append(notice)
        self._books.set(entry, run)
        self._metrics.reclaims.labels(state.value.lower()).inc()
        _log.info(
            "reclaim.ended", namespace=run.workload.namespace, run=run.name, state=state.value, why=message
        )
