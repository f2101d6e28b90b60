"""Losses of training: what was lost, when and why; how many interruptions that makes; what to expect. Pure.

A **loss** is one end of a trainer that had begun: a pod that is gone or going, a training container that ended and is
started again in place, or a trainer that left its sidecar without a word. Its cause is read from the pod's conditions
(DisruptionTarget), its container statuses and the node. What somebody asked for (a deletion by hand, a suspension) is a
loss, but no failure.

An **interruption** is what stops training once, however many pods it takes with it; interruptions are the failures
that are counted. The log's attempt number rises by one each time training is opened again, so it counts them, also
those that happened while no controller looked: an attempt that rose by `d` means `d` interruptions, and the losses seen
meanwhile say why. Losses after which no attempt was opened yet are one interruption that is not over. Without
attempts (sidecars that cannot reach us), a burst of losses is one. The attempt is settled `SETTLE_S` after it rose,
because the API tells of the pod's end a little later than the new trainer tells of its attempt.

Where each pod of an Indexed Job is a run of its own in the store, each has attempts of its own and a tally of its own,
and the workload's failures are all of theirs.

MTBF = (prior + training time) / (1 + failures) over a window: the prior is one failure in 12 hours, near the medians
that large fleets report (8 to 17 h), and counts as little as one failure does.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deltashard_operator.run.observed_object import JobView, PodView

SETTLE_S = 20.0
BURST_S = 60.0
"""Losses this close together are one interruption where attempts cannot tell."""
PRIOR_S = 12 * 3600.0
WINDOW_S = 7 * 86400.0
MAX_LOSSES = 32
HORIZON_S = 86400.0
"""Restores are expected over the coming day."""


class LossCause(enum.StrEnum):
    """Cause of the loss of a trainer."""

    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    TAINT_EVICTED = "TaintEvicted"
    NODE_LOST = "NodeLost"
    NODE_PRESSURE = "NodePressure"
    NODE_SHUTDOWN = "NodeShutdown"
    OOM_KILLED = "OOMKilled"
    ERROR = "Error"
    EXITED = "Exited"
    """Exit code 0, but not as the end of the workload."""
    TRAINER_LOST = "TrainerLost"
    """It left its sidecar without detaching; the pod says nothing."""
    FAILED = "PodFailed"
    DELETED = "Deleted"
    SUSPENDED = "Suspended"
    UNSEEN = "Unseen"
    """Nobody looked: the attempt number tells that it happened."""


ASKED = frozenset({LossCause.DELETED, LossCause.SUSPENDED})
"""Causes that are somebody's wish, and no failures."""

