"""Losses of trainers: time, cause and message, and detection of crash loops. Pure.

A **loss** is the end of a trainer that had started: its pod was deleted or is terminating, its container ended and
restarts in place, or it disconnected from its sidecar without closing. Losses are listed for users. Failures are
counted separately, by how often the log records that training was opened (`ledger`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltashard_operator.run.observed_object import PodView

CRASH_WINDOW_S = 20.0
"""Crashes of a group's pods within this time count as one."""
SAME_LOSS_S = 60.0
"""Reports of a pod's status and its sidecar within this time describe the same loss."""
MAX_LOSSES = 32
MAX_MESSAGE = 256
"""Maximum length of a loss's message, in characters."""
CRASH_LOOP_COUNT = 3
"""Number of equal crashes in a row that sets the condition CrashLooping."""
TRAINER_LOST = "TrainerLost"
_DISRUPTIONS = {"PreemptionByScheduler": "Preempted", "DeletionByPodGC": "NodeLost"}
"""Causes by reason of the condition DisruptionTarget. Any other reason is an eviction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss of a trainer."""

    at_s: float
    cause: str
    """Evicted, Preempted, NodeLost, Deleted, Suspended, OOMKilled, Error or TrainerLost."""
    message: str = ""
    pod: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """Equal exits of a training container in a row without a commit in between."""

    ending: str
    seq: int
    at_s: float
    times: int


def loss_of_pod(pod: PodView, *, gone: bool, node_ready: bool, suspended: bool, now_s: float) -> Loss | None:
    """Return the loss that the end of this pod causes, or None.

    `gone`: the pod object is deleted. `node_ready`: its node exists and is Ready. `suspended`: its Job is suspended.
    """
    going = gone or pod.terminating_at_s > 0
    if not pod.started or pod.phase == "Succeeded":
        return None
    if pod.disruption:
        cause, message = _DISRUPTIONS.get(pod.disruption, "Evicted"), pod.disruption_message or pod.disruption
        if pod.disruption == "DeletionByTaintManager" and not node_ready:
            cause = "NodeLost"
    elif pod.phase == "Failed":
        return loss_of_container(pod, now_s)
    elif not going:
        return None
    elif suspended:
        cause, message = "Suspended", "the Job is suspended"
    elif not pod.terminating_at_s and not node_ready:
        cause, message = "NodeLost", f"the pod vanished with its node {pod.node}"
    else:
        cause, message = "Deleted", "the pod was deleted"
    at_s = pod.ending.at_s if pod.phase == "Failed" and pod.ending is not None else now_s
    return _loss(pod, cause, message, at_s or now_s)


def loss_of_container(pod: PodView, now_s: float) -> Loss:
    if pod.ending is None:
        return _loss(pod, "Error", "a container failed", now_s)
    name, code, cause = pod.ending.container, pod.ending.exit_code, "Error"
    message = f"container {name} ended with exit code {code}"
    if pod.ending.reason == "OOMKilled":
        cause, message = "OOMKilled", f"container {name} ran out of memory (exit code {code})"
    return _loss(pod, cause, message, pod.ending.at_s or now_s)


def _loss(pod: PodView, cause: str, message: str, at_s: float) -> Loss:
    return Loss(at_s=at_s, cause=cause, message=message[:MAX_MESSAGE], pod=pod.name, node=pod.node)


def with_loss(losses: tuple[Loss, ...], loss: Loss) -> tuple[Loss, ...]:
    """Append a loss to the newest losses. The cause of a pod's end replaces the TrainerLost of its sidecar."""
    same = [each for each in losses if each.pod == loss.pod and abs(loss.at_s - each.at_s) < SAME_LOSS_S]
    if same and loss.cause == TRAINER_LOST:
        return losses
    kept = (each for each in losses if each not in same or each.cause != TRAINER_LOST)
    return (*kept, loss)[-MAX_LOSSES:]


def crash_after(before: Crash | None, loss: Loss, seq: int) -> Crash | None:
    """Return the crash state after a loss, or None if it is not a crash. `seq` is the newest commit."""
    if loss.cause == TRAINER_LOST:
        return before
    if loss.cause not in {"OOMKilled", "Error"}:
        return None
    if before is not None and seq <= before.seq:
        if loss.at_s - before.at_s < CRASH_WINDOW_S:  # the same crash, seen on another pod
            return before
        if loss.message == before.ending:
            return replace(before, at_s=loss.at_s, times=before.times + 1)
    return Crash(ending=loss.message, seq=seq, at_s=loss.at_s, times=1)


def is_loop(crash: Crash, seq: int) -> bool:
    """Return whether a crash loop continues. `seq` is the newest commit."""
    return crash.times >= CRASH_LOOP_COUNT and seq <= crash.seq
