"""Save orders of the controller: each is carried out once, and its outcome is reported until no reply names it.

The first save of this pod that begins after an order arrived carries it out, whatever triggered that save; its commit
records the order's id and pin. A failed save ends the order as well, unless another save superseded it. The newest
`MAX_ORDERS` ids are kept. A restarted sidecar, or one of another pod, reads from the log which orders were carried out;
an order whose checkpoint is retired by then is carried out once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import ORDERS_KEY
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet

from deltashard_sidecar.save.save import Save
from deltashard_sidecar.session.session import Session

MAX_ORDERS = 64
SaveOutcome = fleet.SaveResult


@dataclass(slots=True, eq=False)
class _TrackedOrder:
    """A save order and its state."""

    order: fleet.SaveOrder
    received_s: float
    is_open: bool = True
    """Whether the controller waits for it: the newest reply names it, or its outcome is not reported yet."""
    asked_session: Session | None = None
    outcome: SaveOutcome | None = None


class SaveOrders:
    """Save orders of one process. Thread-safe."""

    def __init__(
        self,
        *,
        request_save: Callable[[fleet.SaveOrder], Session | None],
        state: Callable[[], RunState],
        in_flight: Callable[[], Iterable[Save]],
    ) -> None:
        """`request_save` requests a save and returns the trainer's session; None: no trainer may save now."""
        self._request_save, self._state, self._in_flight = request_save, state, in_flight
        self._lock = threading.Lock()
        self._orders: dict[str, _TrackedOrder] = {}

    def handle_reply(self, saves: Sequence[fleet.SaveOrder], reported: Container[str]) -> None:
        """Process a reply that names these open orders; its report contained the outcomes of `reported`."""
        open_ids = {order.id for order in saves}
        with self._lock:
            for name, tracked in self._orders.items():
                tracked.is_open = name in open_ids or (
                    tracked.is_open and tracked.outcome is not None and name not in reported
                )
            for order in saves:
                self._orders.setdefault(order.id, _TrackedOrder(order, time.monotonic()))
            closed = [name for name, tracked in self._orders.items() if not tracked.is_open]
            for name in closed[: max(0, len(self._orders) - MAX_ORDERS)]:
                del self._orders[name]

    def poll(self) -> None:
        with self._lock:
            still = [
                tracked for tracked in self._orders.values() if tracked.is_open and tracked.outcome is None
            ]
        state = self._state() if still else RunState(run="")
        done = _done(state)
        for tracked in still:
            order, age_s, outcome = tracked.order, time.monotonic() - tracked.received_s, None
            if order.id in done:
                step, seq = done[order.id]
                outcome = SaveOutcome(id=order.id, outcome=SaveOutcome.OUTCOME_COMMITTED, step=step, seq=seq)
            elif any(order in save.decisions.orders for save in self._in_flight()):
                continue
            elif order.pin and (held := state.pinned.get(order.pin)) is not None:
                step = state.checkpoints[held].step
                why = (
                    f"pin {order.pin} is at step {step}: choose another name, or unpin that checkpoint first"
                )
                outcome = SaveOutcome(id=order.id, outcome=SaveOutcome.OUTCOME_FAILED, cause=why)
            elif 0 < order.deadline_s < age_s:
                outcome = SaveOutcome(id=order.id, outcome=SaveOutcome.OUTCOME_EXPIRED)
            elif tracked.asked_session is None or tracked.asked_session.closed:
                tracked.asked_session = self._request_save(order)
            with self._lock:
                tracked.outcome = tracked.outcome or outcome  # a save that ended meanwhile has set its own

    def open(self) -> tuple[fleet.SaveOrder, ...]:
        """Return the orders for a save that begins now, without those in the log and those whose pin is taken."""
        with self._lock:
            tracked = [
                each for each in self._orders.values() if each.is_open or each.asked_session is not None
            ]
            still = tuple(each.order for each in tracked if each.outcome is None)
        state = self._state() if still else RunState(run="")
        done = _done(state)
        # Until the log is read, it is unknown which orders were carried out.
        return tuple(
            each for each in still if state.tip >= 0 and not (each.id in done or each.pin in state.pinned)
        )

    def ended(self, save: Save) -> None:
        commit, (cause, message) = save.commit, save.failure
        if commit is None and cause is Cause.SUPERSEDED:
            return
        for order in save.decisions.orders:
            outcome = SaveOutcome(
                id=order.id, outcome=SaveOutcome.OUTCOME_FAILED, cause=f"{cause}: {message}"
            )
            if commit is not None:
                outcome = SaveOutcome(
                    id=order.id, outcome=SaveOutcome.OUTCOME_COMMITTED, step=commit.step, seq=commit.seq
                )
            with self._lock:
                if (tracked := self._orders.get(order.id)) is not None and tracked.outcome is None:
                    tracked.outcome = outcome

    def finished(self) -> list[SaveOutcome]:
        with self._lock:
            return [
                each.outcome for each in self._orders.values() if each.is_open and each.outcome is not None
            ]


def _done(state: RunState) -> dict[str, tuple[int, int]]:
    """Return (step, seq) of the checkpoint that carried out each order, as recorded in the log."""
    return {
        name: (checkpoint.step, checkpoint.seq)
        for checkpoint in state.checkpoints.values()
        for name in checkpoint.metadata.get(ORDERS_KEY, "").split()
    }
