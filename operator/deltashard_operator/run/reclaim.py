"""Whether and when a finished run's bytes go from the store, by its policy's `reclaim.policy`. Pure.

Delete has them removed a grace after the workload's end, by a Job of the run's own namespace: only there are the
store's credentials. `judged` says where that stands, why, and whether the Job is to be made now. Everything must speak
for it: the workload is over (not merely without pods, as a StatefulSet of no replicas is), none of its pods is left,
no other workload continues the run, and the policy names the store that the run was in. What speaks against it keeps
the bytes. The Job itself looks once more, at the run's log: what somebody else opened since, or what has a pin, stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deltashard_operator.api.workload_policy import DELETE, Policy
from deltashard_operator.run.observed_object import ABSENT_S

if TYPE_CHECKING:
    from deltashard_operator.run.watched_run import Run

MAX_TRIES = 5
"""Jobs that may fail before it is left to a person."""
AGAIN_S = 6 * 3600.0
"""Between two Jobs, where the first failed."""
MAX_MESSAGE = 1024
"""Characters that a status takes."""


class ReclaimState(StrEnum):
    """Where it stands."""

    WAITING = "Waiting"
    """For the grace to end, or for pods to go."""
    REMOVING = "Removing"
    """A Job is at it."""
    REMOVED = "Removed"
    KEPT = "Kept"
    """Something speaks against it."""
    FAILED = "Failed"
    """The Job did not do it; it is tried again, up to `MAX_TRIES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Of one run."""

    state: ReclaimState
    since_s: float
    message: str
    due_s: float = 0.0
    """When the bytes are to be removed, or it is to be tried again."""
    tries: int = 0
    """Jobs that were made; of a run that is Kept: by a Job's word, which is the last."""
    ready: bool = False
    """Whether a Job is to be made now. Not in the status."""

    @property
    def pending(self) -> bool:
        """Whether something is still to be done: the CheckpointRun is kept for it."""
        if self.state is ReclaimState.FAILED:
            return self.tries < MAX_TRIES
        return self.state in {ReclaimState.WAITING, ReclaimState.REMOVING}


def judged(
    run: Run, policy: Policy | None, *, objection: str = "", continued: bool = False, now_s: float
) -> Reclaim | None:
    """Where the removal stands now; None: nothing is to be removed.

    `policy`: the run's as it is now, None where there is none (any more) or it cannot be used; `objection`: what else
    was found that speaks against a removal; `continued`: another workload has the run.
    """
    before = run.reclaim
    if not run.finished:
        return None
    if before is not None and _is_the_jobs(before):
        return before
    if objection and before is not None:
        return _now(before, ReclaimState.KEPT, objection, now_s)
    if policy is None or policy.reclaim != DELETE:
        return None
    if why := _against(run, policy, continued=continued):
        return _now(before, ReclaimState.KEPT, why, now_s)
    due_s = run.finished_at_s + policy.reclaim_after_s
    if not run.workload.native:  # what it is made of may come back, as Jobs of a JobSet that restarts do
        due_s = max(due_s, run.seen_s + ABSENT_S)
    left = min((each.name for each in run.pods.values() if not each.over), default="")
    if now_s < due_s:
        return _now(before, ReclaimState.WAITING, "the bytes go when the grace is over", now_s, due_s)
    if before is not None and before.state is ReclaimState.FAILED:
        return replace(before, ready=before.pending and now_s >= before.due_s and not left)
    message = f"pod {left} is not gone yet" if left else "a Job is to remove the bytes"
    return replace(_now(before, ReclaimState.WAITING, message, now_s, due_s), ready=not left)


def begun(before: Reclaim | None, job: str, now_s: float) -> Reclaim:
    """This Job removes the bytes."""
    message, tries = f"Job {job} removes the bytes", 1 + (before.tries if before else 0)
    return Reclaim(state=ReclaimState.REMOVING, since_s=now_s, message=message, tries=tries)


def ended(before: Reclaim | None, state: ReclaimState, message: str, now_s: float) -> Reclaim:
    """A Job came to this, or none could be made."""
    began = before is not None and before.state is ReclaimState.REMOVING
    tries = (before.tries if before else 0) + (not began)
    found = Reclaim(state=state, since_s=now_s, message=message[:MAX_MESSAGE], tries=tries)
    if state is not ReclaimState.FAILED:
        return found
    more = "; it is tried again" if found.pending else f"; that was try {tries}, the last"
    return replace(found, due_s=now_s + AGAIN_S, message=message[: MAX_MESSAGE - len(more)] + more)


def _is_the_jobs(reclaim: Reclaim) -> bool:
    """Whether a Job is at work, or has said the last word."""
    kept = reclaim.state is ReclaimState.KEPT and reclaim.tries > 0
    return kept or reclaim.state in {ReclaimState.REMOVING, ReclaimState.REMOVED}


def _against(run: Run, policy: Policy, *, continued: bool) -> str:
    """Why the bytes stay; empty: nothing speaks for that."""
    workload = run.workload
    place = f"`deltashard rm` removes them (run {workload.namespace}/{run.run_id})"
    if not policy.reclaims:
        return "the chart's reclaim.enabled is false: the controller may make no Job that removes them"
    if lives := min((each.name for each in run.jobs.values() if not each.outcome), default=""):
        return f"Job {lives} has not ended"
    if not workload.native and run.finished == "Deleted":
        return (
            f"a {workload.kind} without pods may come back, and whether {workload.name} is gone cannot be seen: "
            + place
        )
    if continued:
        return "another workload continues the run"
    if not run.store:
        return f"no sidecar has reported in which store they are: {place}"
    if run.store != policy.url:
        return f"policy {policy.name} names another store now than {run.store}, where they are: {place}"
    return ""


def _now(
    before: Reclaim | None, state: ReclaimState, message: str, now_s: float, due_s: float = 0.0
) -> Reclaim:
    """This, since when it is so."""
    message = message[:MAX_MESSAGE]
    if before is not None and (before.state, before.message, before.due_s) == (state, message, due_s):
        return replace(before, ready=False)
    same = before is not None and before.state is state
    return Reclaim(
        state=state,
        since_s=before.since_s if before is not None and same else now_s,
        message=message,
        due_s=due_s,
        tries=before.tries if before is not None and state is not ReclaimState.KEPT else 0,
    )
