"""Statuses of policies of both kinds in the API: who uses them, and what their sidecars say of the store.

Looked at every few seconds, all of them; a condition that changed is written as one of a run is, and counts as seldom
as commits of runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deltashard_checkpoint.errors import DeltashardError

from deltashard_operator.api import workload_policy
from deltashard_operator.api.policy_cache import policy_path
from deltashard_operator.api.refusal import Refusal
from deltashard_operator.controller.run_book import Entries
from deltashard_operator.controller.status import StatusRefused
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.kube.call import MERGE
from deltashard_operator.run import policy_standing, run_record
from deltashard_operator.run.watched_run import Run

LOOK_S = 5.0
GATHER_S = 330.0
"""So long after the begin sidecars come back: fewer than before are no news, unless as many were heard since."""
Key = tuple[str, str]
"""(namespace, name), as `workload_policy.key_of` says."""


@dataclass(slots=True)
class _Known:
    """What was written of a policy."""

    uid: str
    status: Mapping[str, Any] = field(default_factory=dict)
    heard: int = 0
    """Most sidecars of it that this controller heard at once."""


class PolicyWriter:
    """Keeps the statuses; on the controller's loop."""

    def __init__(self, books: Entries) -> None:
        self._books = books
        self._known: dict[Key, _Known] = {}
        self._looked_s = 0.0
        self._gathered_s = books.wall() + GATHER_S

    def tick(self) -> None:
        """Look at all of them, when it is time, and offer what is to be written."""
        now_s = self._books.wall()
        if abs(now_s - self._looked_s) < LOOK_S:
            return
        self._looked_s = now_s
        using: dict[Key, list[Run]] = {}
        for entry in self._books:
            run = entry.run
            key = workload_policy.key_of(run.workload.namespace, run.wish.policy)
            using.setdefault(key, []).append(run)
        for key in self._known.keys() - self._books.policies.keys():
            del self._known[key]
            self._books.queue.forget(("policy", *key))
        for key in self._books.policies:
            self._look(key, using.get(key, ()), now_s)

    def _look(self, key: Key, runs: list[Run] | tuple[()], now_s: float) -> None:
        seen = self._books.policies[key]
        known = self._known.get(key)
        if known is None or known.uid != seen.uid:
            known = self._known[key] = _Known(uid=seen.uid, status=seen.status)
        standing = policy_standing.of_runs(runs, now_s, self._url_of(key))
        if not known.status and not standing.runs:
            return  # nobody has used it yet
        known.heard = max(known.heard, standing.sidecars)
        before = known.status.get("sidecars", 0)
        if standing.sidecars < before and known.heard < before and now_s < self._gathered_s:
            return
        wanted = policy_standing.status(standing, known.status, generation=seen.generation, now_s=now_s)
        if wanted == known.status:
            self._books.queue.withdraw(("policy", *key))
            return
        rank = Rank.COMMIT if _truths(wanted) == _truths(known.status) else Rank.CONDITION
        self._books.queue.offer(("policy", *key), rank, partial(self._write, key, known, wanted))

    def _url_of(self, key: Key) -> str:
        """The store of a policy as its sidecars are given it; empty where that cannot be said."""
        try:
            spec = workload_policy.merged(self._books.policies[key].spec, self._books.defaults.spec())
            return workload_policy.read(key[1], spec).url
        except (KeyError, Refusal, DeltashardError):
            return ""

    async def _write(self, key: Key, known: _Known, status: Mapping[str, Any]) -> None:
        body = {"metadata": {"uid": known.uid}, "status": run_record.patch(known.status, status)}
        answer = await self._books.call("PATCH", f"{policy_path(key)}/status", body, content=MERGE, tries=2)
        gone = answer.status in {404, 409}  # or made anew: the watch tells
        self._books.metrics.writes.labels("written" if answer.ok else "lost" if gone else "failed").inc()
        if answer.ok:
            known.status = status
        elif not gone:
            raise StatusRefused(answer.sentence, where="/".join(filter(None, key)))


def _truths(status: Mapping[str, Any]) -> dict[str, str]:
    """What its conditions say, without their sentences, which may differ from pod to pod."""
    return {each["type"]: each["status"] for each in status.get("conditions") or ()}
