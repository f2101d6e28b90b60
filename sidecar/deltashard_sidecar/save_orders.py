"""Saves that the controller ordered: each is carried out once, and how it ended is told until no answer names it.

The first cut of this pod that begins after an order came carries it out, whoever asked for that cut: its id and its pin
go into the commit. A cut that fails ends the order, too, but for one that another takes the place of. The newest `KEPT`
ids are remembered. A sidecar that starts again, or of another pod, finds in the log what was done; what is not seen
there (it is retired by then) is done once more.
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

KEPT = 64
Over = fleet.SaveOver


@dataclass(slots=True, eq=False)
class _Known:
    """One order."""

    order: fleet.SaveOrder
    came_s: float
    named: bool = True
    """Whether somebody waits for it: the newest answer names it, or does not know yet how it ended."""
    told: Session | None = None
    """Whose trainer was asked."""
    over: Over | None = None


class SaveOrders:
    """The orders of one process. Thread-safe."""

    def __init__(
        self,
        *,
        ask: Callable[[fleet.SaveOrder], Session | None],
        state: Callable[[], RunState],
        in_flight: Callable[[], Iterable[Save]],
    ) -> None:
        """`ask` has the trainers save and gives a session that was told; None: none may save now."""
        self._ask, self._state, self._in_flight = ask, state, in_flight
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def answered(self, saves: Sequence[fleet.SaveOrder], told: Container[str]) -> None:
        """An answer names these open orders; its report `told` how some ended."""
        named = {order.id for order in saves}
        with self._lock:
            for name, known in self._known.items():
                known.named = name in named or (known.named and known.over is not None and name not in told)
            for order in saves:
                self._known.setdefault(order.id, _Known(order, time.monotonic()))
            over = [name for name, known in self._known.items() if not known.named]
            for name in over[: max(0, len(self._known) - KEPT)]:
                del self._known[name]

    def look(self) -> None:
        """Ask trainers for what is open; notice what is done, or too late."""
        with self._lock:
            still = [known for known in self._known.values() if known.named and known.over is None]
        state = self._state() if still else RunState(run="")
        done = _done(state)
        for known in still:
            order, age_s, over = known.order, time.monotonic() - known.came_s, None
            if order.id in done:
                step, seq = done[order.id]
                over = Over(id=order.id, outcome=Over.OUTCOME_COMMITTED, step=step, seq=seq)
            elif any(order in save.cut.orders for save in self._in_flight()):
                continue
            elif order.pin and (held := state.pinned.get(order.pin)) is not None:
                step = state.checkpoints[held].step
                why = (
                    f"pin {order.pin} is at step {step}: choose another name, or unpin that checkpoint first"
                )
                over = Over(id=order.id, outcome=Over.OUTCOME_FAILED, cause=why)
            elif 0 < order.deadline_s < age_s:
                over = Over(id=order.id, outcome=Over.OUTCOME_EXPIRED)
            elif known.told is None or known.told.closed:
                known.told = self._ask(order)
            with self._lock:
                known.over = known.over or over  # a save that ended meanwhile has said so

    def open(self) -> tuple[fleet.SaveOrder, ...]:
        """Those that a cut which begins now carries out: none that the log has, nor that would move a pin it has."""
        with self._lock:
            known = [each for each in self._known.values() if each.named or each.told is not None]
            still = tuple(each.order for each in known if each.over is None)
        state = self._state() if still else RunState(run="")
        done = _done(state)
        # While the log is not read yet, what was done is not known.
        return tuple(
            each for each in still if state.tip >= 0 and not (each.id in done or each.pin in state.pinned)
        )

    def ended(self, save: Save) -> None:
        commit, (cause, message) = save.commit, save.failure
        if commit is None and cause is Cause.SUPERSEDED:
            return
        for order in save.cut.orders:
            over = Over(id=order.id, outcome=Over.OUTCOME_FAILED, cause=f"{cause}: {message}")
            if commit is not None:
                over = Over(id=order.id, outcome=Over.OUTCOME_COMMITTED, step=commit.step, seq=commit.seq)
            with self._lock:
                if (known := self._known.get(order.id)) is not None and known.over is None:
                    known.over = over

    def over(self) -> list[Over]:
        with self._lock:
            return [each.over for each in self._known.values() if each.named and each.over is not None]


def _done(state: RunState) -> dict[str, tuple[int, int]]:
    """(step, seq) of the checkpoint by which each order was carried out, as far as the log tells."""
    return {
        name: (checkpoint.step, checkpoint.seq)
        for checkpoint in state.checkpoints.values()
        for name in checkpoint.metadata.get(ORDERS_KEY, "").split()
    }
