"""Open save orders, for a CheckpointRequest or before a node drain.

An order is identified by its run and id. It is included in every answer to the run's reporter until it is closed or
expires; repeating it has no effect. Orders are not durable: the next controller recreates the order of a
CheckpointRequest, and a drain's order lasts a minute.
"""

from __future__ import annotations

from deltashard_operator.fleet.report import MAX_ORDERS, RunKey, SaveOrder

MAX_RUNS = 10_000
"""Maximum number of runs with open orders. A drain that affects more runs orders no save for the others."""


class OpenOrders:
    """Open orders of all runs. Times are on the controller's clock."""

    def __init__(self) -> None:
        self._open: dict[RunKey, dict[str, tuple[SaveOrder, float]]] = {}

    def open(self, run_key: RunKey, order: SaveOrder, until_s: float) -> bool:
        """Open or replace the order with this id until `until_s`. Returns False if there are too many orders."""
        if not self.has_room(run_key, order.id):
            return False
        self._open.setdefault(run_key, {})[order.id] = order, until_s
        return True

    def close(self, order_id: str, run_key: RunKey | None = None) -> None:
        """Close the order in this run, or in all runs that have it."""
        for key in list(self._open) if run_key is None else [run_key]:
            self._open.get(key, {}).pop(order_id, None)
            if not self._open.get(key):
                self.forget(key)

    def has_room(self, run_key: RunKey, order_id: str) -> bool:
        orders = self._open.get(run_key)
        if orders is None:
            return len(self._open) < MAX_RUNS
        return order_id in orders or len(orders) < MAX_ORDERS

    def forget(self, run_key: RunKey) -> None:
        self._open.pop(run_key, None)

    def of(self, run_key: RunKey, now_s: float) -> tuple[SaveOrder, ...]:
        """Return the run's open orders, oldest first, with their remaining time, and close the expired ones."""
        found = []
        for order_id, (order, until_s) in list(self._open.get(run_key, {}).items()):
            if until_s <= now_s:
                self.close(order_id, run_key)
            else:
                found.append(SaveOrder(deadline_s=until_s - now_s))
                found[-1].MergeFrom(order)
        return tuple(found)