_DISRUPTIONS = {
    "EvictionByEvictionAPI": LossCause.EVICTED,
    "PreemptionByScheduler": LossCause.PREEMPTED,
    "DeletionByTaintManager": LossCause.TAINT_EVICTED,
    "DeletionByPodGC": LossCause.NODE_LOST,
    "TerminationByKubelet": LossCause.NODE_PRESSURE,
}
_REASONS = {
    "Evicted": LossCause.NODE_PRESSURE,
    "NodeShutdown": LossCause.NODE_SHUTDOWN,
    "Terminated": LossCause.NODE_SHUTDOWN,  # the kubelet's graceful shutdown
    "NodeLost": LossCause.NODE_LOST,
    "Preempting": LossCause.PREEMPTED,  # by the kubelet, for a critical pod
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss of a trainer."""

    at_s: float
    cause: LossCause
    message: str = ""
    pod: str = ""
    pod_uid: str = ""
    node: str = ""
    run: str = ""
    """The pod's number where each is a run of its own; empty: the one run of the workload."""
    attempt: int = 0
    """The newest attempt of this run known when it happened; what came of it is in the next one."""
    interruptions: int = 1
    """Interruptions that it stands for; more than one only where nobody looked."""

    @property
    def asked(self) -> bool:
        """Whether somebody wanted it."""
        return self.cause in ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The failures of a run in the store so far. Survives the controller in the CheckpointRun's status."""

    settled: int = 0
    """Interruptions after which training was opened again."""
    attempt: int = 0
    """The attempt up to which interruptions are settled; 0: no attempt was ever told."""
    losses: tuple[Loss, ...] = ()
    """The newest losses, oldest first, `MAX_LOSSES` at most."""
    rose_at_s: float = 0.0
    """When the attempt was seen to rise beyond the settled one; 0: it did not."""
    bursts: int = 0
    """Interruptions counted without attempts."""

    @property
    def open_losses(self) -> tuple[Loss, ...]:
        """Losses since the settled attempt was opened."""
        return tuple(each for each in self.losses if each.attempt == self.attempt)

    @property
    def failures(self) -> int:
        """Interruptions, the one that goes on included."""
        going_on = self.attempt > 0 and any(not each.asked for each in self.open_losses)
        return self.settled + self.bursts + int(going_on)


def loss_of_pod(
    pod: PodView, *, gone: bool, node_ready: bool, job: JobView | None, now_s: float
) -> Loss | None:
    """The loss that a pod's end is, or None when it is none.

    Args:
        pod: as last seen.
        gone: the object is deleted.
        node_ready: its node is there and well.
        job: the Job it is of, where there is one and it exists.
        now_s: the time where the pod does not tell.
    """
    if not pod.started or pod.phase == "Succeeded":
        return None
    ended = pod.ending if pod.ending is not None and pod.ending.at_s else None
    at_s = ended.at_s if ended is not None and pod.phase == "Failed" else now_s
    if pod.disruption:
        cause = _DISRUPTIONS.get(pod.disruption, LossCause.EVICTED)
        if cause is LossCause.TAINT_EVICTED and not node_ready:
            cause = LossCause.NODE_LOST
        return _loss(pod, cause, pod.disruption_message or pod.disruption, at_s)
    if pod.phase == "Failed":
        if pod.reason in _REASONS:
            return _loss(pod, _REASONS[pod.reason], pod.reason, at_s)
        if ended is not None and ended.exit_code:
            return _loss(pod, *_of_ending(pod), at_s)
        return _loss(pod, LossCause.FAILED, pod.reason or "the pod failed", at_s)
    if pod.terminating_at_s or gone:
        if job is not None and job.suspended:
            return _loss(pod, LossCause.SUSPENDED, "the Job is suspended", now_s)
        if gone and not pod.terminating_at_s and not node_ready:
            return _loss(pod, LossCause.NODE_LOST, f"the pod vanished with its node {pod.node}", now_s)
        return _loss(pod, LossCause.DELETED, "the pod was deleted", now_s)
    return None


def loss_of_restart(pod: PodView, now_s: float) -> Loss:
    """The loss that a restart of a training container in place is."""
    at_s = pod.ending.at_s if pod.ending is not None and pod.ending.at_s else now_s
    return _loss(pod, *_of_ending(pod), at_s)


def _of_ending(pod: PodView) -> tuple[LossCause, str]:
    if pod.ending is None:
        return LossCause.ERROR, "a container was started again"
    name, code = pod.ending.container, pod.ending.exit_code
    if pod.ending.reason == "OOMKilled":
        return LossCause.OOM_KILLED, f"container {name} ran out of memory (exit code {code})"
    return (LossCause.ERROR if code else LossCause.EXITED), f"container {name} ended with exit code {code}"


def _loss(pod: PodView, cause: LossCause, message: str, at_s: float) -> Loss:
    return Loss(at_s=at_s, cause=cause, message=message[:1024], pod=pod.name, pod_uid=pod.uid, node=pod.node)


def with_loss(tally: Tally, loss: Loss) -> Tally:
    """The tally with one more loss; the caller sees to it that each is told once."""
    newest = tally.losses[-1] if tally.losses else None
    bursts = tally.bursts
    if tally.attempt == 0 and not loss.asked:
        near = any(not each.asked and abs(loss.at_s - each.at_s) <= BURST_S for each in tally.losses)
        bursts += int(not near)
    if (
        newest is not None
        and loss.cause is LossCause.TRAINER_LOST
        and newest.pod_uid == loss.pod_uid
        and abs(loss.at_s - newest.at_s) <= SETTLE_S
    ):
        return tally  # the pod has told the same, and why
    losses = (*tally.losses, replace(loss, attempt=tally.attempt))
    return replace(tally, losses=losses[-MAX_LOSSES:], bursts=bursts)


def with_attempt(tally: Tally, attempt: int, now_s: float, *, own: bool, run: str = "") -> Tally:
    """The tally after the run's newest attempt was told.

    Args:
        tally: so far.
        attempt: the newest one; older ones are ignored.
        now_s: now.
        own: the run is this workload's alone, so that its attempts began at 1.
        run: which of the workload's, see `Loss.run`.
    """
    if attempt <= tally.attempt:
        return tally
    if tally.attempt == 0:
        # Attempts tell from now on. What bursts were seen before is among the attempts, if they are all ours.
        unseen = max(attempt - 1 - tally.bursts, 0) if own else 0
        return _unseen(replace(tally, attempt=attempt, settled=tally.settled + unseen), unseen, now_s, run)
    if not tally.rose_at_s:
        return replace(tally, rose_at_s=now_s)
    if now_s - tally.rose_at_s < SETTLE_S:
        return tally
    rose = attempt - tally.attempt
    seen = tally.open_losses
    asked = bool(seen) and all(each.asked for each in seen)
    unexplained = rose - int(bool(seen))
    tally = replace(tally, settled=tally.settled + rose - int(asked), attempt=attempt, rose_at_s=0.0)
    return _unseen(tally, unexplained, now_s, run)


def _unseen(tally: Tally, n: int, now_s: float, run: str) -> Tally:
    if not n:
        return tally
    message = f"training was opened again {n} more time{'s' * (n > 1)} than losses were seen"
    # Of the attempt before the settled one: it is over.
    loss = Loss(
        at_s=now_s,
        cause=LossCause.UNSEEN,
        message=message,
        run=run,
        attempt=tally.attempt - 1,
        interruptions=n,
    )
    return replace(tally, losses=(*tally.losses, loss)[-MAX_LOSSES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Expectation from the failures so far."""

    mtbf_s: float
    expected_restores: float
    """Restores in the coming day of training."""


def newest(tallies: Mapping[str, Tally]) -> tuple[Loss, ...]:
    """The newest losses of all runs of a workload, oldest first."""
    found = sorted((loss for each in tallies.values() for loss in each.losses), key=lambda each: each.at_s)
    return tuple(found[-MAX_LOSSES:])


def estimate(tallies: Mapping[str, Tally], trained_s: float, now_s: float) -> Estimate:
    """Expectation from the failures of a window: the newest 7 days, or as far as the losses kept reach back.

    Args:
        tallies: the failures, by run.
        trained_s: training time of the workload so far.
        now_s: now.
    """
    losses = newest(tallies)
    window_s = WINDOW_S
    if len(losses) == MAX_LOSSES:
        window_s = min(window_s, max(now_s - losses[0].at_s, 1.0))
    recent = [each for each in losses if not each.asked and now_s - each.at_s <= window_s]
    failures = sum(
        _interruptions(tally, [each for each in recent if each.run == run]) for run, tally in tallies.items()
    )
    mtbf_s = (PRIOR_S + min(max(trained_s, 0.0), window_s)) / (1 + failures)
    return Estimate(mtbf_s=mtbf_s, expected_restores=HORIZON_S / mtbf_s)


def _interruptions(tally: Tally, recent: list[Loss]) -> int:
    if not tally.attempt:
        return min(tally.bursts, len(recent))
    seen = {each.attempt for each in recent if each.cause is not LossCause.UNSEEN}
    return len(seen) + sum(each.interruptions for each in recent if each.cause is LossCause.UNSEEN)
