"""Ordered saves: asked for once, carried by the next cut, told of as long as somebody names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deltashard_checkpoint.log.run_state import RunState
from deltashard_checkpoint.vocabulary import ORDERS_KEY
from deltashard_proto.cause import Cause
from deltashard_proto.v1 import fleet_pb2 as fleet
from deltashard_proto.v1 import trainer_pb2 as pb
from deltashard_sidecar import save_orders
from deltashard_sidecar.save_orders import KEPT, SaveOrders


class Pod:
    """One whose trainer, a session or none, is asked."""

    def __init__(self) -> None:
        self.session: Any = SimpleNamespace(closed=False)
        self.asked: list[str] = []
        self.saves: list[Any] = []
        self.state: Any = RunState(run="r")
        self.orders = SaveOrders(ask=self.ask, state=lambda: self.state, in_flight=lambda: self.saves)

    def ask(self, order: fleet.SaveOrder) -> Any:
        self.asked.append(order.id)
        return self.session

    def answered(self, *names: str, told: bool = True, deadline_s: float = 0.0) -> None:
        over = {each.id for each in self.orders.over()} if told else set()
        self.orders.answered([fleet.SaveOrder(id=name, deadline_s=deadline_s) for name in names], over)
        self.orders.look()

    def begin(self) -> Any:
        self.saves = [SimpleNamespace(cut=SimpleNamespace(orders=self.orders.open()))]
        return self.saves[0]

    def end(self, save: Any, commit: pb.Commit | None, cause: Cause = Cause.ERROR) -> None:
        save.commit, save.failure, self.saves = commit, (cause, "why"), []
        self.orders.ended(save)

    @property
    def over(self) -> list[tuple[str, int]]:
        return [(each.id, each.seq) for each in self.orders.over()]


def test_an_order_is_asked_for_once_and_told_until_nobody_names_it() -> None:
    """A leader that names it again, because it does not know yet, hears of the end again."""
    pod = Pod()
    pod.answered("a")
    pod.answered()  # a leader that has not seen everything
    save = pod.begin()
    pod.answered("a", "b")
    assert pod.asked == ["a", "b"]
    pod.end(save, pb.Commit(seq=7, step=3))
    assert pod.over == [("a", 7)]
    pod.answered("b", told=False)
    assert pod.over == [("a", 7)], "the answer was on its way already"
    pod.answered("b")
    assert pod.over == []
    pod.answered("a", "b")
    assert (pod.over, pod.asked) == ([("a", 7)], ["a", "b"])


def test_a_save_whose_place_another_takes_ends_nothing() -> None:
    """The other carries the order; one that fails for itself ends it."""
    pod = Pod()
    pod.answered("a")
    pod.end(pod.begin(), None, Cause.SUPERSEDED)
    assert pod.over == []
    pod.end(pod.begin(), None)
    (end,) = pod.orders.over()
    assert (end.outcome, end.cause) == (fleet.SaveOver.OUTCOME_FAILED, "error: why")
    pod.end(pod.begin(), pb.Commit(seq=9))
    assert pod.over == [("a", 0)], "it is over"


def test_who_went_is_asked_no_more_and_who_comes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was there, somebody came and died, another came; a cut that began in time is not too late."""
    pod, now_s = Pod(), 100.0
    monkeypatch.setattr(save_orders.time, "monotonic", lambda: now_s)
    pod.session, came = None, pod.session
    pod.answered("a", deadline_s=10.0)
    pod.session = came
    pod.orders.look()
    pod.orders.look()
    assert len(pod.asked) == 2
    came.closed = True
    pod.orders.look()
    assert len(pod.asked) == 3
    save = pod.begin()
    now_s += 11.0
    pod.orders.look()
    assert pod.over == []
    pod.end(save, None, Cause.SUPERSEDED)
    pod.orders.look()
    assert pod.orders.over()[0].outcome == fleet.SaveOver.OUTCOME_EXPIRED


def test_a_cut_does_not_carry_what_the_log_has() -> None:
    """Another pod of the group carried it out before this one looked."""
    pod = Pod()
    pod.answered("a", "b")
    pod.state = SimpleNamespace(checkpoints={7: SimpleNamespace(step=3, seq=7, metadata={ORDERS_KEY: "a"})})
    assert [each.id for each in pod.begin().cut.orders] == ["b"]


def test_the_newest_ids_are_remembered() -> None:
    pod = Pod()
    for number in range(KEPT + 9):
        pod.answered(str(number))
        pod.end(pod.begin(), pb.Commit(seq=number + 1))
        pod.answered()
    assert len(pod.orders._known) <= KEPT + 1
    pod.answered(str(KEPT + 8))
    assert pod.over == [(str(KEPT + 8), KEPT + 9)]
