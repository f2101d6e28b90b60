"""The thread of one rank that agrees on snapshot rounds (`snapshot_round`) with the other ranks over the store.

    request            the training thread wants a snapshot; the thread proposes it, and again after a cancelled round
    wait_for_verdict   a boundary at the promised limit waits for the verdict, which normally arrives earlier
    due_at             the snapshot that this boundary takes
    hold_step          the training thread ends no step: it waits for a save, closes, or needs exactly this step

Rank 0 decides rounds, or another rank if rank 0 does not answer. A round without a decision in time is cancelled and
training continues; a boundary is held for at most HOLD_S. Without the store (`down_reason`) nothing is held or saved.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from deltashard_checkpoint.crash_point import crash_point

from deltashard.errors import GroupLost
from deltashard.group.group_store import GroupStore
from deltashard.group.snapshot_round import Ack, Proposal, RoundVerdict, SnapshotRounds, decide, limit_after
from deltashard.tracking.step_clock import StepClock

log = logging.getLogger("deltashard")

ANSWER_S = 5.0
"""Seconds after which a round without the answers of all ranks is cancelled."""
HOLD_S = 3 * ANSWER_S
"""Seconds for which a boundary waits for a verdict. A rank that continues without it takes no part in that snapshot."""
LOOK_S, LOOK_LONG_S, LOOK_A_RANK_S = 0.002, 0.05, 50e-6
"""Poll intervals in seconds: at first and later during a round; per rank between rounds."""
FIRST_AGAIN_S, LAST_AGAIN_S = 0.1, 2.0
"""First and longest delay in seconds of the next proposal after a cancelled round."""
KEPT_VERDICTS = 1024
"""Number of verdicts retained in the store for a rank whose thread lags behind."""
_CLOSED = 1 << 62
"""Round number in the answer of a rank that closes, which is valid for every round."""
_HAS_CLOSED = "it has closed"


class CoordinatorThread:
    """The snapshot rounds of the current attempt on one rank; used on the training thread, except `_run` and below."""

    def __init__(
        self, rank: int, world_size: int, *, clock: StepClock, not_ready_reason: Callable[[bool], str]
    ) -> None:
        """`not_ready_reason(urgent)` returns why this rank cannot take a snapshot; called on the rounds' thread."""
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._not_ready_reason = not_ready_reason
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lead_s = 0.0
        self.cancelled = 0
        """Number of cancelled rounds."""
        self.held_s = 0.0
        """Total seconds for which boundaries were held."""
        self.sums: dict[int, str] = {}
        """Sums of replicated tensors by rank, set on rank 0 if they differed at a snapshot."""
        self._reset()

    def _reset(self) -> None:
        self._rounds = SnapshotRounds()
        self._request: Proposal | None = None
        self._held_step: int | None = None
        self._step_timer = _StepTimer(self._clock.step)
        self._not_before_s = 0.0
        self._again_s = FIRST_AGAIN_S
        self._replica_sums: tuple[int, str] | None = None
        self.cancel_reason = ""
        """Reason why the newest round was cancelled; empty after one that was not."""
        self.cancelled_by: int | None = None
        """The rank that caused the cancellation."""
        self.down_reason = "no attempt is open"
        """Reason why no round is possible; empty if rounds are possible."""

    def begin(self, prefix: str) -> None:
        """Start the rounds of an attempt, with keys under `prefix`; raises `GroupLost`."""
        self.close()
        self._reset()
        self._store = GroupStore(prefix)
        self._stop, self.down_reason = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="deltashard-orders", daemon=True)
        self._thread.start()
        _live.add(self)

    def request(self, proposal: Proposal) -> None:
        """Have `proposal` proposed, unless a snapshot that this rank will reach is already pending."""
        held = self._request
        if not self._pending_reason(self._held_step) and (
            held is None or proposal.exact or (proposal.urgent and not held.urgent)
        ):
            self._request = proposal
            self._wake.set()

    def withdraw_exact(self) -> None:
        """Withdraw the proposal of an exact save that was not ordered in time."""
        held = self._request  # may be cleared by the thread of the rounds meanwhile
        if held is not None and held.exact:
            self._request = None

    @property
    def pending(self) -> bool:
        return self._rounds.limit is not None or self._rounds.due is not None

    @property
    def due_step(self) -> int | None:
        """First step at which an ordered snapshot is, or may be, due."""
        due, limit = self._rounds.due, self._rounds.limit
        return due[1] if due is not None else limit

    def set_lead(self, seconds: float) -> None:
        """Set the seconds by which this rank's limits are later, to copy rows ahead of the snapshot."""
        self._lead_s = seconds

    @property
    def is_leader(self) -> bool:
        return self._rank == 0

    @property
    def rank_closed(self) -> bool:
        """Whether a rank has closed, so that no further round can succeed."""
        return self.cancel_reason.endswith(_HAS_CLOSED)

    def wait_for_verdict(self, step: int) -> None:
        """Wait at the boundary of `step` for a verdict that this rank promised to await, for at most HOLD_S."""
        if not self._rounds.must_wait(step):
            return
        began_s = time.monotonic()
        while self._rounds.must_wait(step) and not self.down_reason and time.monotonic() - began_s < HOLD_S:
            self._clock.clear_wake()
            if self._rounds.must_wait(step):
                self._clock.pause(0.2)
        self.held_s += time.monotonic() - began_s

    def due_at(self, step: int) -> int | None:
        """Return the number of the snapshot to take at the boundary of `step`, if one is due."""
        return self._rounds.due_at(step)

    def take_missed(self, *, last: bool = False) -> int | None:
        """Return, once, the number of an ordered snapshot that this rank has not taken, if any.

        `last`: this rank ends no further step, so that a snapshot due later is missed, too.
        """
        due = self._rounds.due
        if last and due is not None and due[1] > self._clock.step:
            self._rounds.mark_taken(due[0])
            return due[0]
        missed = self._rounds.missed
        if missed is not None:  # keeps a value that the other thread writes meanwhile
            self._rounds.missed = None
        return missed

    def mark_taken(self, snapshot_id: int) -> None:
        """Clear the due snapshot and the pending proposal, whether or not the snapshot succeeded."""
        self._rounds.mark_taken(snapshot_id)
        self._request = None

    @contextlib.contextmanager
    def hold_step(self) -> Iterator[None]:
        """Context in which no step ends, so that a round can only succeed at the current step."""
        before, self._held_step = self._held_step, self._clock.step
        self._wake.set()
        try:
            yield
        finally:
            self._held_step = before
            if before is None:
                self._not_before_s, self._again_s = (
                    0.0,
                    FIRST_AGAIN_S,
                )  # rounds cancelled for it may succeed now
                # Answers given meanwhile promised that this is the last step before the verdict.
                self.wait_for_verdict(self._clock.step)

    def publish_sums(self, snapshot_id: int, sums: str) -> None:
        """Publish the sums of this rank's replicas at snapshot `snapshot_id`; rank 0 compares them."""
        self._replica_sums = snapshot_id, sums
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=ANSWER_S)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step_timer.update(self._clock.step)
                number = self._rounds.number
                if (text := self._store.get(f"order/{number}")) is not None:
                    self._run_round(number, Proposal.of(text))
                elif (wanted := self._next_proposal()) is not None:
                    self._store.put_if_absent(f"order/{number}", wanted.text())
                    crash_point("order.proposed")
                else:
                    self._compare_replicas()
                    self._wake.wait(max(LOOK_LONG_S, LOOK_A_RANK_S * self._world_size))
                    self._wake.clear()
            self._store.put(
                f"ack/{self._rank}",
                _encode_ack(_CLOSED, Ack(limit=self._clock.step, not_ready_reason=_HAS_CLOSED)),
            )
        except GroupLost as error:
            self._disable(str(error))
        except Exception as error:
            log.exception("the ranks can no longer agree on saves: please report this")
            self._disable(f"{type(error).__name__}: {error}")

    def _disable(self, why: str) -> None:
        if not self._stop.is_set():
            log.warning("saving has stopped, training continues: %s", why)
        self.down_reason = why
        self._clock.wake()

    def _next_proposal(self) -> Proposal | None:
        if time.monotonic() < self._not_before_s:
            return None
        if self._request is not None:
            return self._request
        if self._rank != 0 or self._rounds.due is not None or self._not_ready_reason(False):
            return None
        # A sidecar that counts steps names the step in advance: the snapshot takes that step, and no rank is held.
        at, step = self._clock.wanted_at, self._clock.step
        return Proposal(reason="timer", at=at) if at <= step + 3 * (self._limit() - step) else None

    def _limit(self, *, lead: bool = True) -> int:
        return limit_after(self._clock.step, self._step_timer.step_s, lead * self._lead_s)

    def _run_round(self, number: int, proposal: Proposal) -> None:
        began_s, look_s, answered = time.monotonic(), LOOK_S, False
        while not self._stop.is_set():
            if not answered and (ack := self._make_ack(proposal)) is not None:
                self._store.put(f"ack/{self._rank}", _encode_ack(number, ack))
                answered = True
                crash_point("order.answered")
            text = self._store.get(f"verdict/{number}")
            if (
                text is None
                and (verdict := self._verdict(number, proposal, time.monotonic() - began_s)) is not None
            ):
                text = self._store.put_if_absent(f"verdict/{number}", verdict.text())
                crash_point("order.settled")
            if text is not None:
                self._apply_verdict(number, RoundVerdict.of(text))
                crash_point("order.read")
                return
            self._wake.wait(look_s)
            self._wake.clear()
            look_s = min(1.5 * look_s, LOOK_LONG_S)

    def _verdict(self, number: int, proposal: Proposal, since_s: float) -> RoundVerdict | None:
        """Return the verdict if this rank must decide; at first that is rank 0."""
        if self._rank != 0 and since_s < 2 * ANSWER_S:
            return None
        acks: dict[int, Ack] = {}
        for rank, text in self._acks():
            number_acked, ack = json.loads(text)
            if number_acked >= number:
                acks[rank] = Ack.of(json.dumps(ack).encode())
        return decide(proposal, acks, self._world_size, overdue=since_s >= ANSWER_S)

    def _acks(self) -> Iterator[tuple[int, bytes]]:
        keys = [f"ack/{rank}" for rank in range(self._world_size)]
        if (found := self._store.get_all(keys)) is not None:
            yield from enumerate(found)
            return
        for rank, key in enumerate(keys):
            if (text := self._store.get(key)) is not None:
                yield rank, text

    def _make_ack(self, proposal: Proposal) -> Ack | None:
        """Publish this rank's promise and return its answer, or None if it is too early."""
        step, holds_step = self._clock.step, self._held_step
        if not_ready_reason := self._not_ready_reason(proposal.urgent) or self._pending_reason(holds_step):
            return Ack(limit=step, not_ready_reason=not_ready_reason)
        mine = self._request
        if proposal.exact and (holds_step != proposal.at or mine is None or not mine.exact):
            passed = step > proposal.at
            return Ack(limit=step, not_ready_reason=f"it is past step {proposal.at}") if passed else None
        if not proposal.exact and mine is not None and mine.exact:
            # With another round, a rank that has not reached its save() yet would take this step without its pin.
            return Ack(limit=step, not_ready_reason=f"only a save of exactly step {mine.at} is requested")
        limit = (
            holds_step if holds_step is not None else max(proposal.at, self._limit(lead=not proposal.urgent))
        )
        self._rounds.promise(limit)
        self._clock.wake()
        # IMPORTANT: check again after the promise was published. A training thread that left `hold_step`, or passed the
        # limit, before it could see the promise is not bound by it.
        if self._held_step == holds_step and (
            holds_step is not None or self._rounds.limit_holds(self._clock.step)
        ):
            return Ack(limit=limit, holds_step=holds_step is not None)
        self._rounds.withdraw()
        self._wake.set()
        return None

    def _pending_reason(self, holds_step: int | None) -> str:
        """Return the reason to give while the previous snapshot is ordered but not taken; empty if there is none."""
        due = self._rounds.due
        comes = due is not None and (holds_step is None or due[1] <= holds_step)
        return "the snapshot ordered before is not taken yet" if comes else ""

    def _apply_verdict(self, number: int, verdict: RoundVerdict) -> None:
        if verdict.at is None:
            self.cancelled += 1
            self.cancel_reason = verdict.cancel_reason
            self.cancelled_by = verdict.rank
            self._not_before_s = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, LAST_AGAIN_S)
        else:
            # The request is granted. A second proposal before the snapshot is taken would replace it by another one.
            self._request, self.cancel_reason, self._again_s = None, "", FIRST_AGAIN_S
            self.cancelled_by = None
        self._rounds.apply_verdict(verdict)
        self._clock.wake()
        if self._rank == 0 and number > KEPT_VERDICTS:
            self._store.delete(f"order/{number - KEPT_VERDICTS}")
            self._store.delete(f"verdict/{number - KEPT_VERDICTS}")

    def _compare_replicas(self) -> None:
        """Publish the replica sums of the last snapshot; rank 0 compares them once all ranks have published theirs."""
        if self._replica_sums is None:
            return
        snapshot_id, mine = self._replica_sums
        self._store.put(f"replica/{self._rank}", json.dumps([snapshot_id, mine]).encode())
        if self._rank != 0:
            self._replica_sums = None
            return
        found = self._store.get_all([f"replica/{rank}" for rank in range(self._world_size)])
        if found is None:
            return
        sums = {rank: json.loads(text) for rank, text in enumerate(found)}
        if any(entry[0] < snapshot_id for entry in sums.values()):
            return
        self._replica_sums = None
        same = {rank: entry[1] for rank, entry in sums.items() if entry[0] == snapshot_id}
        if any(each != mine for each in same.values()):
            self.sums = same
            self._clock.wake()


_live: weakref.WeakSet[CoordinatorThread] = weakref.WeakSet()


def _end_all() -> None:
    # A thread inside the store's native code at interpreter shutdown would abort the process (SIGABRT).
    for coordinator_thread in list(_live):
        coordinator_thread.close()


atexit.register(_end_all)


def _encode_ack(number: int, ack: Ack) -> bytes:
    return json.dumps([number, json.loads(ack.text())]).encode()


class _StepTimer:
    """Seconds per step, estimated from the step clock of one attempt."""

    def __init__(self, step: int) -> None:
        """`step` is the step at which the attempt begins; earlier steps are not counted."""
        self.step_s = 0.0
        """0 while unknown."""
        self._step, self._seen_s = step, time.monotonic()

    def update(self, step: int) -> None:
        now_s = time.monotonic()
        if step > self._step:
            took_s = (now_s - self._seen_s) / (step - self._step)
            self.step_s = took_s if not self.step_s else 0.5 * (self.step_s + took_s)
            self._step, self._seen_s = step, now_s
