"""Statuses of policies of both kinds in the API: who uses them, and what their sidecars say of the store.

Looked at every few seconds, all of them; written when a condition changed, and counts as seldom as commits of runs. One
write at a time, so that what policies cost the API is bounded whatever happens to their runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.api import workload_policy
from deltashard_operator.api.chart_defaults import Defaults
from deltashard_operator.api.policy_cache import policy_path
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.controller.metric import ControllerMetrics
from deltashard_operator.controller.round import Rounds
from deltashard_operator.controller.run_book import Entries
from deltashard_operator.kube.call import MERGE, ApiUnavailable, Caller
from deltashard_operator.run import policy_standing, run_record
from deltashard_operator.run.watched_run import Run

LOOK_S = 5.0
BACK_OFF_S = 60.0
"""After a write that failed."""
GATHER_S = 90.0
"""So long after the begin sidecars come back: fewer than before are no news, unless as many were heard since."""
_log = structlog.get_logger("deltashard.controller")
Key = tuple[str, str]
"""(namespace, name), as `workload_policy.key_of` says."""


@dataclass(slots=True)
class _Known:
    """What was written of a policy."""

    uid: str
    status: Mapping[str, Any] = field(default_factory=dict)
    written_s: float = 0.0
    again_s: float = 0.0
    """Not before, after a write that failed."""
    heard: int = 0
    """Most sidecars of it that this controller heard at once."""


class PolicyWriter:
    """Keeps the statuses; on the controller's loop."""

    def __init__(
        self,
        books: Entries,
        *,
        call: Caller,
        defaults: Defaults,
        metrics: ControllerMetrics,
        counts_s: float,
        wall: Callable[[], float],
    ) -> None:
        """`counts_s`: counts alone are written so often at most."""
        self._books = books
        self._call = call
        self._defaults = defaults
        self._metrics = metrics
        self._counts_s = counts_s
        self._wall = wall
        self._known: dict[Key, _Known] = {}
        self._rounds = Rounds(LOOK_S, wall)
        self._gathered_s = wall() + GATHER_S

    def tick(self) -> None:
        """Begin a round, when it is time and none is under way."""
        if self._rounds.is_due() and (due := self._due(self._wall())):
            self._rounds.begin(self._write(due))

    async def settle(self) -> None:
        await self._rounds.settle()

    def _due(self, now_s: float) -> dict[Key, Mapping[str, Any]]:
        """The statuses to write now, whole, by policy."""
        using: dict[Key, list[Run]] = {}
        for entry in self._books:
            run = entry.run
            key = workload_policy.key_of(run.workload.namespace, run.wish.policy)
            using.setdefault(key, []).append(run)
        found: dict[Key, Mapping[str, Any]] = {}
        for key, seen in self._books.policies.items():
            known = self._known.get(key)
            if known is None or known.uid != seen.uid:
                known = self._known[key] = _Known(uid=seen.uid, status=seen.status)
            standing = policy_standing.of_runs(using.get(key, ()), self._url_of(key))
            if not known.status and not standing.runs:
                continue  # nobody has used it yet
            known.heard = max(known.heard, standing.sidecars)
            before = known.status.get("sidecars", 0)
            if standing.sidecars < before and known.heard < before and now_s < self._gathered_s:
                continue
            wanted = policy_standing.status(standing, known.status, generation=seen.generation, now_s=now_s)
            soon = _truths(wanted) != _truths(known.status)
            due_s = max(known.again_s, 0.0 if soon else known.written_s + self._counts_s)
            if wanted != known.status and now_s >= due_s:
                found[key] = wanted
        for key in self._known.keys() - self._books.policies.keys():
            del self._known[key]
        return found

    def _url_of(self, key: Key) -> str:
        """The store of a policy as its sidecars are given it; empty where that cannot be said."""
        try:
            spec = workload_policy.merged(self._books.specs[key], self._defaults.spec())
            return workload_policy.read(key[1], spec).url
        except (KeyError, Refusal, DeltashardError):
            return ""

    async def _write(self, due: Mapping[Key, Mapping[str, Any]]) -> None:
        for key, status in due.items():
            known = self._known.get(key)
            if known is None:
                continue
            change = run_record.patch(known.status, status)
            body = {"metadata": {"uid": known.uid}, "status": change}
            known.written_s = self._wall()
            try:
                answer = await self._call("PATCH", f"{policy_path(key)}/status", body, content=MERGE, tries=2)
            except ApiUnavailable as error:
                self._failed(known, key, str(error))
                continue
            if answer.ok:
                known.status = status
                self._metrics.policy_writes.labels("written").inc()
            elif answer.status == 409:  # made anew: the watch tells
                self._metrics.policy_writes.labels("lost").inc()
            else:
                self._failed(known, key, answer.sentence)

    def _failed(self, known: _Known, key: Key, why: str) -> None:
        known.again_s = self._wall() + BACK_OFF_S
        self._metrics.policy_writes.labels("failed").inc()
        _log.warning("policy.not_written", namespace=key[0], policy=key[1], error=why)


def _truths(status: Mapping[str, Any]) -> dict[str, str]:
    """What its conditions say, without their sentences, which may differ from pod to pod."""
    return {each["type"]: each["status"] for each in status.get("conditions") or ()}
