"""Losses of training: what was lost, when and why, and how many interruptions that makes. Pure.

A **loss** is one end of a trainer that had begun: a pod that is gone or going, a training container that ended and is
started again in place, or a trainer that left its sidecar without a word.

An **interruption** is what stops training once, however many pods it takes with it. Each time training is opened again
the log has one more attempt of the workload: openings that rose by `d` are `d` interruptions, also while no controller
looked, and the losses seen meanwhile say why. Openings are settled `SETTLE_S` after they rose, because the API tells of
a pod's end a little later than the new trainer tells of its attempt. An interruption is a failure, unless somebody
asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deltashard_operator.run.observed_object import PodView

SETTLE_S = 20.0
MAX_LOSSES = 32
MAX_MESSAGE = 256
"""Characters of the reason of a loss."""
LOOPS = 3
"""So many crashes of a loop are a trouble that people hear of."""
TRAINER_LOST = "TrainerLost"
UNSEEN = "Unseen"
CAUSES: Mapping[str, int] = {
    "Evicted": 0,
    "Preempted": 0,
    "NodeLost": 0,
    "Deleted": 1,
    "Suspended": 1,
    "OOMKilled": 1,
    "Error": 1,
    TRAINER_LOST: 2,
    UNSEEN: 3,
}
"""Causes of losses with their ranks: of the losses of an interruption the first of the lowest rank says why.

What the platform does outranks what other trainers of the group then end of. Of a wish and a crash, one follows of the
other. That a trainer went says less than its pod does.
"""
ASKED = frozenset({"Deleted", "Suspended"})
"""Causes that are somebody's wish, and no failures."""
_DISRUPTIONS = {"PreemptionByScheduler": "Preempted", "DeletionByPodGC": "NodeLost"}
"""Reasons of the condition DisruptionTarget; any other is an eviction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss of a trainer."""

    at_s: float
    cause: str
    message: str = ""
    pod: str = ""
    pod_uid: str = ""
    node: str = ""

    @property
    def asked(self) -> bool:
        return self.cause in ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A training container ended so, so many times in a row, with no commit between."""

    ending: str
    seq: int
    """Of the newest commit."""
    at_s: float
    """The newest of these times."""
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The failures of a run in the store so far. Survives the controller in the CheckpointRun's status."""

    openings: int = 0
    """Openings up to which interruptions are settled; 0: none were ever told."""
    rose_at_s: float = 0.0
    """When openings were seen to rise beyond the settled ones; 0: they did not."""
    failures: int = 0
    losses: tuple[Loss, ...] = ()
    """The newest losses, oldest first, `MAX_LOSSES` at most."""
    open: int = 0
    """How many of the newest losses no opening was told after."""
    crash: Crash | None = None
    """The newest interruption, if it was a crash."""

    @property
    def open_losses(self) -> tuple[Loss, ...]:
        return self.losses[-self.open :] if self.open else ()


Interruption = tuple[str, str, int]
"""(cause, node to blame or empty, how many times)."""


