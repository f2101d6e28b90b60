"""CheckpointRuns in the API: made, their status kept, removed. The only objects but Events that the controller writes.

`Statuses` writes what it is given and says what came of it; when to write is `Pace`'s: a change of phase, condition or
count soon (`SOON_S` apart), a new commit at most every 30 s, and that steps rise at most every two minutes. So what a
run costs the API is bounded, whatever its trainers do. While the API is behind, what went wrong goes first, and what
else changed of a run is put together. A merge patch carries the object's UID, so a CheckpointRun that was deleted and
made again is never taken for the old one (409).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import MERGE, Caller, Forbidden
from deltashard_operator.run.run_record import COMMIT, GROUP, MATERIAL, PLURAL, URGENT, VERSION

_log = structlog.get_logger("deltashard.controller")
SOON_S = 1.0
CROWDED_S = 5.0
"""While more is to be written than the API takes at once: between writes that tell of no trouble."""
COMMIT_S = 30.0
QUIET_S = 120.0
MAX_BACKOFF_S = 60.0
ROOT = f"/apis/{GROUP}/{VERSION}"
ALL = f"{ROOT}/{PLURAL}"
Document = dict[str, Any]


class StatusRefused(EnvironmentFault):
    """The API does not take what is written: rights or schema."""


@dataclass(slots=True)
class Pace:
    """When a run's status is due. `interval_s`: between commits' writes."""

    interval_s: float = COMMIT_S
    written_s: float = float("-inf")
    not_before_s: float = float("-inf")
    failures: int = 0

    def wait_s(self, changed: Mapping[str, Any], now_s: float, *, crowded: bool = False) -> float:
        """How long a write of these changed fields has to wait; 0: now. `crowded`: others wait, too."""
        fields = set(changed)
        if crowded and not fields & URGENT:
            return max(SOON_S, self.written_s + CROWDED_S - now_s, self.not_before_s - now_s)
        if fields & MATERIAL:
            apart_s = SOON_S
        elif fields & COMMIT:
            apart_s = self.interval_s
        else:
            apart_s = max(self.interval_s, QUIET_S)
        return max(0.0, self.written_s + apart_s - now_s, self.not_before_s - now_s)

    def written(self, now_s: float) -> None:
        self.written_s, self.failures, self.not_before_s = now_s, 0, float("-inf")

    def failed(self, now_s: float) -> None:
        """It could not be."""
        self.failures += 1
        self.not_before_s = now_s + min(MAX_BACKOFF_S, 2.0 ** min(self.failures, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A CheckpointRun as the API has it."""

    uid: str
    created: str
    status: Mapping[str, Any] = field(default_factory=dict)


def served(document: Mapping[str, Any]) -> Served:
    metadata = document["metadata"]
    return Served(
        uid=metadata["uid"],
        created=metadata.get("creationTimestamp", ""),
        status=document.get("status") or {},
    )


class Statuses:
    """CheckpointRuns, for coroutines."""

    def __init__(self, call: Caller, namespaces: Sequence[str] = ()) -> None:
        """Of these namespaces alone; none named: of all."""
        self._call = call
        self._paths = [f"{ROOT}/namespaces/{each}/{PLURAL}" for each in namespaces] or [ALL]

    async def all(self) -> list[Document]:
        """Every one there is; raises `ApiUnavailable`.

        A namespace of several that may not be read (its rights went, or it did) keeps nobody from the others.
        """
        found: list[Document] = []
        refused: list[Forbidden] = []
        for path in self._paths:
            try:
                found += await self._call.every(path)
            except Forbidden as error:
                refused.append(error)
                _log.warning("runs.not_listed", path=path, error=str(error))
        if len(refused) == len(self._paths):
            raise refused[0]
        return found

    async def create(self, document: Mapping[str, Any]) -> tuple[Served, bool]:
        """Make it; (it, whether it is new). One that exists is taken as it is.

        Raises:
            ApiUnavailable: try later.
            StatusRefused: the API does not take it.
        """
        metadata = document["metadata"]
        path = f"{ROOT}/namespaces/{metadata['namespace']}/{PLURAL}"
        answer = await self._call("POST", path, document)
        if answer.ok:
            return served(answer.document), True
        if answer.status == 409:
            found = await self._call("GET", f"{path}/{metadata['name']}")
            if found.ok and found.document["spec"]["workload"]["uid"] == document["spec"]["workload"]["uid"]:
                return served(found.document), False
            answer = found
        raise StatusRefused(answer.sentence, where=f"{metadata['namespace']}/{metadata['name']}")

    async def write(
        self, namespace: str, name: str, uid: str, status: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Merge this into the status; the status after it, or None when the object is gone.

        Raises:
            ApiUnavailable: try later.
            StatusRefused: the API does not take it.
        """
        path = f"{ROOT}/namespaces/{namespace}/{PLURAL}/{name}/status"
        answer = await self._call(
            "PATCH", path, {"metadata": {"uid": uid}, "status": status}, content=MERGE, tries=2
        )
        if answer.ok:
            return served(answer.document).status
        if answer.status in {404, 409}:
            return None
        raise StatusRefused(answer.sentence, where=f"{namespace}/{name}")

    async def remove(self, namespace: str, name: str, uid: str) -> None:
        """Delete it, if it is still this one; raises `ApiUnavailable`, `StatusRefused`."""
        path = f"{ROOT}/namespaces/{namespace}/{PLURAL}/{name}"
        answer = await self._call("DELETE", path, {"preconditions": {"uid": uid}})
        if not answer.ok and answer.status not in {404, 409}:
            raise StatusRefused(answer.sentence, where=f"{namespace}/{name}")
