"""What the controller did in the cluster, as the API server wrote it down: held against a list of what it may write.

Everything of the users' (Jobs, pods, nodes, policies, namespaces) is absent from the list, in whatever way it would be
written. A request that was forbidden is a finding, too: rights are missing, or something was tried that must not be.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.load.simulation.control_plane import SYSTEM, WEBHOOK

READS = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """One kind of write."""

    verbs: frozenset[str]
    group: str
    resource: str
    """With its subresource."""
    names: frozenset[str] = frozenset()
    """Of objects; empty: any."""
    begins: str = ""
    """How their names begin."""
    namespace: str = ""
    """Empty: any."""

    def covers(self, request: Request) -> bool:
        """Whether it is this kind of write."""
        return (
            request.verb in self.verbs
            and (request.group, request.resource) == (self.group, self.resource)
            and (not self.names or request.name in self.names)
            and request.name.startswith(self.begins)
            and (not self.namespace or request.namespace == self.namespace)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of an account."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    status: int

    @property
    def kind(self) -> str:
        """For counting."""
        return f"{self.verb} {self.group}{'/' if self.group else ''}{self.resource}"

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}: {self.status}"


def _verbs(*verbs: str) -> frozenset[str]:
    return frozenset(verbs)


ALLOWED = (
    Allowed(verbs=_verbs("create", "delete"), group="deltashard.io", resource="checkpointruns"),
    Allowed(verbs=_verbs("patch"), group="deltashard.io", resource="checkpointruns/status"),
    Allowed(verbs=_verbs("patch"), group="deltashard.io", resource="checkpointpolicies/status"),
    Allowed(verbs=_verbs("patch"), group="deltashard.io", resource="clustercheckpointpolicies/status"),
    Allowed(verbs=_verbs("create", "patch"), group="", resource="events"),
    Allowed(verbs=_verbs("patch"), group="deltashard.io", resource="checkpointrequests/status"),
    Allowed(verbs=_verbs("delete"), group="deltashard.io", resource="checkpointrequests"),
    Allowed(verbs=_verbs("create"), group="batch", resource="jobs", begins="deltashard-reclaim-"),
    Allowed(verbs=_verbs("create"), group="authentication.k8s.io", resource="tokenreviews"),
    Allowed(
        verbs=_verbs("update"),
        group="",
        resource="secrets",
        names=frozenset({"deltashard-tls"}),
        namespace=SYSTEM,
    ),
    Allowed(
        verbs=_verbs("update"),
        group="",
        resource="configmaps",
        names=frozenset({"deltashard-fleet-ca"}),
        namespace=SYSTEM,
    ),
    Allowed(
        verbs=_verbs("update"),
        group="coordination.k8s.io",
        resource="leases",
        names=frozenset({"deltashard-controller"}),
        namespace=SYSTEM,
    ),
    Allowed(verbs=_verbs("create"), group="coordination.k8s.io", resource="leases", namespace=SYSTEM),
    Allowed(
        verbs=_verbs("patch"),
        group="admissionregistration.k8s.io",
        resource="mutatingwebhookconfigurations",
        names=frozenset({WEBHOOK}),
    ),
)
"""Every write the controller has a reason for."""


def requests(log: Path, user: str) -> Iterator[Request]:
    """The user's requests, in the order of their answers."""
    with log.open() as lines:
        for line in lines:
            event = json.loads(line)
            # Who shows a token that is none any more is nobody: such a request has no name.
            if event["user"].get("username") == user and event["stage"] in {"ResponseComplete", "Panic"}:
                yield _request(event)


def _request(event: dict[str, Any]) -> Request:
    what = event.get("objectRef") or {}
    sub = what.get("subresource")
    return Request(
        user=event["user"]["username"],
        verb=event["verb"],
        group=what.get("apiGroup", ""),
        resource=what.get("resource", event["requestURI"]) + (f"/{sub}" if sub else ""),
        namespace=what.get("namespace", ""),
        name=what.get("name", ""),
        status=(event.get("responseStatus") or {}).get("code", 0),
    )


def findings(asked: Iterable[Request], allowed: Iterable[Allowed] = ALLOWED) -> list[str]:
    """What it should not have asked for, each kind once with how often; empty is well."""
    rules = tuple(allowed)
    found: Counter[str] = Counter()
    for request in asked:
        if request.status in {401, 403}:
            found[f"refused: {request}"] += 1
        if request.verb not in READS and not any(rule.covers(request) for rule in rules):
            found[f"not allowed: {request}"] += 1
    return [f"{what} ({times} times)" for what, times in sorted(found.items())]


def counts(asked: Iterable[Request]) -> dict[str, int]:
    """How often it asked for what."""
    return dict(Counter(request.kind for request in asked).most_common())
