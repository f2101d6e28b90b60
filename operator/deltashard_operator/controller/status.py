"""CheckpointRuns and CheckpointRequests in the API: creation, status updates, deletion.

A merge patch carries the object's UID and the resourceVersion of the last response, so that concurrent writes are
detected and a recreated object is not mistaken for the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from deltashard_checkpoint.errors import EnvironmentFault

from deltashard_operator.kube.call import MERGE, Caller, Forbidden
from deltashard_operator.run.run_record import GROUP, PLURAL, VERSION

_log = structlog.get_logger("deltashard.controller")
ROOT = f"/apis/{GROUP}/{VERSION}"
ALL = f"{ROOT}/{PLURAL}"
Document = dict[str, Any]
ObjectVersion = Mapping[str, str]
"""Metadata of a patch: UID and resourceVersion of the object in the API."""


class StatusRefused(EnvironmentFault):
    """The API rejected a write because of rights or schema."""


def object_version(document: Mapping[str, Any]) -> ObjectVersion:
    metadata = document["metadata"]
    return {"uid": metadata["uid"], "resourceVersion": metadata.get("resourceVersion", "")}


def path_of(namespace: str, plural: str, name: str) -> str:
    return f"{ROOT}/namespaces/{namespace}/{plural}/{name}"


async def list_runs(call: Caller, namespaces: Sequence[str]) -> list[Document]:
    """Return all CheckpointRuns of these namespaces (empty: all). Raises `ApiUnavailable`.

    Unreadable namespaces (deleted, or without rights) are skipped unless all are unreadable.
    """
    paths = [f"{ROOT}/namespaces/{each}/{PLURAL}" for each in namespaces] or [ALL]
    found: list[Document] = []
    refused = 0
    for path in paths:
        try:
            found += await call.list_all(path)
        except Forbidden as error:
            refused += 1
            if refused == len(paths):
                raise
            _log.warning("runs.list_forbidden", path=path, error=str(error))
    return found


async def create(call: Caller, document: Mapping[str, Any]) -> tuple[Document, bool]:
    """Create or get a CheckpointRun: (object, whether it is new). Raises `ApiUnavailable` and `StatusRefused`."""
    path = path_of(document["metadata"]["namespace"], PLURAL, document["metadata"]["name"])
    answer = await call("POST", path.rpartition("/")[0], document)
    if answer.ok:
        return answer.document, True
    if answer.status == 409:
        answer = await call("GET", path)
        if answer.ok and answer.document["spec"]["workload"]["uid"] == document["spec"]["workload"]["uid"]:
            return answer.document, False
    raise StatusRefused(answer.sentence, where=path)


async def write(
    call: Caller, path: str, known: ObjectVersion, change: Mapping[str, Any]
) -> tuple[Document | None, bool]:
    """Merge `change` into the status of an object. Returns (current object, whether the write succeeded).

    The object is None if it was deleted. The write fails if the object changed concurrently. Raises `ApiUnavailable`,
    or `StatusRefused` if the API rejects it.
    """
    body = {"metadata": known, "status": change}
    answer = await call("PATCH", f"{path}/status", body, content=MERGE, tries=2)
    done = answer.status != 409
    if not done:
        answer = await call("GET", path)
    if answer.status == 404 or (answer.ok and answer.document["metadata"]["uid"] != known["uid"]):
        return None, done
    if not answer.ok:
        raise StatusRefused(answer.sentence, where=path)
    return answer.document, done


async def remove(call: Caller, path: str, uid: str) -> None:
    """Delete an object if its UID matches. Raises `ApiUnavailable` and `StatusRefused`."""
    answer = await call("DELETE", path, {"preconditions": {"uid": uid}})
    if not answer.ok and answer.status not in {404, 409}:
        raise StatusRefused(answer.sentence, where=path)
