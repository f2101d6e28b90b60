"""Who holds a run id: the question of the webhook before a workload may go on with an older run.

A run is held by another workload that lives, as the API has it now:

- a Job with the label of this run id (every injected Job with a `run-id` has it) that has not ended, whether a
  controller ever saw it or not;
- the workload of a CheckpointRun of this run id that is not Finished. Of a Job and a pod the API itself is asked
  whether it ended or is gone, because Finished is the controller's word and comes late, or not at all while there is
  no controller. Of other kinds the controller's word counts, and the refusal says how to overrule it.

Where each pod trains a run of its own, that is `{run}-{index}`, in a JobSet or a PyTorchJob `{run}-{replica}-{index}`.
So `exp-1` is held, too, by such a workload of run id `exp`, and the other way round.

Where a run's checkpoints are is looked at, too: a policy may name another store by now.

When the API cannot be asked the workload is admitted: the log's fencing decides in the end, as it does for two that are
created in the same instant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote

from deltashard_checkpoint.errors import EnvironmentFault
from deltashard_checkpoint.vocabulary import RUN_PER_POD

from deltashard_operator.api.policy_cache import BUDGET_S
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.kube import run_identity
from deltashard_operator.kube.call import ApiClient, NoReply, Requester
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

_REPLICATED = ("JobSet", "PyTorchJob")
"""Kinds that have a name before the number of a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClaim:
    """A run that may be there already: one that a workload asks for by `run-id`, or that of the workload itself."""

    namespace: str
    run_id: str = ""
    """Empty: the workload's own, without a `run-id`."""
    workload_uid: str = ""
    """UID of the workload that asks, where it exists already (a JobSet, a StatefulSet)."""
    per_pod: bool = False
    """Whether each of its numbered pods trains a run of its own."""
    kind: str = ""
    """The workload's."""
    pods: int = 0
    """Its numbered pods; 0: not known."""
    source: bool = False
    """Whether it is only read, for another run to begin with: who holds it does not matter, its store does."""

    @property
    def label(self) -> str:
        """Selects the Jobs and CheckpointRuns that may be of this run."""
        if self.source or not self.run_id:
            mine = f"{WORKLOAD_UID}={self.workload_uid}"
            return f"{RUN_ID}={run_label(self.run_id)}" if self.source else mine
        if self.per_pod:
            return RUN_ID
        *words, last = self.run_id.split("-")
        bases = ["-".join(words[: n + 1]) for n in range(len(words))] if last.isdecimal() else []
        return f"{RUN_ID} in ({','.join(map(run_label, (self.run_id, *bases)))})"

    def held_by(
        self, workload: Workload, run_id: str, *, per_pod: bool, pods: int = 0, record: str = ""
    ) -> Refusal | None:
        """The refusal for the sake of a workload that lives, where one run would be trained by both.

        `pods`: its numbered pods; 0: not known. `record`: the CheckpointRun whose word alone says that it lives.
        """
        numbered = ""
        if self.run_id != run_id:
            if per_pod and _is_a_pods(self.run_id, run_id, workload.kind, pods):
                numbered, run_id = run_id, self.run_id
            elif self.per_pod and _is_a_pods(run_id, self.run_id, self.kind, self.pods):
                numbered = self.run_id
            else:
                return None
        what = f"run {run_id!r} is held by {workload.called}, which is not finished"
        if numbered:
            what += f": each pod of run {numbered!r} trains a run of its own, with its number at the end"
        return _taken(what, "wait for its end, delete it, or choose another id", record)


def _is_a_pods(run_id: str, base: str, kind: str, pods: int) -> bool:
    """Whether a numbered pod of such a workload with the run id `base` may train this run."""
    replica = "(-[a-z0-9-]+)?" if kind in _REPLICATED else ""
    found = re.fullmatch(rf"{re.escape(base)}{replica}-(?P<n>0|[1-9][0-9]*)", run_id)
    return found is not None and not (kind == "Job" and 0 < pods <= int(found["n"]))


