"""Losses of training: what was lost, when and why, and how many interruptions that makes. Pure.

A **loss** is one end of a trainer that had begun: a pod that is gone or going, a training container that ended and is
started again in place, or a trainer that left its sidecar without a word. Its cause is read from the pod's conditions
(DisruptionTarget), its container statuses and the node. What somebody asked for (a deletion by hand, a suspension) is a
loss, but no failure.

An **interruption** is what stops training once, however many pods it takes with it; these are the failures that are
counted. Each time training is opened again the log has one more attempt of the workload, so *openings* that rose by `d`
mean `d` interruptions, also while no controller looked; the losses seen meanwhile say why. Losses after which no
attempt was opened yet are one interruption that is not over. Openings are settled `SETTLE_S` after they rose, because
the API tells of the pod's end a little later than the new trainer tells of its attempt. Without openings a burst of
losses is one interruption.

A **crash loop** is the same container ending with the same exit code again and again, with no commit between and little
training: a fault of the script. Its first crash is an interruption like any other; `Interruption.again` marks the
others. Crashes a longer training apart are no loop: there the interval may be what is wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from deltashard_operator.run.observed_object import JobView, PodView

SETTLE_S = 20.0
BURST_S = 60.0
"""Losses this close together are one interruption where attempts cannot tell."""
CONSEQUENCE_S = 2.0
"""The pod that somebody deletes is seen to go before the others of its group fail; by clocks that differ so much."""
MAX_LOSSES = 32
MAX_MESSAGE = 256
"""Characters of the reason of a loss."""
MAX_ENDINGS = 4
"""Ends of containers by which an interruption is known again."""
LOOP_TRAINED_S = 300.0
"""Crashes are a loop when so little was trained between them: no more than to the first checkpoint, mostly."""
LOOPS = 3
"""So many crashes of a loop are a trouble that people hear of."""


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
CRASHES = frozenset({LossCause.OOM_KILLED, LossCause.ERROR, LossCause.EXITED})
"""Causes that are the training container's own end."""
_OUTER = frozenset(LossCause) - CRASHES - {LossCause.TRAINER_LOST, LossCause.FAILED, LossCause.UNSEEN}
"""Causes from outside of the training: what its other trainers then end of is a consequence."""

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
class Point:
    """How far a run is."""

    seq: int = 0
    """Of the newest commit."""
    trained_s: float = 0.0


