"""Who holds a run id: the question of the webhook before a workload may go on with an older run.

A run is held by another workload that lives, as the API has it now:

- a Job with the label of this run id (every injected Job with a `run-id` has it) that has not ended, whether a
  controller ever saw it or not;
- the workload of a CheckpointRun of this run id that is not Finished. Of a Job and a pod the API itself is asked
  whether it ended or is gone, because Finished is the controller's word and comes late, or not at all while there is
  no controller. Of other kinds the controller's word counts, and the refusal says how to overrule it.

Where each pod trains a run of its own its number stands at the end (`run_claim`), so `exp-1` is held, too, by such a
workload of run id `exp` with a pod 1, and the other way round.

Where a run's checkpoints are is looked at, too: a policy may name another store by now.

When the API cannot be asked the workload is admitted: the log's fencing decides in the end, as it does for two that are
created in the same instant.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, quote

from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_operator.admission import run_claim
from deltashard_operator.admission.run_claim import Numbering, RunClaim
from deltashard_operator.api.admission_deadline import Deadline
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube.call import Answer, ApiClient, NoReply, Requester
from deltashard_operator.kube.cluster_name import RESTORE_FROM, RUN_ID, WORKLOAD_UID
from deltashard_operator.run import observed_object
from deltashard_operator.run.observed_object import Workload
from deltashard_operator.run.reclaim import ReclaimState
from deltashard_operator.run.run_record import API_VERSION, PLURAL, run_label

Document = dict[str, Any]


class NotTold(EnvironmentFault):
    """The API answered something else than what was asked for."""


UNKNOWN = (NoReply, NotTold, TimeoutError)
"""What it raises that nobody can know who holds a run."""


class Holders:
    """Looks at Jobs, CheckpointRuns and their workloads. Thread-safe; blocks."""

    def __init__(self, api: ApiClient) -> None:
        self._request = Requester(api)

    def refusal(self, claim: RunClaim, url: str, deadline: Deadline) -> Refusal | None:
        """Why a workload may not have the run it asks for in the store `url`, or None when it may.

        Raises one of `UNKNOWN` when the API cannot be asked.
        """
        if not claim.run_id:
            selector = f"{WORKLOAD_UID}={claim.workload_uid}"
            records = self._selected(API_VERSION, PLURAL, claim, selector, deadline)
            return next((found for each in records if (found := _moved(claim, each, url))), None)
        if claim.source:
            records = self._selected(
                API_VERSION, PLURAL, claim, f"{RUN_ID}={run_label(claim.run_id)}", deadline
            )
            moved = [_moved(claim, each, url) for each in records]
            return moved[0] if moved and all(moved) else None
        for job in self._list("batch/v1", "jobs", claim, deadline):
            refusal = _held_by_job(claim, job)
            if refusal is not None:
                return refusal
        for record in self._list(API_VERSION, PLURAL, claim, deadline):
            refusal = self._held_by_record(claim, record, deadline) or _moved(claim, record, url)
            if refusal is not None:
                return refusal
        return None

    def _held_by_record(self, claim: RunClaim, record: Document, deadline: Deadline) -> Refusal | None:
        """The refusal for the sake of a CheckpointRun's workload."""
        workload, run_id = _workload_of(claim.namespace, record), record["spec"]["runId"]
        status = record.get("status") or {}
        finished = status.get("phase") == "Finished"
        if run_id == claim.run_id and (status.get("reclaim") or {}).get("state") == ReclaimState.REMOVING:
            return _taken(
                f"the checkpoints of run {run_id!r} are being removed, since {workload.called} is finished",
                "wait until its CheckpointRun says Removed, or choose another id",
            )
        if finished or workload.uid == claim.workload_uid:
            return None
        same, is_job = run_id == claim.run_id, workload.native == "Job"
        numbering = None
        if record["spec"].get("runs") == RUN_PER_POD:
            # A Job's own is asked for below.
            numbering = Numbering() if is_job else run_claim.numbering_of_kind(workload.group_kind)
        shared = claim.shared(run_id, numbering)
        if not same and shared is None:
            return None
        name = record["metadata"]["name"]
        if workload.native:
            live = self._live(workload, deadline)
            if live is None:
                return None
            name = ""
            if is_job and not same:
                shared = claim.shared(run_id, run_claim.numbering_of_job(live))
        if same:
            return _held(run_id, workload.called, name)
        return _shares(shared, run_id, claim, workload.called, name) if shared is not None else None

    def _list(self, api_version: str, plural: str, claim: RunClaim, deadline: Deadline) -> list[Document]:
        """Objects whose run may be the one that is asked for; of numbered pods any may."""
        ids = ",".join(map(run_label, (claim.run_id, *run_claim.bases(claim.run_id))))
        selector = RUN_ID if claim.numbering is not None else f"{RUN_ID} in ({ids})"
        return self._selected(api_version, plural, claim, selector, deadline)

    def _selected(
        self, api_version: str, plural: str, claim: RunClaim, selector: str, deadline: Deadline
    ) -> list[Document]:
        path = f"/apis/{api_version}/namespaces/{claim.namespace}/{plural}"
        page = self._request("GET", path, query={"labelSelector": selector}, timeout_s=deadline.left_s())
        if not page.ok:
            raise _not_told(page, path)
        return list(page.document["items"])

    def _live(self, workload: Workload, deadline: Deadline) -> Document | None:
        """This very Job or pod where it is there and has not ended."""
        group, plural = ("/api/v1", "pods") if workload.native == "Pod" else ("/apis/batch/v1", "jobs")
        path = f"{group}/namespaces/{workload.namespace}/{plural}/{quote(workload.name, safe='')}"
        answer = self._request("GET", path, timeout_s=deadline.left_s())
        if answer.status == 404:
            return None
        if not answer.ok:
            raise _not_told(answer, path)
        document = answer.document
        here = document["metadata"]["uid"] == workload.uid and not observed_object.is_over(document)
        return document if here else None


