"""Whether and when a finished run's bytes go from the store, by its policy's `reclaim.policy`. Pure.

Delete has them removed a grace after the workload's end, by a Job of the run's own namespace: only there are the
store's credentials. Everything must speak for it: the workload is over (not merely without pods, as a StatefulSet of no
replicas is), none of its pods is left, no other workload continues the run, and the policy names the store that the run
was in. What speaks against it keeps the bytes. The Job itself looks once more, at the run's log: what somebody else
opened since, or what has a pin, stays. Kept and Failed are looked at again as long as the CheckpointRun is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deltashard_operator.api.refusal import Refusal
from deltashard_operator.api.workload_policy import DELETE, Policy
from deltashard_operator.run.observed_object import ABSENT_S

if TYPE_CHECKING:
    from deltashard_operator.run.watched_run import WatchedRun

MAX_MESSAGE = 1024
"""Characters that a status takes."""


class ReclaimState(StrEnum):
    """Where it stands."""

    WAITING = "Waiting"
    """For the grace to end, for pods to go, or for its turn."""
    REMOVING = "Removing"
    """A Job is at it."""
    REMOVED = "Removed"
    KEPT = "Kept"
    """Something speaks against it."""
    FAILED = "Failed"
    """The Job did not do it."""


WAITING, REMOVING, REMOVED, KEPT, FAILED = ReclaimState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Of one run."""

    state: ReclaimState
    since_s: float
    message: str
    due_s: float = 0.0
    """When the grace is over."""
    ready: bool = False
    """Whether everything speaks for it, as far as it is known without asking the API. Not in the status."""

    @property
    def pending(self) -> bool:
        """Whether the CheckpointRun is kept for what is still to be done."""
        return self.state in {WAITING, REMOVING}


def with_state(before: Reclaim | None, state: ReclaimState, message: str, now_s: float) -> Reclaim:
    """It stands so now."""
    same = before is not None and before.state is state
    return Reclaim(
        state=state,
        since_s=before.since_s if before is not None and same else now_s,
        message=message[:MAX_MESSAGE],
        due_s=before.due_s if before is not None else 0.0,
    )


def reconcile(
    run: WatchedRun, policy: Policy | Refusal | None, *, continued: bool = False, now_s: float
) -> Reclaim | None:
    """Where the removal stands; None: nothing is to be removed. One that a Job does, or has done, stays so.

    `policy`: the run's as it is now, why it cannot be used, or None where there is none (any more); `continued`:
    another workload has the run.
    """
    before = run.reclaim
    if not run.finished:
        return None
    if before is not None and before.state in {REMOVING, REMOVED}:
        return before
    if isinstance(policy, Refusal):
        why = f"the policy cannot be used: {policy.what}"
        return None if before is None else with_state(before, KEPT, why, now_s)
    if policy is None or policy.reclaim != DELETE:
        return None
    due_s = run.finished_at_s + policy.reclaim_after_s
    if not run.workload.native:  # what it is made of may come back, as Jobs of a JobSet that restarts do
        due_s = max(due_s, run.last_seen_s + ABSENT_S)
    left = min((each.name for each in run.pods.values() if not each.finished), default="")
    state, message = WAITING, "a Job is to remove the bytes"
    if why := _keep_reason(run, policy, continued=continued):
        state, message = KEPT, why
    elif now_s < due_s:
        message = "the bytes go when the grace is over"
    elif left:
        message = f"pod {left} is not gone yet"
    ready = state is WAITING and now_s >= due_s and not left
    was_due = before is not None and before.state in {KEPT, FAILED} and now_s >= before.due_s
    if before is not None and was_due and state is WAITING and not ready:
        return replace(before, ready=False)  # as after a controller's restart; nobody need hear of it again
    return replace(with_state(before, state, message, now_s), due_s=due_s, ready=ready)


def _keep_reason(run: WatchedRun, policy: Policy, *, continued: bool) -> str:
    """Why the bytes stay; empty: nothing speaks for that."""
    workload = run.workload
    place = f"`deltashard rm` removes them (run {workload.namespace}/{run.run_id})"
    lives = min((each.name for each in run.jobs.values() if not each.outcome), default="")
    if not policy.can_reclaim:
        return "the chart's reclaim.enabled is false: the controller may make no Job that removes them"
    if lives:
        return f"Job {lives} has not ended"
    if not workload.native and run.finished == "Deleted":
        return f"whether {workload.display_name} is gone for good, or comes back, cannot be seen: {place}"
    if continued:
        return "another workload continues the run"
    if not run.store:
        return f"no sidecar has reported in which store they are: {place}"
    if run.store != policy.url:
        return f"policy {policy.name} names another store now than {run.store}, where they are: {place}"
    return ""
