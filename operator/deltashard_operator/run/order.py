"""Saves that somebody asked for and that are not over: for a CheckpointRequest, or before a node is drained.

An order is known by its run and its id. It is named in every answer to who speaks for the run until it is closed or its
time is over; naming it again changes nothing. Nothing here is durable: a request's order is opened again from the
CheckpointRequest by the next controller, a drain's lives for a minute.
"""

from __future__ import annotations

from deltashard_operator.fleet.report import MAX_ORDERS, RunKey, SaveOrder

MAX_RUNS = 10_000
"""Runs with open orders; a drain of more is not ordered for the others."""


class OpenOrders:
    """Open orders of all runs. Times are the controller's clock."""

    def __init__(self) -> None:
        self._open: dict[RunKey, dict[str, tuple[SaveOrder, float]]] = {}

    def open(self, run_key: RunKey, order: SaveOrder, until_s: float) -> bool:
        """Order this save until then, or change the order of this id; False: there are too many."""
        if not self.has_room(run_key, order.id):
            return False
        self._open.setdefault(run_key, {})[order.id] = order, until_s
        return True

    def close(self, order_id: str, run_key: RunKey | None = None) -> None:
        """The order is over, for this run or for all that have it."""
        for key in list(self._open) if run_key is None else [run_key]:
            self._open.get(key, {}).pop(order_id, None)
            if not self._open.get(key):
                self.forget(key)

    def has_room(self, run_key: RunKey, order_id: str) -> bool:
        """Whether the run takes this order now, or has it."""
        orders = self._open.get(run_key)
        if orders is None:
            return len(self._open) < MAX_RUNS
        return order_id in orders or len(orders) < MAX_ORDERS

    def forget(self, run_key: RunKey) -> None:
        """The run is over."""
        self._open.pop(run_key, None)

    def of(self, run_key: RunKey, now_s: float) -> tuple[SaveOrder, ...]:
        """The run's open orders, the oldest first, with the time each has left; those whose time is over are closed."""
        found = []
        for order_id, (order, until_s) in list(self._open.get(run_key, {}).items()):
            if until_s <= now_s:
                self.close(order_id, run_key)
            else:
                found.append(SaveOrder(deadline_s=until_s - now_s))
                found[-1].MergeFrom(order)
        return tuple(found)
