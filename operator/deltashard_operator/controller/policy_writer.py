"""Statuses of policies of both kinds in the API: how many runs use them, and whether they can."""

from __future__ import annotations

from functools import partial

from deltashard_operator.api.policy_cache import policy_path
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import status
from deltashard_operator.controller.run_book import Entries, PolicyKey
from deltashard_operator.controller.write_queue import Rank
from deltashard_operator.run import policy_standing, run_record
from deltashard_operator.run.watched_run import Run


def look(books: Entries, now_s: float) -> None:
    """Offer what is to be written; it comes back by the watch, and is compared with the next time."""
    using: dict[PolicyKey, list[Run]] = {}
    for entry in books:
        if not entry.run.finished:
            using.setdefault(books.policy_key(entry.run), []).append(entry.run)
    for key, document in books.policies.items():
        before, runs = document.get("status") or {}, using.get(key, [])
        if not before and not runs:
            continue  # nobody has used it yet
        policies = (books.policy_of(run) for run in runs)
        url = next((each.url for each in policies if isinstance(each, Policy)), "")
        generation = document["metadata"].get("generation", 0)
        wanted = policy_standing.status(runs, before, url=url, generation=generation, now_s=now_s)
        if change := run_record.patch(before, wanted):
            rank = Rank.CONDITION if "conditions" in change else Rank.COMMIT
            write = partial(status.write, books.call, policy_path(key), status.served(document), change)
            books.queue.offer(("policy", *key), rank, write)
        else:
            books.queue.withdraw(("policy", *key))
