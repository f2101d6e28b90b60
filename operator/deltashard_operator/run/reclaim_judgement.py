"""What becomes of a finished run's bytes in the store, by its policy's `reclaimPolicy`. Pure.

Retain is nobody's work. Delete has them removed a grace after the workload's end, by a Job of the run's own namespace:
only there are the store's credentials. Before that Job is made everything must speak for it: the workload is seen to be
over (not merely without pods, as a StatefulSet of no replicas is), no pod of it lives, no other workload goes on with
the run, and the policy names the store that the run was in. What speaks against it keeps the bytes, and is said. The
Job itself looks once more, at the run's log: a run that somebody else opened since, or that has a pin, stays.
"""

from __future__ import annotations

from dataclasses import replace

from deltashard_operator.policy.workload_policy import DELETE, Policy
from deltashard_operator.run.reclaim import Reclaim, ReclaimState
from deltashard_operator.run.watched_run import Notice, Run

AGAIN_S = 6 * 3600.0
"""Between two Jobs, where the first failed."""


def looked(run: Run, policy: Policy | None, *, continued: bool, now_s: float) -> Reclaim | None:
    """What is known of it before any Job is made; None: nothing is to be removed.

    `policy` is the run's as it is now, None where there is none (any more); `continued`: another workload has the run.
    """
    before = run.reclaim
    if not run.finished:
        return None
    if before is not None and before.state in {ReclaimState.REMOVING, ReclaimState.REMOVED}:
        return before
    if policy is None or policy.reclaim != DELETE:
        return None
    if why := _against(run, policy, continued=continued):
        return _is(before, ReclaimState.KEPT, why, now_s)
    due_s = run.finished_at_s + policy.reclaim_after_s
    if before is not None and before.state is ReclaimState.FAILED:
        return before
    if before is not None and before.state is ReclaimState.KEPT and before.tries:
        return before  # the Job's own word
    if now_s < due_s:
        return _is(before, ReclaimState.WAITING, "the bytes go when the grace is over", now_s, due_s)
    living = sorted(each.name for each in run.pods.values() if each.alive)
    if living:
        return _is(before, ReclaimState.WAITING, f"pod {living[0]} is not gone yet", now_s, due_s)
    return _is(before, ReclaimState.WAITING, "a Job is to remove the bytes", now_s, due_s)


def is_due(run: Run, now_s: float) -> bool:
    """Whether a Job is to be made now."""
    found = run.reclaim
    if found is None or not found.pending or found.state is ReclaimState.REMOVING:
        return False
    return now_s >= found.due_s and not any(each.alive for each in run.pods.values())


def begun(run: Run, job: str, now_s: float) -> Run:
    """The run, whose bytes this Job removes."""
    tries = run.reclaim.tries + 1 if run.reclaim is not None else 1
    return replace(
        run,
        reclaim=Reclaim(
            state=ReclaimState.REMOVING, since_s=now_s, message=f"Job {job} removes the bytes", tries=tries
        ),
    )


def ended(run: Run, state: ReclaimState, message: str, now_s: float) -> tuple[Run, Notice]:
    """The run, of which a Job came to this; and what people should hear."""
    tries = run.reclaim.tries if run.reclaim is not None else 1
    found = Reclaim(state=state, since_s=now_s, message=message[:1024], tries=tries)
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


def _against(run: Run, policy: Policy, *, continued: bool) -> str:
    """Why the bytes stay; empty: nothing speaks for that."""
    workload = run.workload
    if not policy.reclaims:
        return "the chart's reclaim.enabled is false: the controller may make no Job that removes them"
    if not workload.native and run.finished == "Deleted":
        return (
            f"a {workload.kind} without pods may come back, and it cannot be seen whether {workload.name} is gone: "
            "`deltashard rm` removes them"
        )
    if continued:
        return "another workload goes on with the run"
    if run.store and run.store != policy.url:
        return f"they are at {run.store}, and policy {policy.name} names another store: `deltashard rm` removes them"
    return ""


def _is(
    before: Reclaim | None, state: ReclaimState, message: str, now_s: float, due_s: float = 0.0
) -> Reclaim:
    """This, since when it is so."""
    if before is not None and (before.state, before.message, before.due_s) == (state, message, due_s):
        return before
    since_s = before.since_s if before is not None and before.state is state else now_s
    return Reclaim(
        state=state, since_s=since_s, message=message, due_s=due_s, tries=before.tries if before else 0
    )
