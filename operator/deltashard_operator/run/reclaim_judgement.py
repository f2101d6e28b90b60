"""What becomes of a finished run's bytes in the store, by its policy's `reclaim.policy`. Pure.

Retain is nobody's work. Delete has them removed a grace after the workload's end, by a Job of the run's own namespace:
only there are the store's credentials. Before that Job is made everything must speak for it: the workload is seen to be
over (not merely without pods, as a StatefulSet of no replicas is), none of its pods is left, no other workload goes on
with the run, and the policy names the store that the run was in. What speaks against it keeps the bytes, and is said.
The Job itself looks once more, at the run's log: a run that somebody else opened since, or that has a pin, stays.
"""

from __future__ import annotations

from dataclasses import replace

from deltashard_operator.api.workload_policy import DELETE, Policy
from deltashard_operator.run.judgement import ABSENT_S
from deltashard_operator.run.reclaim import MAX_MESSAGE, Reclaim, ReclaimState
from deltashard_operator.run.watched_run import Notice, Run

AGAIN_S = 6 * 3600.0
"""Between two Jobs, where the first failed."""


def looked(
    run: Run, policy: Policy | None, *, objection: str = "", continued: bool = False, now_s: float
) -> Reclaim | None:
    """What is known of it before any Job is made; None: nothing is to be removed.

    `policy` is the run's as it is now, None where there is none (any more) or it cannot be used; `objection`: what else
    was found that speaks against a removal; `continued`: another workload has the run.
    """
    before = run.reclaim
    if not run.finished:
        return None
    if before is not None and before.is_settled:
        return before
    if objection and before is not None:
        return _is(before, ReclaimState.KEPT, objection, now_s)
    if policy is None or policy.reclaim != DELETE:
        return None
    if why := _against(run, policy, continued=continued):
        return _is(before, ReclaimState.KEPT, why, now_s)
    due_s = run.finished_at_s + policy.reclaim_after_s
    if not run.workload.native:  # what it is made of may come back, as Jobs of a JobSet that restarts do
        due_s = max(due_s, run.seen_s + ABSENT_S)
    if now_s < due_s:
        return _is(before, ReclaimState.WAITING, "the bytes go when the grace is over", now_s, due_s)
    if before is not None and before.state is ReclaimState.FAILED:
        return before
    if left := _left(run):
        return _is(before, ReclaimState.WAITING, f"pod {left} is not gone yet", now_s, due_s)
    return _is(before, ReclaimState.WAITING, "a Job is to remove the bytes", now_s, due_s)


def is_due(run: Run, now_s: float) -> bool:
    found = run.reclaim
    if found is None or not found.pending or found.state is ReclaimState.REMOVING:
        return False
    return now_s >= found.due_s and not _left(run)


def begun(run: Run, job: str, now_s: float) -> Run:
    """The run, whose bytes this Job removes."""
    found = Reclaim(
        state=ReclaimState.REMOVING,
        since_s=now_s,
        message=f"Job {job} removes the bytes",
        tries=_tries(run.reclaim) + 1,
    )
    return replace(run, reclaim=found)


def ended(run: Run, state: ReclaimState, message: str, now_s: float) -> tuple[Run, Notice]:
    """The run, of which a Job came to this, or none could be made; and what people should hear."""
    before = run.reclaim
    began = before is not None and before.state is ReclaimState.REMOVING
    tries = _tries(before) + (0 if began else 1)
    found = Reclaim(state=state, since_s=now_s, message=message[:MAX_MESSAGE], tries=tries)
    match state:
        case ReclaimState.REMOVED:
            notice = Notice(reason="Reclaimed", message=message, warning=False)
        case ReclaimState.KEPT:
            notice = Notice(reason="ReclaimKept", message=message)
        case _:
            found = replace(found, due_s=now_s + AGAIN_S)
            more = "it is tried again" if found.pending else f"that was try {tries}, the last"
            notice = Notice(reason="ReclaimFailed", message=f"{message}; {more}")
    return replace(run, reclaim=found), notice


def _tries(before: Reclaim | None) -> int:
    return 0 if before is None else before.tries


def _left(run: Run) -> str:
    """A pod of it that has not ended, be it on its way out; empty: none."""
    left = sorted(each.name for each in run.pods.values() if each.phase not in {"Succeeded", "Failed"})
    return left[0] if left else ""


def _against(run: Run, policy: Policy, *, continued: bool) -> str:
    """Why the bytes stay; empty: nothing speaks for that."""
    workload, place = (
        run.workload,
        f"`deltashard rm` removes them (run {run.workload.namespace}/{run.run_id})",
    )
    if not policy.reclaims:
        return "the chart's reclaim.enabled is false: the controller may make no Job that removes them"
    lives = sorted(each.name for each in run.jobs.values() if not each.outcome)
    if lives:
        return f"Job {lives[0]} has not ended"
    if not workload.native and run.finished == "Deleted":
        return (
            f"a {workload.kind} without pods may come back, and whether {workload.name} is gone cannot be seen: "
            + place
        )
    if continued:
        return "another workload goes on with the run"
    if not run.store:
        return f"no sidecar has said in which store they are: {place}"
    if run.store != policy.url:
        return f"policy {policy.name} names another store now than {run.store}, where they are: {place}"
    return ""


def _is(
    before: Reclaim | None, state: ReclaimState, message: str, now_s: float, due_s: float = 0.0
) -> Reclaim:
    """This, since when it is so."""
    message = message[:MAX_MESSAGE]
    if before is not None and (before.state, before.message, before.due_s) == (state, message, due_s):
        return before
    return Reclaim(
        state=state,
        since_s=before.since_s if before is not None and before.state is state else now_s,
        message=message,
        due_s=due_s,
        # `Kept` with tries is a Job's word, which is the last.
        tries=0 if state is ReclaimState.KEPT else _tries(before),
    )