START = Point()


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
    opening: int = 0
    """The opening whose trainer it was, or the newest settled one; what came of it is in a later one."""
    interruptions: int = 1
    """Interruptions that it stands for; more than one only where nobody looked."""
    ending: str = ""
    """How the container ended, where that is the cause; two that ended alike say the same."""
    at: Point = START
    """How far the run was."""

    @property
    def asked(self) -> bool:
        return self.cause in ASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """An interruption by the training container's own end, and how often it came like that."""

    endings: tuple[str, ...]
    at: Point
    times: int = 1

    def same(self, endings: tuple[str, ...], at: Point) -> bool:
        """Whether containers that end so at this point do it again."""
        soon = at.trained_s - self.at.trained_s <= LOOP_TRAINED_S
        return at.seq == self.at.seq and soon and not set(endings).isdisjoint(self.endings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What stopped training once, and after which it was opened again."""

    cause: LossCause
    times: int = 1
    """More than once only where nobody looked."""
    nodes: frozenset[str] = frozenset()
    again: bool = False
    """The same crash as the one before, with nothing committed between: a loop, which counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The failures of a run in the store so far. Survives the controller in the CheckpointRun's status."""

    settled: int = 0
    """Interruptions after which training was opened again, or bursts of losses while no openings were told."""
    openings: int = 0
    """Openings up to which interruptions are settled; 0: none were ever told."""
    losses: tuple[Loss, ...] = ()
    """The newest losses, oldest first, `MAX_LOSSES` at most."""
    opened_at_s: float = 0.0
    """When the newest of them was told first."""
    rose_at_s: float = 0.0
    """When openings were seen to rise beyond the settled ones; 0: they did not."""
    crash: Crash | None = None
    """The newest interruption, if it was a crash."""

    @property
    def open_losses(self) -> tuple[Loss, ...]:
        return tuple(each for each in self.losses if each.opening >= self.openings)

    @property
    def failures(self) -> int:
        """Interruptions, the one that goes on included."""
        telling = _telling(self.open_losses) if self.openings else None
        going_on = telling is not None and not telling.asked
        return self.settled + int(going_on)


def has_ended(pod: PodView) -> bool:
    """Whether the pod's end has begun, or comes for sure, after a training container ran in it."""
    return (
        pod.started and pod.phase != "Succeeded" and bool(pod.disruption or pod.over or pod.terminating_at_s)
    )


def loss_of_pod(
    pod: PodView, *, gone: bool, node_ready: bool, job: JobView | None, now_s: float
) -> Loss | None:
    """The loss that a pod's end is, or None when it is none.

    `gone`: the object is deleted; `node_ready`: its node is there and well; `job`: the Job it is of, where there is one
    and it exists.
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
    ended = pod.ending if cause in CRASHES else None
    return Loss(
        at_s=at_s,
        cause=cause,
        message=message[:MAX_MESSAGE],
        pod=pod.name,
        pod_uid=pod.uid,
        node=pod.node,
        ending=f"{ended.container} with exit code {ended.exit_code}" if ended is not None else "",
    )


def with_loss(tally: Tally, loss: Loss, *, took_part: int = 0) -> tuple[Tally, tuple[Interruption, ...]]:
    """The tally with one more loss, and the interruption that it is where no openings tell of them.

    `took_part`: the newest opening in which its pod was heard to train. Where that is not settled yet, the loss comes
    after it, unless it is of before and was told late. The caller sees to it that each loss is told once.
    """
    told = (each for each in tally.losses if each.pod_uid == loss.pod_uid)
    if loss.cause is LossCause.TRAINER_LOST and any(abs(loss.at_s - each.at_s) <= SETTLE_S for each in told):
        return tally, ()  # the pod has told the same, and why
    late = not tally.rose_at_s or loss.at_s <= tally.rose_at_s
    opening = tally.openings if late else max(tally.openings, took_part)
    if loss.cause is LossCause.TRAINER_LOST and loss.at_s < tally.opened_at_s:
        opening = tally.openings - 1  # a sidecar tells it until it is written, which may be long
    found: tuple[Interruption, ...] = ()
    if tally.openings == 0 and not loss.asked:
        near = any(not each.asked and abs(loss.at_s - each.at_s) <= BURST_S for each in tally.losses)
        if not near:
            crash, again, _ = _crash_of(tally, (loss,))
            tally = replace(tally, settled=tally.settled + 1, crash=crash)
            found = (Interruption(cause=loss.cause, nodes=_nodes((loss,), loss), again=again),)
    losses = (*tally.losses, replace(loss, opening=opening))
    return replace(tally, losses=losses[-MAX_LOSSES:]), found


def with_openings(
    tally: Tally, openings: int, now_s: float, *, seq: int = 0, run: str = ""
) -> tuple[Tally, tuple[Interruption, ...]]:
    """The tally after it was told how often the workload opened the run, and the interruptions that are over by it.

    `seq`: of the run's newest commit; `run`: which of the workload's, see `Loss.run`.
    """
    if openings <= tally.openings:
        return tally, ()
    if tally.openings == 0:
        # Openings tell from now on. What bursts were seen before is among them.
        unseen = max(openings - 1 - tally.settled, 0)
        tally = replace(tally, openings=openings, opened_at_s=now_s, settled=tally.settled + unseen)
        return _with_unseen(tally, unseen, now_s, run, again=False)
    if not tally.rose_at_s:
        return replace(tally, rose_at_s=now_s), ()
    if now_s - tally.rose_at_s < SETTLE_S:
        return tally, ()
    rose = openings - tally.openings
    seen = tuple(each for each in tally.open_losses if each.opening < openings)
    telling = _telling(seen)
    # Trainers that end faster than their openings settle have their losses together here.
    stops = min(rose, rounds(seen))
    crash, same, times = _crash_of(tally, seen)
    again = min(times, stops) - int(not same) if crash is not None else 0
    found = tuple(
        Interruption(cause=telling.cause, times=times, nodes=_nodes(seen, telling), again=alike)
        for times, alike in ((stops - again, False), (again, True))
        if telling is not None and times
    )
    tally = replace(
        tally,
        settled=tally.settled + rose - int(telling is not None and telling.asked),
        openings=openings,
        opened_at_s=tally.rose_at_s,
        rose_at_s=0.0,
        crash=crash,
    )
    # The API tells of several quick crashes as one; but what committed since was no part of a loop.
    looped = crash is not None and crash.times > 1 and seq <= crash.at.seq
    tally, unexplained = _with_unseen(tally, rose - stops, now_s, run, again=looped)
    return tally, (*found, *unexplained)


def _telling(seen: tuple[Loss, ...]) -> Loss | None:
    """The loss that says why training stopped.

    Of a group whose pod goes, the others end by errors, soon after; or before, where a node is lost without a word.
    """
    outer = [each for each in seen if each.cause in _OUTER]
    first_s = min((each.at_s for each in outer), default=0.0)
    inner = [each for each in seen if each.cause not in _OUTER]
    if outer and all(each.asked for each in outer):
        # What failed before anybody wished for anything is no consequence.
        inner = [each for each in inner if each.at_s < first_s - CONSEQUENCE_S]
    else:
        outer = [each for each in outer if not each.asked]
        inner = [] if outer else inner
    told = [each for each in inner if each.cause is not LossCause.TRAINER_LOST]
    return next(iter((*told, *inner, *outer)), None)


def rounds(losses: tuple[Loss, ...]) -> int:
    """How often training stopped at least, by these losses: a pod that is lost again, or long after, begins anew."""
    n, pods, last_s = 0, set[str](), 0.0
    for each in sorted(losses, key=lambda loss: loss.at_s):
        if not n or each.pod_uid in pods or each.at_s - last_s > SETTLE_S:
            n, pods = n + 1, set()
        pods.add(each.pod_uid)
        last_s = each.at_s
    return n


def _crash_of(tally: Tally, losses: tuple[Loss, ...]) -> tuple[Crash | None, bool, int]:
    """The crash that these losses are, with those before if they were the same; whether they were; how many are new."""
    telling = _telling(losses)
    # Those whose pods say how they came about, and that nobody wanted.
    failed = [each for each in losses if not each.asked and each.cause is not LossCause.TRAINER_LOST]
    endings = tuple(sorted({each.ending for each in failed}))[:MAX_ENDINGS]
    if telling is None or telling.cause in _OUTER or not endings or not all(endings):
        return None, False, 0
    at = Point(seq=max(each.at.seq for each in failed), trained_s=max(each.at.trained_s for each in failed))
    alike: dict[str, list[Loss]] = {}
    for each in failed:
        if each.at.seq == at.seq:
            alike.setdefault(each.ending, []).append(each)
    times = max(rounds(tuple(each)) for each in alike.values())
    before = tally.crash
    same = before is not None and before.same(endings, at)
    known = before.times if before is not None and same else 0
    return Crash(endings=endings, at=at, times=known + times), same, times


def crash_loop(tally: Tally, at: Point) -> Crash | None:
    """The crash loop that goes on, the interruption that is not over included; None where there is none."""
    found = tally.crash
    if tally.openings and tally.open_losses:
        found, _, _ = _crash_of(tally, tally.open_losses)
    if found is None or found.times < LOOPS or not found.same(found.endings, at):
        return None
    return found


def _nodes(losses: tuple[Loss, ...], telling: Loss) -> frozenset[str]:
    """Nodes whose pods were lost by what stopped training; what followed of it says nothing about a node."""
    outer = telling.cause in _OUTER
    alike = (each for each in losses if not each.asked and (each.cause in _OUTER) == outer)
    return frozenset() if telling.asked else frozenset(each.node for each in alike if each.node)


def _with_unseen(
    tally: Tally, n: int, now_s: float, run: str, *, again: bool
) -> tuple[Tally, tuple[Interruption, ...]]:
    """The tally with so many interruptions that are over and that no loss tells of."""
    if not n:
        return tally, ()
    loss = Loss(
        at_s=now_s,
        cause=LossCause.UNSEEN,
        message=f"training was opened again {n} more time{'s' * (n > 1)} than losses were seen",
        run=run,
        opening=tally.openings - 1,
        interruptions=n,
    )
    losses = (*tally.losses, loss)[-MAX_LOSSES:]
    return replace(tally, losses=losses), (Interruption(cause=LossCause.UNSEEN, times=n, again=again),)


def newest(tallies: Mapping[str, Tally]) -> tuple[Loss, ...]:
    """The newest losses of all runs of a workload, oldest first."""
    found = sorted((loss for each in tallies.values() for loss in each.losses), key=lambda each: each.at_s)
    return tuple(found[-MAX_LOSSES:])
