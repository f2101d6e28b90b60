"""What scripts do to models and optimizers while they train: exact after a resume, or reported."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from deltashard.errors import CheckpointMismatch
from deltashard.tracking.handed_optimizer import HandedOptimizers
from deltashard_checkpoint.errors import UserError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.trainer.script_case import KINDS, STRUCTURAL, Plan, Script, same

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

STEPS = 9
EVENTS = ("freeze", "unfreeze", "freeze late", "unfreeze late", "drop gradients", *STRUCTURAL)
OUTCOMES: collections.Counter[str] = collections.Counter()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Small tensors: threads of torch's would only wait for each other on a busy machine."""
    caplog.set_level(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(plan: Plan, steps: int = STEPS) -> Script:
    script = Script(plan)
    script.begin()
    script.train(range(steps))
    return script


def resumed(plan: Plan, at: int) -> tuple[Script, list[str]]:
    """A script that trained until `at`, was lost, and resumed with the structure that it had; its notes."""
    lost = trained(plan, at)
    script = lost.rebuilt(at)
    script.begin()
    notes = script.restore(lost.cut())
    script.train(range(at, STEPS))
    return script, notes


def check_exact(plan: Plan, at: int) -> None:
    script, notes = resumed(plan, at)
    assert notes == []
    assert same(trained(plan).values(), script.values()) == []


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sparse = draw(st.booleans())
    events = draw(
        st.lists(st.tuples(st.integers(1, STEPS - 2), st.sampled_from(EVENTS)), max_size=4).map(sorted)
    )
    replaced = any(event == "replace optimizer" for _, event in events)
    if sparse:
        events = [(n, e) for n, e in events if e not in ("replace optimizer", "grow in place")]
    return Plan(
        kind="adagrad" if sparse else draw(st.sampled_from(sorted(KINDS))),
        sparse=sparse,
        set_to_none=draw(st.booleans()),
        zero_last=draw(st.booleans()),
        scheduler=not replaced and draw(st.booleans()),
        used_every=draw(st.sampled_from([1, 3, 4])),
        events=tuple(events),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=plans(), at=st.integers(1, STEPS - 1), repeated=st.booleans(), rate=st.sampled_from([0.1, 0.1, 0.02])
)
def test_a_resumed_script_is_exact_or_told(plan: Plan, at: int, repeated: bool, rate: float) -> None:
    """`repeated`: the new process first makes the changes of structure again, which the old one made; `rate`: its own."""
    lost = trained(plan, at)
    checkpoint = lost.cut()
    again = Script(replace(plan, lr=rate))
    for step, event in plan.events if repeated else ():
        if step < at and event in STRUCTURAL:
            again.happen(event)
    again.begin()
    changed = any(step < at and event in STRUCTURAL for step, event in plan.events)
    try:
        notes = again.restore(checkpoint)
    except (CheckpointMismatch, UserError):
        assert changed
        assert not repeated
        OUTCOMES["refused"] += 1
        return
    again.train(range(at, STEPS))
    differ = same(trained(plan).values(), again.values())
    if rate == plan.lr and (repeated or not changed):
        assert (differ, notes) == ([], [])
        OUTCOMES["exact"] += 1
    else:
        # Later events build with the new rate.
        assert not differ or notes or any(step >= at and e in STRUCTURAL for step, e in plan.events)
        OUTCOMES["told"] += bool(notes)


def test_the_property_saw_all_outcomes() -> None:
    """It is not vacuous."""
    if not OUTCOMES:
        pytest.skip("the property did not run in this process")
    assert min(OUTCOMES["exact"], OUTCOMES["refused"], OUTCOMES["told"]) > 0, OUTCOMES


@pytest.mark.parametrize("at", [2, 5])
def test_a_table_frozen_once_while_training_stays_frozen(at: int) -> None:
    """The new process does not pass the step that froze it."""
    check_exact(Plan(events=((1, "freeze"),)), at)
    check_exact(Plan(events=((1, "freeze"), (4, "unfreeze"))), at)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("zero_last", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_table_without_lookups_moves_as_its_gradient_says(
    sparse: bool, set_to_none: bool, zero_last: bool, at: int
) -> None:
    """Zeros in `.grad` let momentum move it, None does not: whether gradients were there at the cut comes back."""
    kind = "adagrad" if sparse else "adam"
    check_exact(
        Plan(kind=kind, sparse=sparse, set_to_none=set_to_none, zero_last=zero_last, used_every=4), at
    )


def test_gradients_that_are_dropped_after_the_cut_are_not_there_at_the_next_step() -> None:
    """A loop that zeroes to None right after `step()`: the zeros that the restore placed are taken away."""
    plan = Plan(used_every=4)
    lost = trained(plan, 5)
    script = lost.rebuilt(5)
    script.begin()
    script.restore(lost.cut())
    assert all(not p.grad.count_nonzero() for p in script.model["b"].parameters() if p.grad is not None)
    for optimizer in script.optimizers:
        optimizer.step()
    assert all(p.grad is None for p in script.model.parameters())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_table_that_grows_comes_back_grown(in_place: bool) -> None:
    """To the program that builds it so; another one is refused, with both shapes."""
    plan = Plan(events=((2, "grow in place" if in_place else "grow"),))
    lost = trained(plan, 2)
    lost.cut()
    lost.train(range(2, 4))
    checkpoint = lost.cut()
    assert checkpoint.tables["a.weight"][0].rows == 32
    script = lost.rebuilt(4)
    script.begin()
    assert script.restore(checkpoint) == []
    script.train(range(4, STEPS))
    assert same(trained(plan).values(), script.values()) == []
    other = Script(plan)
    other.begin()
    with pytest.raises(
        CheckpointMismatch, match=r"a\.weight shrank: \[32, 4\] is stored, the model has \[24, 4\]"
    ):
        other.restore(checkpoint)


def test_an_optimizer_replaced_in_the_list_is_adopted(caplog: pytest.LogCaptureFixture) -> None:
    """Its steps are seen, and it is what later checkpoints hold; the log says what a restart needs."""
    caplog.set_level(logging.WARNING)
    plan = Plan(events=((2, "replace optimizer"),))
    script = trained(plan, 4)
    assert "an optimizer was replaced while training" in caplog.text
    script.optimizers[0].step()
    assert script.tracking.steps.stepped
    assert [view.class_name for view in script.tracking.optimizers] == ["torch.optim.sgd.SGD"]
    check_exact(plan, 5)


@pytest.mark.parametrize("script", [False, True])
def test_hyperparameters_given_otherwise_are_reported_by_name_and_value(script: bool) -> None:
    """The checkpoint's are in force, or this script's; what the scheduler changed is no difference."""
    plan = Plan(kind="adamw", scheduler=True)
    lost = trained(plan, 4)
    again = Script(replace(plan, lr=0.02))
    group = again.optimizers[0].param_groups[0]
    group["weight_decay"] = 0.5
    assert again.scheduler is not None
    again.scheduler.gamma = 0.25
    again.begin()
    optimizer, scheduler = again.restore(lost.cut(), script=script)
    assert "lr 0.1 -> 0.02" in optimizer
    assert "weight_decay 0.1 -> 0.5" in optimizer
    assert "gamma 0.5 -> 0.25" in scheduler
    assert group["weight_decay"] == (0.5 if script else 0.1)
    assert group["lr"] == (0.02 if script else 0.1 * 0.5**2)
    assert again.scheduler.gamma == (0.25 if script else 0.5)
    assert again.scheduler.last_epoch == 4


def test_a_difference_is_reported_again_until_the_script_agrees() -> None:
    """What is in force is compared, not what the script of the process between gave."""
    plan = Plan()
    between = Script(replace(plan, lr=0.02))
    between.begin()
    assert between.restore(trained(plan, 3).cut())
    between.train(range(3, 5))
    checkpoint = between.cut()
    other, agreeing = Script(replace(plan, lr=0.02)), Script(plan)
    for script in (other, agreeing):
        script.begin()
    assert "lr 0.1 -> 0.02" in other.restore(checkpoint)[0]
    assert agreeing.restore(checkpoint) == []


def test_requires_grad_given_otherwise_is_reported() -> None:
    """A script that begins frozen now: the checkpoint's word is in force, and both are named."""
    lost = trained(Plan(), 3)
    for script in (False, True):
        again = Script(Plan())
        again.model["b"].weight.requires_grad_(False)
        again.begin()
        (note,) = again.restore(lost.cut(), script=script)
        assert "requires_grad" in note
        assert "b.weight True -> False" in note
        assert again.model["b"].weight.requires_grad is not script


def test_an_optimizer_held_by_a_module_is_adopted_when_the_module_holds_another() -> None:
    """As scripts that keep the optimizer beside the model do."""
    model = torch.nn.Linear(2, 1)
    model.optimizer = torch.optim.Adam(model.parameters())
    handed = HandedOptimizers(model.optimizer, model)
    assert not handed.look()
    model.optimizer = torch.optim.SGD(model.parameters())
    assert handed.look()
    assert handed.now == [model.optimizer]
    model.optimizer = None
    assert not handed.look()