def _moved(claim: RunClaim, record: Document, url: str) -> Refusal | None:
    """The refusal where a run's checkpoints are in another store."""
    status, run_id = record.get("status") or {}, record["spec"]["runId"]
    store = status.get("store", "")
    if (status.get("reclaim") or {}).get("state") == ReclaimState.REMOVED:
        return None
    if not store or _place(store) == _place(url) or claim.run_id not in ("", run_id):
        return None
    there, named = f"the checkpoints of run {run_id!r} are in {_place(store)}", f"the store {_place(url)}"
    if claim.source:
        what, remedy = (
            f"{there}, and the policy names {named}",
            "name that store in the policy; or copy the run",
        )
        return Refusal("StoreMoved", what, where=RESTORE_FROM, remedy=f"{remedy} (`deltashard cp`)")
    return Refusal(
        "StoreMoved",
        f"it names {named}, and {there}",
        where="spec.store.url of the CheckpointPolicy",
        remedy="name that store; or copy the run (`deltashard cp`) and delete CheckpointRun "
        + record["metadata"]["name"],
    )


def _place(url: str) -> str:
    """Which bucket, container or directory a store is, whatever way leads there."""
    base, _, options = url.partition("?")
    account = parse_qs(options).get("account", [""])[0]
    return base.rstrip("/") + (f"?account={account}" if account else "")


def _not_told(answer: Answer, path: str) -> NotTold:
    return NotTold(f"the API answered {answer.sentence}", where=path)


def _held_by_job(claim: RunClaim, document: Document) -> Refusal | None:
    """The refusal for the sake of a Job with a run id's label."""
    job = observed_object.job_of(document)
    if job.outcome or job.workload.uid == claim.workload_uid:
        return None
    run_id = (document["metadata"].get("labels") or {}).get(RUN_ID, "")
    if run_id == claim.run_id:
        return _held(run_id, job.workload.called)
    shared = claim.shared(run_id, run_claim.numbering_of_job(document))
    return _shares(shared, run_id, claim, job.workload.called) if shared is not None else None


def _workload_of(namespace: str, record: Document) -> Workload:
    reference = record["spec"]["workload"]
    return Workload(
        namespace=namespace,
        kind=reference["kind"],
        name=reference["name"],
        uid=reference["uid"],
        api_version=reference.get("apiVersion", ""),
    )


def _taken(what: str, remedy: str, record: str = "") -> Refusal:
    """`record`: the CheckpointRun whose word alone says so."""
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    return Refusal("RunIdTaken", what, where=RUN_ID, remedy=remedy + gone)


def _held(run_id: str, called: str, record: str = "") -> Refusal:
    what = f"run {run_id!r} is held by {called}, which is not finished"
    return _taken(what, "wait for its end, delete it, or choose another id", record)


def _shares(shared: str, run_id: str, claim: RunClaim, called: str, record: str = "") -> Refusal:
    numbered = run_id if shared == claim.run_id else claim.run_id
    return _taken(
        f"run {shared!r} would be shared with {called}, which is not finished: each pod of run {numbered!r} "
        "trains a run of its own, with its number at the end",
        "wait for its end, delete it, or choose an id that does not end with a number",
        record,
    )
