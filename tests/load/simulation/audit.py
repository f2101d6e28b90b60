"""The controller's requests in the API server's audit log, compared with a list of allowed writes.

The list has no write of users' objects (Jobs, pods, nodes, policies, namespaces). A forbidden request is a violation,
too: permissions are missing, or the controller tried a write that must not happen.
"""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.load.simulation.control_plane import SYSTEM, WEBHOOK

READS = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRequest:
    """One request of an account."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    status: int

    @property
    def what(self) -> str:
        """The resource, after its group if there is one."""
        return f"{self.group}/{self.resource}".removeprefix("/")

    @property
    def kind(self) -> str:
        return f"{self.verb} {self.what}"

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}: {self.status}"


ALLOWED = (
    ("create delete", "deltashard.io/checkpointruns", ""),
    ("patch", "deltashard.io/checkpointruns/status", ""),
    ("patch", "deltashard.io/checkpointpolicies/status", ""),
    ("patch", "deltashard.io/clustercheckpointpolicies/status", ""),
    ("create patch", "events", ""),
    ("patch", "deltashard.io/checkpointrequests/status", ""),
    ("delete", "deltashard.io/checkpointrequests", ""),
    ("create", "batch/jobs", "*/deltashard-reclaim-*"),
    ("create", "authentication.k8s.io/tokenreviews", ""),
    ("update", "secrets", f"{SYSTEM}/deltashard-tls"),
    ("update", "configmaps", f"{SYSTEM}/deltashard-fleet-ca"),
    ("update", "coordination.k8s.io/leases", f"{SYSTEM}/deltashard-controller"),
    ("create", "coordination.k8s.io/leases", f"{SYSTEM}/*"),
    ("patch", "admissionregistration.k8s.io/mutatingwebhookconfigurations", f"/{WEBHOOK}"),
)
"""Every allowed write of the controller: verbs, resource with its subresource, namespace/name (empty: any)."""


def _is_allowed(request: AuditedRequest) -> bool:
    return any(
        request.verb in verbs.split()
        and request.what == what
        and fnmatch.fnmatchcase(f"{request.namespace}/{request.name}", where or "*")
        for verbs, what, where in ALLOWED
    )


def requests(log: Path, user: str) -> Iterator[AuditedRequest]:
    with log.open() as lines:
        for line in lines:
            event = json.loads(line)
            # A request with an expired token has no user name.
            if event["user"].get("username") == user and event["stage"] in {"ResponseComplete", "Panic"}:
                yield _request(event)


def _request(event: dict[str, Any]) -> AuditedRequest:
    what = event.get("objectRef") or {}
    sub = what.get("subresource")
    return AuditedRequest(
        user=event["user"]["username"],
        verb=event["verb"],
        group=what.get("apiGroup", ""),
        resource=what.get("resource", event["requestURI"]) + (f"/{sub}" if sub else ""),
        namespace=what.get("namespace", ""),
        name=what.get("name", ""),
        status=(event.get("responseStatus") or {}).get("code", 0),
    )


def violations(requested: Iterable[AuditedRequest]) -> list[str]:
    """Return the kinds of requests that are not allowed, each with its count; an empty list means success."""
    found: Counter[str] = Counter()
    for request in requested:
        if request.status in {401, 403}:
            found[f"refused: {request}"] += 1
        if request.verb not in READS and not _is_allowed(request):
            found[f"not allowed: {request}"] += 1
    return [f"{what} ({times} times)" for what, times in sorted(found.items())]


def counts(requested: Iterable[AuditedRequest]) -> dict[str, int]:
    return dict(Counter(request.kind for request in requested).most_common())