class Holders:
    """Looks at Jobs, CheckpointRuns and their workloads. Thread-safe; blocks."""

    def __init__(self, api: ApiClient) -> None:
        self._request = Requester(api)

    def refusal(self, claim: RunClaim, url: str) -> Refusal | None:
        """Why a workload may not have the run it asks for in the store `url`, or None when it may.

        Raises one of `UNKNOWN` when the API cannot be asked.
        """
        if claim.source or not claim.run_id:
            moved = [_moved(claim, each, url) for each in self._list(API_VERSION, PLURAL, claim)]
            moved = [] if claim.source and None in moved else moved
            return next(filter(None, moved), None)
        judged = set()  # by their Jobs, which know how many pods they have
        for document in self._list("batch/v1", "jobs", claim):
            job, run_id = observed_object.job_of(document), document["metadata"]["labels"][RUN_ID]
            if job.outcome or job.workload.uid == claim.workload_uid:
                continue
            judged.add((job.workload.uid, run_id))
            per_pod, pods = job.wish.runs == RUN_PER_POD, run_identity.pods_of(document)
            if refusal := claim.held_by(job.workload, run_id, per_pod=per_pod, pods=pods):
                return refusal
        for record in self._list(API_VERSION, PLURAL, claim):
            if refusal := self._held_by_record(claim, record, judged) or _moved(claim, record, url):
                return refusal
        return None

    def _held_by_record(
        self, claim: RunClaim, record: Document, judged: set[tuple[str, str]]
    ) -> Refusal | None:
        """The refusal for the sake of a CheckpointRun's workload."""
        spec, status, reference = record["spec"], record.get("status") or {}, record["spec"]["workload"]
        workload = Workload(
            namespace=claim.namespace,
            kind=reference["kind"],
            name=reference["name"],
            uid=reference["uid"],
            api_version=reference.get("apiVersion", ""),
        )
        if spec["runId"] == claim.run_id and _reclaim(record) == ReclaimState.REMOVING:
            what = f"the checkpoints of run {claim.run_id!r} are being removed, since {workload.called} is finished"
            return _taken(what, "wait until its CheckpointRun says Removed, or choose another id")
        if status.get("phase") == "Finished" or workload.uid == claim.workload_uid:
            return None
        if (workload.uid, spec["runId"]) in judged:
            return None
        name, per_pod = "" if workload.native else record["metadata"]["name"], spec.get("runs") == RUN_PER_POD
        refusal = claim.held_by(workload, spec["runId"], per_pod=per_pod, record=name)
        return refusal if refusal and (not workload.native or self._lives(workload)) else None

    def _list(self, api_version: str, plural: str, claim: RunClaim) -> list[Document]:
        path = f"/apis/{api_version}/namespaces/{claim.namespace}/{plural}"
        page = self._request("GET", path, query={"labelSelector": claim.label}, timeout_s=BUDGET_S)
        if not page.ok:
            raise NotTold(f"the API answered {page.sentence}", where=path)
        return list(page.document["items"])

    def _lives(self, workload: Workload) -> bool:
        """Whether this very Job or pod is there and has not ended."""
        group, plural = ("/api/v1", "pods") if workload.native == "Pod" else ("/apis/batch/v1", "jobs")
        path = f"{group}/namespaces/{workload.namespace}/{plural}/{quote(workload.name, safe='')}"
        answer = self._request("GET", path, timeout_s=BUDGET_S)
        if answer.status == 404:
            return False
        if not answer.ok:
            raise NotTold(f"the API answered {answer.sentence}", where=path)
        document = answer.document
        return document["metadata"]["uid"] == workload.uid and not observed_object.is_over(document)


def _reclaim(record: Document) -> str:
    """Where the removal of a run's bytes stands."""
    return str(((record.get("status") or {}).get("reclaim") or {}).get("state", ""))


def _moved(claim: RunClaim, record: Document, url: str) -> Refusal | None:
    """The refusal where a run's checkpoints are in another store."""
    store, run_id = (record.get("status") or {}).get("store", ""), record["spec"]["runId"]
    if not store or _place(store) == _place(url) or _reclaim(record) == ReclaimState.REMOVED:
        return None
    if claim.run_id not in ("", run_id):
        return None
    what = f"the policy names the store {_place(url)}, and the checkpoints of run {run_id!r} are in {_place(store)}"
    where, remedy = (
        "spec.store.url of the CheckpointPolicy",
        "name that store; or copy the run (`deltashard cp`)",
    )
    if claim.source:
        where = RESTORE_FROM
    else:
        remedy += f" and delete CheckpointRun {record['metadata']['name']}"
    return Refusal("StoreMoved", what, where=where, remedy=remedy)


def _place(url: str) -> str:
    """Which bucket, container or directory a store is, whatever way leads there."""
    base, _, options = url.partition("?")
    account = parse_qs(options).get("account", [""])[0]
    return base.rstrip("/") + (f"?account={account}" if account else "")


def _taken(what: str, remedy: str, record: str = "") -> Refusal:
    gone = f"; if it is gone, delete CheckpointRun {record}" if record else ""
    return Refusal("RunIdTaken", what, where=RUN_ID, remedy=remedy + gone)
