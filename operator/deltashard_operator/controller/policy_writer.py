"""Statuses of policies of both kinds in the API: how many runs use them, and whether they can.

Looked at every few seconds, all of them. What was written comes back by the watch, and is compared with the next time.
"""

from __future__ import annotations

from functools import partial

from deltashard_operator.api.policy_cache import policy_path
from deltashard_operator.controller import status
from deltashard_operator.controller.run_book import Entries, PolicyKey
from deltashard_operator.controller.status import served
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.run import policy_standing, run_record
from deltashard_operator.run.watched_run import Run

LOOK_S = 5.0


class PolicyWriter:
    """Keeps the statuses; on the controller's loop."""

    def __init__(self, books: Entries) -> None:
        self._books = books
        self._looked_s = float("-inf")

    def tick(self) -> None:
        """Look at all of them, when it is time, and offer what is to be written."""
        now_s = self._books.wall()
        if abs(now_s - self._looked_s) < LOOK_S:
            return
        self._looked_s = now_s
        using: dict[PolicyKey, list[Run]] = {}
        for entry in self._books:
            if not entry.run.finished:
                using.setdefault(self._books.policy_key(entry.run), []).append(entry.run)
        for key, document in self._books.policies.items():
            before, runs = document.get("status") or {}, using.get(key, [])
            if not before and not runs:
                continue  # nobody has used it yet
            generation = document["metadata"].get("generation", 0)
            wanted = policy_standing.status(runs, before, generation=generation, now_s=now_s)
            change = run_record.patch(before, wanted)
            if change:
                rank = Rank.CONDITION if "conditions" in change else Rank.COMMIT
                write = partial(status.write, self._books.call, policy_path(key), served(document), change)
                self._books.queue.offer(("policy", *key), rank, write)
            else:
                self._books.queue.withdraw(("policy", *key))
