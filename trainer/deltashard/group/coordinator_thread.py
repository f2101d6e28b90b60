"""One rank's thread among those that settle orders (`order`): it proposes, answers, settles and reads, over the store.

    wish       the training thread wants a cut; the thread proposes it, again after a while when the order was off
    hold       a boundary waits for the verdict once it stands at the promised limit; the verdict normally came before
    due_at     the cut that this boundary takes
    stay       within it the training thread ends no step: it waits for a save, closes, or wants this very step

Rank 0 settles; others do when it does not answer. What cannot be settled in time is off, and training goes on: the
longest that a boundary is held is HOLD_S. Without the store (`down_reason`) nothing is held and nothing is cut.
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
"""All ranks have answered an order by then, or it is off."""
HOLD_S = 3 * ANSWER_S
"""A boundary waits for a verdict so long at most. Who goes on without one takes no part in that cut."""
LOOK_S, LOOK_LONG_S, LOOK_A_RANK_S = 0.002, 0.05, 50e-6
"""How often the store is looked at: while an order is under way, at first and later; between orders, by world size."""
FIRST_AGAIN_S, LAST_AGAIN_S = 0.1, 2.0
"""After an order that was off, the next is proposed so much later."""
KEPT_VERDICTS = 1024
"""So many verdicts stay in the store, for a rank whose thread lags behind."""
_CLOSED = 1 << 62
"""Number of the order that a rank answers when it closes: any."""
_HAS_CLOSED = "it has closed"


class CoordinatorThread:
    """The orders of the attempt under way, as one rank sees them. On the training thread, but for `_run` and below."""

    def __init__(
        self, rank: int, world_size: int, *, clock: StepClock, not_ready_reason: Callable[[bool], str]
    ) -> None:
        """`not_ready_reason(urgent)` says why this rank cannot cut now, empty: it can; asked from the order thread."""
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._not_ready_reason = not_ready_reason
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lead_s = 0.0
        self.cancelled = 0
        """How many orders were off."""
        self.held_s = 0.0
        """How long boundaries were held, in all."""
        self.sums: dict[int, str] = {}
        """Sums over replicas by rank, for rank 0, when they were not the same at a cut; empty: they were."""
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
        """Why the newest order was off; empty after one that went."""
        self.cancelled_by: int | None = None
        """The rank because of which it was."""
        self.down_reason = "no attempt is open"
        """Why no order can be settled; empty: they can."""

    def begin(self, prefix: str) -> None:
        """An attempt is open, whose keys lie under `prefix`; raises `GroupLost`."""
        self.close()
        self._reset()
        self._store = GroupStore(prefix)
        self._stop, self.down_reason = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="deltashard-orders", daemon=True)
        self._thread.start()
        _live.add(self)

    # The training thread's side

    def request(self, proposal: Proposal) -> None:
        """Have this proposed, unless a cut is on its way anyway that this rank will come to."""
        held = self._request
        if not self._pending_reason(self._held_step) and (
            held is None or proposal.exact or (proposal.urgent and not held.urgent)
        ):
            self._request = proposal
            self._wake.set()

    def withdraw_exact(self) -> None:
        """The save of one very step was not ordered in time, and training goes on: it is not proposed again."""
        held = self._request  # which the order thread may take away meanwhile
        if held is not None and held.exact:
            self._request = None

    @property
    def pending(self) -> bool:
        return self._rounds.limit is not None or self._rounds.due is not None

    @property
    def due_step(self) -> int | None:
        """The step whose end an ordered cut is due at, or the first that it may be due at; None: none is on its way."""
        due, limit = self._rounds.due, self._rounds.limit
        return due[1] if due is not None else limit

    def set_lead(self, seconds: float) -> None:
        """Orders that can wait are to lie so much further ahead: this rank copies rows meanwhile."""
        self._lead_s = seconds

    @property
    def is_leader(self) -> bool:
        return self._rank == 0

    @property
    def rank_closed(self) -> bool:
        """Whether a rank has closed, so that no order will go any more."""
        return self.cancel_reason.endswith(_HAS_CLOSED)

    def wait_for_verdict(self, step: int) -> None:
        """Wait at the boundary of `step` for a verdict that was promised to be waited for; HOLD_S at most."""
        if not self._rounds.must_wait(step):
            return
        began_s = time.monotonic()
        while self._rounds.must_wait(step) and not self.down_reason and time.monotonic() - began_s < HOLD_S:
            self._clock.clear_wake()
            if self._rounds.must_wait(step):
                self._clock.pause(0.2)
        self.held_s += time.monotonic() - began_s

    def due_at(self, step: int) -> int | None:
        """Number of the cut to take at the boundary of `step`; None: none is due."""
        return self._rounds.due_at(step)

    def take_missed(self, *, last: bool = False) -> int | None:
        """A cut that went and that this rank has not taken; said once. None: there is none.

        `last`: this rank ends no step any more, so that one which is due later is missed, too.
        """
        due = self._rounds.due
        if last and due is not None and due[1] > self._clock.step:
            self._rounds.mark_taken(due[0])
            return due[0]
        missed = self._rounds.missed
        if missed is not None:  # what the order thread writes meanwhile is not wiped out
            self._rounds.missed = None
        return missed

    def mark_taken(self, cut: int) -> None:
        """The cut was taken, or could not be: neither it nor what was wished for before it is due any more."""
        self._rounds.mark_taken(cut)
        self._request = None

    @contextlib.contextmanager
    def hold_step(self) -> Iterator[None]:
        """Within, no step ends: an order can only go at the step where the clock stands now."""
        before, self._held_step = self._held_step, self._clock.step
        self._wake.set()
        try:
            yield
        finally:
            self._held_step = before
            if before is None:
                self._not_before_s, self._again_s = 0.0, FIRST_AGAIN_S  # what was off for it may go now
                # What was answered meanwhile said that this step is the last before the verdict.
                self.wait_for_verdict(self._clock.step)

    def publish_sums(self, cut: int, sums: str) -> None:
        """What replicas of this rank looked like at `cut`; rank 0 compares."""
        self._replica_sums = cut, sums
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=ANSWER_S)

    # The order thread

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
            log.exception("the ranks cannot agree on saves any more: please report this")
            self._disable(f"{type(error).__name__}: {error}")

    def _disable(self, why: str) -> None:
        if not self._stop.is_set():
            log.warning("no save is possible any more, training goes on: %s", why)
        self.down_reason = why
        self._clock.wake()

    def _next_proposal(self) -> Proposal | None:
        if time.monotonic() < self._not_before_s:
            return None
        if self._request is not None:
            return self._request
        if self._rank != 0 or self._rounds.due is not None or self._not_ready_reason(False):
            return None
        # The sidecar says the step ahead of time, if it counts steps: so it is that step, and nobody is held for it.
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
        """The verdict, if it is this rank's to find; rank 0's at first."""
        if self._rank != 0 and since_s < 2 * ANSWER_S:
            return None
        acks: dict[int, Ack] = {}
        for rank, text in self._acks():
            said, ack = json.loads(text)
            if said >= number:
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
        """This rank's answer, its promise published before; None: not yet."""
        step, holds_step = self._clock.step, self._held_step
        if not_ready_reason := self._not_ready_reason(proposal.urgent) or self._pending_reason(holds_step):
            return Ack(limit=step, not_ready_reason=not_ready_reason)
        mine = self._request
        if proposal.exact and (holds_step != proposal.at or mine is None or not mine.exact):
            passed = step > proposal.at
            return Ack(limit=step, not_ready_reason=f"it is past step {proposal.at}") if passed else None
        if not proposal.exact and mine is not None and mine.exact:
            # With any other order, a rank that has not come to its save() yet would cut this step without its pin.
            return Ack(limit=step, not_ready_reason=f"a save of step {mine.at} and no other is asked for")
        limit = (
            holds_step if holds_step is not None else max(proposal.at, self._limit(lead=not proposal.urgent))
        )
        self._rounds.promise(limit)
        self._clock.wake()
        # IMPORTANT: looked at again after the promise was published. Whoever left its stay, or passed the limit, before
        # it could see the promise made none.
        if self._held_step == holds_step and (
            holds_step is not None or self._rounds.limit_holds(self._clock.step)
        ):
            return Ack(limit=limit, holds_step=holds_step is not None)
        self._rounds.withdraw()
        self._wake.set()
        return None

    def _pending_reason(self, holds_step: int | None) -> str:
        """What to say while the cut ordered before was not taken, and will be; empty: there is none."""
        due = self._rounds.due
        comes = due is not None and (holds_step is None or due[1] <= holds_step)
        return "the cut ordered before is not taken yet" if comes else ""

    def _apply_verdict(self, number: int, verdict: RoundVerdict) -> None:
        if verdict.at is None:
            self.cancelled += 1
            self.cancel_reason = verdict.cancel_reason
            self.cancelled_by = verdict.rank
            self._not_before_s = time.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, LAST_AGAIN_S)
        else:
            # The wish is granted. Proposed again before the cut is taken, it would put another in that one's place.
            self._request, self.cancel_reason, self._again_s = None, "", FIRST_AGAIN_S
            self.cancelled_by = None
        self._rounds.apply_verdict(verdict)
        self._clock.wake()
        if self._rank == 0 and number > KEPT_VERDICTS:
            self._store.delete(f"order/{number - KEPT_VERDICTS}")
            self._store.delete(f"verdict/{number - KEPT_VERDICTS}")

    def _compare_replicas(self) -> None:
        """Say what replicas looked like at the last cut; rank 0 compares when all have said."""
        if self._replica_sums is None:
            return
        cut, mine = self._replica_sums
        self._store.put(f"replica/{self._rank}", json.dumps([cut, mine]).encode())
        if self._rank != 0:
            self._replica_sums = None
            return
        found = self._store.get_all([f"replica/{rank}" for rank in range(self._world_size)])
        if found is None:
            return
        sums = {rank: json.loads(text) for rank, text in enumerate(found)}
        if any(said[0] < cut for said in sums.values()):
            return
        self._replica_sums = None
        same = {rank: said[1] for rank, said in sums.items() if said[0] == cut}
        if any(said != mine for said in same.values()):
            self.sums = same
            self._clock.wake()


_live: weakref.WeakSet[CoordinatorThread] = weakref.WeakSet()


def _end_all() -> None:
    # A thread within the store's own code, while the interpreter ends, ends the process by SIGABRT.
    for coordinator_thread in list(_live):
        coordinator_thread.close()


atexit.register(_end_all)


def _encode_ack(number: int, ack: Ack) -> bytes:
    return json.dumps([number, json.loads(ack.text())]).encode()


class _StepTimer:
    """Seconds a step, as the order thread sees the clock of one attempt go on."""

    def __init__(self, step: int) -> None:
        """`step`: after which the attempt begins. The steps before it took no time in it."""
        self.step_s = 0.0
        """0: not known."""
        self._step, self._seen_s = step, time.monotonic()

    def update(self, step: int) -> None:
        now_s = time.monotonic()
        if step > self._step:
            took_s = (now_s - self._seen_s) / (step - self._step)
            self.step_s = took_s if not self.step_s else 0.5 * (self.step_s + took_s)
            self._step, self._seen_s = step, now_s
