"""Lookup of the holder of a run id, before a workload may continue an existing run.

A run is held by another live workload, as the API shows it now:

- a Job with the label of this run id (set on every injected Job with a `run-id`) that has not ended, whether or not a
  controller has seen it;
- the workload of an unfinished CheckpointRun of this run id. For Jobs and pods the API is asked whether they ended or
  were deleted, because the controller sets Finished late, or never if none runs. For other kinds the CheckpointRun
  decides, and the message of the refusal includes the override.

The store of the run's checkpoints is checked, too: the policy may name a different store by now.

If the API is unavailable the workload is admitted: the fencing of the log decides, as for two workloads that are
created at the same time.
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
    """Run that may already exist: one requested by `run-id`, or the workload's own."""

    namespace: str
    run_id: str = ""
    """Empty: the workload's own run, without a `run-id`."""
    workload_uid: str = ""
    """UID of the requesting workload if it already exists (JobSet, StatefulSet)."""
    source: bool = False
    """The run is only read, as the start of another run, so its store matters and its holder does not."""

    @property
    def label(self) -> str:
        """Label selector of the Jobs and CheckpointRuns of this run."""
        return f"{RUN_ID}={run_label(self.run_id)}" if self.run_id else f"{WORKLOAD_UID}={self.workload_uid}"

    def held_by(self, workload: Workload, record: str = "") -> Refusal:
        """Return the refusal because a live workload holds the run, for `record` only according to its status."""
        what = f"run {self.run_id!r} is held by {workload.display_name}, which is not finished"
        return _run_id_taken(what, "wait until it ends, delete it, or choose another id", record)


class RunHolders:
    """Lookups of Jobs, CheckpointRuns and their workloads."""

    def __init__(self, call: Caller) -> None:
        self._call = call

    async def refusal(self, claim: RunClaim, url: str) -> Refusal | None:
        """Return why the claimed run in the store `url` cannot be used, or None. Raises `ApiUnavailable`."""
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
        """Return the refusal because the workload of a CheckpointRun is live."""
        status, reference = record.get("status") or {}, record["spec"]["workload"]
        workload = Workload(
            namespace=claim.namespace,
            kind=reference["kind"],
            name=reference["name"],
            uid=reference["uid"],
            api_version=reference.get("apiVersion", ""),
        )
        if _reclaim(record) == ReclaimState.REMOVING:
            what = f"the checkpoints of run {claim.run_id!r} are being removed, as {workload.display_name} is finished"
            return _run_id_taken(what, "wait until its CheckpointRun shows Removed, or choose another id")
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
    return str(((record.get("status") or {}).get("reclaim") or {}).get("state", ""))


def _store_moved(claim: RunClaim, record: Document, url: str) -> Refusal | None:
    """Return the refusal if a run's checkpoints are in another store."""
    store, run_id = (record.get("status") or {}).get("store", ""), record["spec"]["runId"]
    if (
        not store
        or _store_location(store) == _store_location(url)
        or _reclaim(record) == ReclaimState.REMOVED
    ):
        return None
    what = (
        f"the policy names the store {_store_location(url)}, and the checkpoints of run {run_id!r} "
        f"are in {_store_location(store)}"
    )
    where, remedy = (
        "spec.store.url of the CheckpointPolicy",
        "use that store, or copy the run (`deltashard cp`)",
    )
    if claim.source:
        where = RESTORE_FROM
    else:
        remedy += f" and delete CheckpointRun {record['metadata']['name']}"
    return Refusal("StoreMoved", what, where=where, remedy=remedy)


def _store_location(url: str) -> str:
    """Return the bucket, container or directory of a store, without access options."""
    base, _, options = url.partition("?")
    account = parse_qs(options).get("account", [""])[0]
    return base.rstrip("/") + (f"?account={account}" if account else "")


def _run_id_taken(what: str, remedy: str, record: str = "") -> Refusal:
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    return Refusal("RunIdTaken", what, where=RUN_ID, remedy=remedy + gone)
