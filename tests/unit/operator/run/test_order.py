"""Ordered saves."""

from __future__ import annotations

from deltashard_operator.fleet.report import MAX_ORDERS, SaveOrder
from deltashard_operator.run.order import OpenOrders

RUN, OTHER = ("n", "u-1"), ("n", "u-2")


def order(order_id: str = "r-1") -> SaveOrder:
    return SaveOrder(id=order_id, reason="request", pin="best")


def test_open_order_is_listed_with_its_remaining_time() -> None:
    orders = OpenOrders()
    for run in (RUN, RUN, OTHER):
        assert orders.open(run, order(), 100.0)
    for now_s in (40.0, 90.0):
        (found,) = orders.of(RUN, now_s)
        assert (found.pin, found.deadline_s) == ("best", 100.0 - now_s)
    orders.close("r-1", RUN)
    assert (orders.of(RUN, 40.0), len(orders.of(OTHER, 40.0))) == ((), 1)
    orders.close("r-1")
    assert orders.of(OTHER, 40.0) == ()
    orders.open(RUN, order(), 100.0)
    assert orders.of(RUN, 100.0) == ()
    assert orders.of(RUN, 0.0) == (), "an expired order stays closed"


def test_concurrent_orders_of_a_run_are_bounded() -> None:
    orders = OpenOrders()
    assert all(orders.open(RUN, order(f"r-{n}"), 9.0) for n in range(MAX_ORDERS))
    assert not orders.open(RUN, order("one more"), 9.0)
    assert orders.open(RUN, order("r-0"), 10.0), "it is already open"
    assert orders.open(OTHER, order("one more"), 9.0)
    orders.forget(RUN)
    assert orders.open(RUN, order("one more"), 9.0)
