"""CheckpointRuns in the API: made, their status kept, removed. The only objects but Events that the controller writes.

`Statuses` writes what it is given and says what came of it; when to write, `write_queue` says. A merge patch carries
the object's UID and the version that it was made from, which is the API's last answer to us: nothing that somebody else
wrote is overwritten unseen, and a CheckpointRun that was deleted and made again is never taken for the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import MERGE, Caller, Forbidden
from deltashard_operator.run.run_record import GROUP, PLURAL, VERSION

_log = structlog.get_logger("deltashard.controller")
ROOT = f"/apis/{GROUP}/{VERSION}"
ALL = f"{ROOT}/{PLURAL}"
Document = dict[str, Any]


class StatusRefused(EnvironmentFault):
    """The API does not take what is written: rights or schema."""


class Conflict(Exception):
    """Somebody else wrote it since our last answer; `document` is what it is now."""

    def __init__(self, document: Document) -> None:
        super().__init__("the object has changed")
        self.document = document


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A CheckpointRun as the API has it, but for its status."""

    uid: str
    version: str
    created: str


def served(document: Mapping[str, Any]) -> Served:
    metadata = document["metadata"]
    return Served(
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        created=metadata.get("creationTimestamp", ""),
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

    async def create(self, document: Mapping[str, Any]) -> tuple[Document, bool]:
        """Make it; (it, whether it is new). One that exists is taken as it is.

        Raises:
            ApiUnavailable: try later.
            StatusRefused: the API does not take it.
        """
        metadata = document["metadata"]
        path = f"{ROOT}/namespaces/{metadata['namespace']}/{PLURAL}"
        answer = await self._call("POST", path, document)
        if answer.ok:
            return answer.document, True
        if answer.status == 409:
            found = await self._call("GET", f"{path}/{metadata['name']}")
            if found.ok and found.document["spec"]["workload"]["uid"] == document["spec"]["workload"]["uid"]:
                return found.document, False
            answer = found
        raise StatusRefused(answer.sentence, where=f"{metadata['namespace']}/{metadata['name']}")

    async def write(
        self, namespace: str, name: str, known: Served, status: Mapping[str, Any]
    ) -> Document | None:
        """Merge this into the status; the object after it, or None when it is gone.

        Raises:
            Conflict: somebody else wrote it.
            ApiUnavailable: try later.
            StatusRefused: the API does not take it.
        """
        path = f"{ROOT}/namespaces/{namespace}/{PLURAL}/{name}"
        metadata = {"uid": known.uid, "resourceVersion": known.version}
        body = {"metadata": metadata, "status": status}
        answer = await self._call("PATCH", f"{path}/status", body, content=MERGE, tries=2)
        if answer.status == 409:
            answer = await self._call("GET", path)
            if answer.ok and served(answer.document).uid == known.uid:
                raise Conflict(answer.document)
        elif answer.ok:
            return answer.document
        if answer.ok or answer.status == 404:
            return None
        raise StatusRefused(answer.sentence, where=f"{namespace}/{name}")

    async def remove(self, namespace: str, name: str, uid: str) -> None:
        """Delete it, if it is still this one; raises `ApiUnavailable`, `StatusRefused`."""
        path = f"{ROOT}/namespaces/{namespace}/{PLURAL}/{name}"
        answer = await self._call("DELETE", path, {"preconditions": {"uid": uid}})
        if not answer.ok and answer.status not in {404, 409}:
            raise StatusRefused(answer.sentence, where=f"{namespace}/{name}")