def loss_of_pod(pod: PodView, *, gone: bool, node_ready: bool, suspended: bool, now_s: float) -> Loss | None:
    """The loss that a pod's end is, or None when it is none.

    `gone`: the object is deleted; `node_ready`: its node is there and well; `suspended`: its Job is.
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
    """The loss that the end of a training container is."""
    if pod.ending is None:
        return _loss(pod, "Error", "a container failed", now_s)
    name, code, cause = pod.ending.container, pod.ending.exit_code, "Error"
    message = f"container {name} ended with exit code {code}"
    if pod.ending.reason == "OOMKilled":
        cause, message = "OOMKilled", f"container {name} ran out of memory (exit code {code})"
    return _loss(pod, cause, message, pod.ending.at_s or now_s)


def _loss(pod: PodView, cause: str, message: str, at_s: float) -> Loss:
    message = message[:MAX_MESSAGE]
    return Loss(at_s=at_s, cause=cause, message=message, pod=pod.name, pod_uid=pod.uid, node=pod.node)


def with_loss(tally: Tally, loss: Loss, *, seq: int = 0) -> Tally:
    """The tally with one more loss, after the newest commit `seq`. The caller sees to it that each is told once."""
    if loss.cause == TRAINER_LOST and any(each.pod_uid == loss.pod_uid for each in tally.open_losses):
        return tally  # the pod has told the same, and why
    same = [each for each in tally.open_losses if (each.cause, each.pod_uid) == (TRAINER_LOST, loss.pod_uid)]
    losses = (*(each for each in tally.losses if each not in same), loss)[-MAX_LOSSES:]
    n = min(tally.open + 1 - len(same), len(losses))
    return replace(tally, losses=losses, open=n, crash=_crash(tally, loss, seq))


def _crash(tally: Tally, loss: Loss, seq: int) -> Crash | None:
    before = tally.crash
    if loss.cause == TRAINER_LOST:
        return before
    if loss.cause not in {"OOMKilled", "Error"}:
        return None
    if before is not None and seq <= before.seq:
        if loss.at_s - before.at_s < SETTLE_S:  # the same time, of another pod
            return before
        if loss.message == before.ending:
            return replace(before, at_s=loss.at_s, times=before.times + 1)
    return Crash(ending=loss.message, seq=seq, at_s=loss.at_s, times=1)


def crash_loop(tally: Tally, seq: int) -> Crash | None:
    """The crash loop that goes on; `seq`: of the newest commit."""
    found = tally.crash
    return found if found is not None and found.times >= LOOPS and seq <= found.seq else None


def with_openings(tally: Tally, openings: int, now_s: float) -> tuple[Tally, tuple[Interruption, ...]]:
    """The tally after it was told how often the workload opened the run, and the interruptions that are over by it."""
    rose = openings - max(tally.openings, 1)
    if rose <= 0:
        return (tally if tally.openings else replace(tally, openings=openings)), ()
    if not tally.rose_at_s:
        return replace(tally, rose_at_s=now_s), ()
    if now_s - tally.rose_at_s < SETTLE_S:
        return tally, ()
    rounds = _rounds(tally)
    # What came after training was opened, and not for the last of these openings, is of the next one.
    later = [each for found in rounds[rose:] for each in found if found[0].at_s > tally.rose_at_s]
    seen = [each for found in rounds for each in found if each not in later]
    stops, over, asked = min(rose, len(rounds)), list[Interruption](), False
    if stops:
        why = min(seen, key=lambda each: CAUSES[each.cause])
        asked, loops = why.asked, tally.crash is not None and tally.crash.times > 1
        over.append((why.cause, "" if asked or loops else why.node, stops))
    if rose > stops:
        over.append((UNSEEN, "", rose - stops))
    failures = tally.failures + rose - (stops if asked else 0)
    losses = (*tally.losses[: len(tally.losses) - tally.open], *seen, *later)
    tally = replace(
        tally, openings=openings, rose_at_s=0.0, failures=failures, losses=losses, open=len(later)
    )
    return tally, tuple(over)


def _rounds(tally: Tally) -> list[list[Loss]]:
    """The open losses by how often training stopped: quick restarts are settled together.

    The next time begins with a pod that was lost before, long after the last loss, or after training was opened.
    """
    rounds: list[list[Loss]] = []
    for each in tally.open_losses:
        last = rounds[-1] if rounds else []
        if (
            not last
            or each.pod_uid in {other.pod_uid for other in last}
            or each.at_s - last[-1].at_s > SETTLE_S
            or last[-1].at_s <= tally.rose_at_s < each.at_s
        ):
            rounds.append([])
        rounds[-1].append(each)
    return rounds


def newest(tallies: Mapping[str, Tally]) -> tuple[Loss, ...]:
    """The newest losses of all parts of a run, oldest first."""
    found = sorted((loss for each in tallies.values() for loss in each.losses), key=lambda each: each.at_s)
    return tuple(found[-MAX_LOSSES:])
