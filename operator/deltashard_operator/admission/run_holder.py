"""Who holds a run id: the question of the webhook before a workload may go on with an older run.

A run is held by another workload that lives, as the API has it now:

- a Job with the label of this run id (every injected Job with a `run-id` has it) that has not ended, whether a
  controller ever saw it or not;
- the workload of a CheckpointRun of this run id that is not Finished. Of a Job and a pod the API itself is asked
  whether it ended or is gone, because Finished is the controller's word and comes late, or not at all while there is
  no controller. Of other kinds the controller's word counts, and the refusal says how to overrule it.

Where a run's checkpoints are is looked at, too: a policy may name another store by now.

When the API cannot be asked the workload is admitted: the log's fencing decides in the end, as it does for two that are
created in the same instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.call import Caller, object_at
from deltashard_operator.kube.cluster_name import RESTORE_FROM, RUN_ID, WORKLOAD_UID
from deltashard_operator.run import observed_object
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.reclaim import ReclaimState
from deltashard_operator.run.run_record import API_VERSION, PLURAL, run_label

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaim:
    """A run that may be there already: one that a workload asks for by `run-id`, or that of the workload itself."""

    namespace: str
    run_id: str = ""
    """Empty: the workload's own, without a `run-id`."""
    workload_uid: str = ""
    """UID of the workload that asks, where it exists already (a JobSet, a StatefulSet)."""
    source: bool = False
    """Whether it is only read, for another run to begin with: who holds it does not matter, its store does."""

    @property
    def label(self) -> str:
        """Selects the Jobs and CheckpointRuns of this run."""
        return f"{RUN_ID}={run_label(self.run_id)}" if self.run_id else f"{WORKLOAD_UID}={self.workload_uid}"

    def held_by(self, workload: Workload, record: str = "") -> Refusal:
        """The refusal for the sake of a workload that lives.

        `record`: the CheckpointRun whose word alone says that it does.
        """
        what = f"run {self.run_id!r} is held by {workload.display_name}, which is not finished"
        return _run_id_taken(what, "wait for its end, delete it, or choose another id", record)


class RunHolders:
    """Looks at Jobs, CheckpointRuns and their workloads."""

    def __init__(self, call: Caller) -> None:
        self._call = call

    async def refusal(self, claim: RunClaim, url: str) -> Refusal | None:
        """Why a workload may not have the run it asks for in the store `url`, or None when it may.

        Raises `ApiUnavailable` when the API cannot be asked.
        """
        if claim.source or not claim.run_id:
            moved = [_store_moved(claim, each, url) for each in await self._list(API_VERSION, PLURAL, claim)]
            moved = [] if claim.source and None in moved else moved
            return next(filter(None, moved), None)
        for job in map(observed_object.job_of, await self._list("batch/v1", "jobs", claim)):
            if not job.outcome and job.workload.uid != claim.workload_uid:
                return claim.held_by(job.workload)
        for record in await self._list(API_VERSION, PLURAL, claim):
            if refusal := await self._held_by_record(claim, record) or _store_moved(claim, record, url):
                return refusal
        return None

    async def _held_by_record(self, claim: RunClaim, record: Document) -> Refusal | None:
        """The refusal for the sake of a CheckpointRun's workload."""
        status, reference = record.get("status") or {}, record["spec"]["workload"]
        workload = Workload(
            namespace=claim.namespace,
            kind=reference["kind"],
            name=reference["name"],
            uid=reference["uid"],
            api_version=reference.get("apiVersion", ""),
        )
        if _reclaim(record) == ReclaimState.REMOVING:
            what = f"the checkpoints of run {claim.run_id!r} are being removed, since {workload.display_name} is finished"
            return _run_id_taken(what, "wait until its CheckpointRun says Removed, or choose another id")
        if status.get("phase") == "Finished" or workload.uid == claim.workload_uid:
            return None
        if not workload.native:
            return claim.held_by(workload, record["metadata"]["name"])
        alive = observed_object.is_alive(workload, await object_at(self._call, workload.path))
        return claim.held_by(workload) if alive else None

    async def _list(self, api_version: str, plural: str, claim: RunClaim) -> list[Document]:
        path = f"/apis/{api_version}/namespaces/{claim.namespace}/{plural}"
        return await self._call.list_all(path, selector=claim.label)


def _reclaim(record: Document) -> str:
    """Where the removal of a run's bytes stands."""
    return str(((record.get("status") or {}).get("reclaim") or {}).get("state", ""))


def _store_moved(claim: RunClaim, record: Document, url: str) -> Refusal | None:
    """The refusal where a run's checkpoints are in another store."""
    store, run_id = (record.get("status") or {}).get("store", ""), record["spec"]["runId"]
    if (
        not store
        or _store_location(store) == _store_location(url)
        or _reclaim(record) == ReclaimState.REMOVED
    ):
        return None
    what = f"the policy names the store {_store_location(url)}, and the checkpoints of run {run_id!r} are in {_store_location(store)}"
    where, remedy = (
        "spec.store.url of the CheckpointPolicy",
        "name that store; or copy the run (`deltashard cp`)",
    )
    if claim.source:
        where = RESTORE_FROM
    else:
        remedy += f" and delete CheckpointRun {record['metadata']['name']}"
    return Refusal("StoreMoved", what, where=where, remedy=remedy)


def _store_location(url: str) -> str:
    """Which bucket, container or directory a store is, whatever way leads there."""
    base, _, options = url.partition("?")
    account = parse_qs(options).get("account", [""])[0]
    return base.rstrip("/") + (f"?account={account}" if account else "")


def _run_id_taken(what: str, remedy: str, record: str = "") -> Refusal:
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    return Refusal("RunIdTaken", what, where=RUN_ID, remedy=remedy + gone)
