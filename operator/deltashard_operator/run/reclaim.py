"""Whether and when the bytes of a finished run are removed from the store, by its policy's `reclaim.policy`. Pure.

Delete removes them after a grace period by a Job in the run's namespace, where the store's credentials are. All
conditions must hold: the workload has ended (a StatefulSet scaled to zero has not), none of its pods is left, no other
workload continues the run, and the policy names the store that the run used. Otherwise the bytes are kept. The Job
checks the run's log again and keeps a run that another workload has opened since, or that has a pin. Kept and Failed
are re-evaluated while the CheckpointRun exists.
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


class ReclaimState(StrEnum):
    """State of a removal."""

    WAITING = "Waiting"
    """Waiting for the end of the grace period, for pods to end, or for a free slot."""
    REMOVING = "Removing"
    REMOVED = "Removed"
    KEPT = "Kept"
    """A condition for the removal does not hold."""
    FAILED = "Failed"


WAITING, REMOVING, REMOVED, KEPT, FAILED = ReclaimState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Removal of one run's bytes."""

    state: ReclaimState
    since_s: float
    message: str
    due_s: float = 0.0
    """End of the grace period."""
    ready: bool = False
    """Whether all conditions known without an API call hold. Not in the status."""

    @property
    def pending(self) -> bool:
        """Whether the CheckpointRun must be kept because the removal is not done."""
        return self.state in {WAITING, REMOVING}


def with_state(before: Reclaim | None, state: ReclaimState, message: str, now_s: float) -> Reclaim:
    """Return the removal in this state, keeping the time of the last state change."""
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
    """Return the state of the removal, or None if nothing is to be removed. Removing and Removed are kept.

    `policy`: the run's current policy, the reason why it is unusable, or None if it does not exist. `continued`:
    another workload continues the run.
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
    if not run.workload.native:  # its parts may be recreated, e.g. the Jobs of a restarting JobSet
        due_s = max(due_s, run.last_seen_s + ABSENT_S)
    left = min((each.name for each in run.pods.values() if not each.finished), default="")
    state, message = WAITING, "a Job will remove the bytes"
    if why := _keep_reason(run, policy, continued=continued):
        state, message = KEPT, why
    elif now_s < due_s:
        message = "the bytes are removed when the grace period ends"
    elif left:
        message = f"pod {left} has not ended yet"
    ready = state is WAITING and now_s >= due_s and not left
    was_due = before is not None and before.state in {KEPT, FAILED} and now_s >= before.due_s
    if before is not None and was_due and state is WAITING and not ready:
        return replace(before, ready=False)  # e.g. after a controller restart: report no second change
    return replace(with_state(before, state, message, now_s), due_s=due_s, ready=ready)


def _keep_reason(run: WatchedRun, policy: Policy, *, continued: bool) -> str:
    workload = run.workload
    place = f"`deltashard rm` removes them (run {workload.namespace}/{run.run_id})"
    lives = min((each.name for each in run.jobs.values() if not each.outcome), default="")
    if not policy.can_reclaim:
        return (
            "the chart's reclaim.enabled is false: the controller cannot create a Job that removes the bytes"
        )
    if lives:
        return f"Job {lives} has not ended"
    if not workload.native and run.finished == "Deleted":
        return f"cannot determine whether {workload.display_name} is permanently deleted or will be recreated: {place}"
    if continued:
        return "another workload continues the run"
    if not run.store:
        return f"no sidecar has reported the run's store: {place}"
    if run.store != policy.url:
        return f"policy {policy.name} no longer names the run's store {run.store}: {place}"
    return ""
