"""Writes the status of policies of both kinds: number of runs, and whether they can use the policy."""

from __future__ import annotations

from functools import partial

from deltashard_operator.api.policy_cache import policy_path
from deltashard_operator.api.workload_policy import Policy
from deltashard_operator.controller import status
from deltashard_operator.controller.run_store import PolicyKey, RunStore
from deltashard_operator.controller.write_queue import Priority
from deltashard_operator.run import policy_status, run_record
from deltashard_operator.run.watched_run import WatchedRun


def reconcile(run_store: RunStore, now_s: float) -> None:
    """Queue changed statuses. The watch returns what was written, which is compared again."""
    using: dict[PolicyKey, list[WatchedRun]] = {}
    for entry in run_store:
        if not entry.run.finished:
            using.setdefault(run_store.policy_key(entry.run), []).append(entry.run)
    for key, document in run_store.policies.items():
        before, runs = document.get("status") or {}, using.get(key, [])
        if not before and not runs:
            continue  # not used yet
        policies = (run_store.policy_of(run) for run in runs)
        url = next((each.url for each in policies if isinstance(each, Policy)), "")
        generation = document["metadata"].get("generation", 0)
        wanted = policy_status.status(runs, before, url=url, generation=generation, now_s=now_s)
        if change := run_record.patch(before, wanted):
            priority = Priority.CONDITION if "conditions" in change else Priority.COMMIT
            write = partial(
                status.write, run_store.call, policy_path(key), status.object_version(document), change
            )
            run_store.queue.offer(("policy", *key), priority, write)
        else:
            run_store.queue.withdraw(("policy", *key))
