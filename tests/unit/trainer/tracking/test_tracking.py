"""Tracking against a full comparison of weights and state: no miss under any optimizer, table and event."""

from __future__ import annotations

import collections
import copy
import logging
import os
import pickle

import pytest
import torch
from deltashard.tracking.marks import Marks
from deltashard.tracking.tracking import Tracking, TrackingSettings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.trainer.tracking_case import (
    COLUMNS,
    EVENTS,
    EXACT,
    OPTIMIZERS,
    PLAIN,
    ROWS,
    TABLES,
    Cutter,
    Training,
    begin,
    make_table,
    quiet,
)

# Every row is sampled, so that even a write without a trace must be found before the next cut.
ALL_SEEN = TrackingSettings(hash_below_bytes=0, audit_rows=ROWS)
TRACELESS = {"write_data"}


def cases() -> list[tuple[str, str, bool]]:
    found = []
    for name, (_, takes_sparse, takes_dense) in OPTIMIZERS.items():
        for kind in TABLES:
            if takes_dense:
                found.append((name, kind, False))
            # Bags of mode max and of weighted samples, and renormalised tables, have no sparse gradients in torch.
            if takes_sparse and kind not in ("bag_max", "max_norm"):
                found.append((name, kind, True))
    return found


OVER: collections.Counter[tuple[str, str]] = collections.Counter()


@settings(
    max_examples=int(os.environ.get("DELTASHARD_TRACKING_EXAMPLES", "400")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    case=st.sampled_from(cases()),
    events=st.lists(
        st.one_of(st.sampled_from(EVENTS), st.sampled_from(["train", "cut"])), min_size=1, max_size=14
    ),
    seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_no_row_that_changed_is_missed(case, events, seed):
    """Any optimizer x any table x any sequence of events: selections hold every changed row, by weight or state."""
    with quiet():
        training, cutter = begin(*case, seed, ALL_SEEN if TRACELESS & set(events) else PLAIN)
        for event in events:
            if event == "cut":
                cutter.take()
            else:
                getattr(training, event)()
        cutter.take()
    OVER[(cutter.table.tracker, "selected")] += cutter.selected
    OVER[(cutter.table.tracker, "changed")] += cutter.changed


@pytest.mark.parametrize("case", cases(), ids=lambda c: "-".join(map(str, c)))
@pytest.mark.slow
def test_plain_training_is_tracked_as_cheaply_as_it_can_be(case, record_property):
    """Whitelisted optimizers stay on gradients, all others use hashes; over-marking is a figure, and a small one."""
    with quiet():
        training, cutter = begin(*case)
        training.train()
        cutter.take()
        cutter.rows = cutter.changed = cutter.selected = 0
        for _ in range(6):
            training.train()
            training.evaluate()
            training.evaluate_with_graph()
            cutter.take()
    name, kind, sparse = case
    exact = sparse and name in EXACT and kind != "max_norm"
    assert cutter.table.tracker == ("gradients" if exact else "hashes"), cutter.table.reason
    over = (cutter.selected - cutter.changed) / max(cutter.changed, 1)
    record_property("over_marking", over)
    if not exact:
        assert over == 0
    elif kind not in (
        "padded",
        "bag_offsets",
        "bag_max",
    ):  # padding rows and rows that lose a max get no gradient
        assert over < 0.05, over


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.slow
def test_each_event_alone_between_trainings(name, sparse, event):
    """Every event by itself, before a cut, after one, and across one."""
    with quiet():
        training, cutter = begin(name, "embedding", sparse, how=ALL_SEEN if event in TRACELESS else PLAIN)
        for _ in range(2):
            training.train()
            cutter.take()
            getattr(training, event)()
            cutter.take()
            training.train()
            getattr(training, event)()
            training.train()
            cutter.take()
            training.accumulate()
            cutter.take()
            training.accumulate_and_step()
            cutter.take()


@pytest.mark.parametrize("event", ["evaluate", "evaluate_with_graph", "scaled_skip", "accumulate"])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_changes_nothing_marks_nothing(event, sparse):
    """Evaluation, a step that GradScaler skips, a backward pass without a step."""
    with quiet():
        training, cutter = begin("sgd", "embedding", sparse)
        training.train()
        cutter.take()
        getattr(training, event)()
        assert cutter.take() == set()


def test_the_comparison_would_see_a_miss(monkeypatch):
    """The property is not vacuous: forget half of the rows of each gradient and it fails."""
    real = Marks.mark
    monkeypatch.setattr(Marks, "mark", lambda self, ids: real(self, ids[..., : ids.shape[-1] // 2]))
    with quiet():
        training, cutter = begin("sgd", "embedding", True)
        training.train()
        training.train()
        with pytest.raises(AssertionError, match="missed"):
            cutter.take()


def test_momentum_switched_on_moves_the_table_to_hashes_and_says_so_once(caplog):
    """A scheduler changes a group in the middle of a run: nothing is missed, one line in the log."""
    with quiet(), caplog.at_level(logging.INFO, "deltashard.tracking"):
        training, cutter = begin("sgd", "embedding", True)
        training.train()
        cutter.take()
        training.momentum_on()
        training.train()
        assert cutter.take() == set(range(ROWS))
        assert cutter.table.tracker == "hashes"
        for _ in range(3):
            training.train()
            cutter.take()
    lines = [r.getMessage() for r in caplog.records if "row hashes" in r.getMessage()]
    assert len(lines) == 1
    assert "SGD with momentum" in lines[0]


def test_a_table_tied_between_two_embeddings_is_one_table():
    """One canonical name, one set of marks; lookups through either module count."""
    first, second = make_table("embedding", True), make_table("embedding", True)
    second.weight = first.weight
    model = nn.ModuleDict({"a": first, "b": second})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracking = Tracking(model, optimizer, settings=ALL_SEEN)
    (table,) = tracking.tables
    assert (table.fqn, table.aliases) == ("a.weight", ("b.weight",))
    tracking.refresh()
    tracking.cut_taken(1, "all")
    tracking.committed(1, baseline=True)
    with quiet():
        (first(torch.tensor([1, 2])).sum() + second(torch.tensor([2, 7])).sum()).backward()
        optimizer.step()
    tracking.refresh()
    assert table.prepare_cut("since_commit").ids.tolist() == [1, 2, 7]
    assert table.tracker == "gradients"


def test_activation_checkpointing_keeps_gradients_exact():
    """Recomputed lookups run within backward: their rows count."""
    from torch.utils.checkpoint import checkpoint

    training, cutter = begin("sgd", "embedding", True)
    for _ in range(3):
        training.optimizer.zero_grad()
        with quiet():
            checkpoint(training.look_up, training.ids(), use_reentrant=False).sum().backward()
            training.optimizer.step()
        assert 0 < len(cutter.take()) < 10
    assert cutter.table.tracker == "gradients"


def test_a_write_without_a_trace_is_found_by_the_audit(caplog):
    """`.data` moves no version: the audit finds it, the cut is full, and hashes take over."""
    training, cutter = begin("sgd", "embedding", True, how=ALL_SEEN)
    with quiet():
        training.train()
        cutter.take()
        training.write_data()
        assert len(cutter.take()) == ROWS
    assert cutter.tracking.faults == 1
    assert cutter.table.tracker == "hashes"


def test_stepped_tells_accumulation_from_steps():
    """A due cut waits for the next optimizer step; skipped steps are no steps."""
    with quiet():
        training, cutter = begin("sgd", "embedding", True)
        tracking = cutter.tracking
        training.accumulate()
        assert not tracking.steps.stepped
        training.scaled_skip()
        assert not tracking.steps.stepped
        training.train()
        assert tracking.steps.stepped
        tracking.steps.done()
        assert not tracking.steps.stepped


def test_a_copy_or_pickle_of_the_model_carries_no_tracking():
    """Averaged models deep-copy, people pickle: neither drags marks along nor marks anything."""
    training, cutter = begin("sgd", "embedding", True)
    twin = copy.deepcopy(training.model)
    other = pickle.loads(pickle.dumps(training.model))
    for model in (twin, other):
        with quiet():
            model["table"](torch.tensor([1, 2, 3])).sum().backward()
    assert cutter.take() == set()


def test_a_replaced_parameter_is_found_at_the_next_cut():
    """The module got a new Parameter object: all rows count; one of another shape is a new table of that name."""
    training, cutter = begin("sgd", "embedding", True)
    training.model["table"].weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
    assert cutter.take() == set(range(ROWS))
    assert cutter.table.param is training.weight
    training.model["table"].weight = nn.Parameter(torch.randn(ROWS + 1, COLUMNS))
    cutter.tracking.refresh()
    assert cutter.tracking.regrown
    assert cutter.tracking.by_key["table.weight"].schema.rows == ROWS + 1
    training.weight.data = torch.randn(ROWS + 2, COLUMNS)  # in place: the very parameter
    cutter.tracking.cut_taken(7, "all")
    cutter.tracking.refresh()
    assert cutter.tracking.regrown
    assert cutter.tracking.by_key["table.weight"].prepare_cut("since_commit").all


def test_a_lazy_field_changes_the_schema_and_the_whole_table():
    """Before the first step Adam has no state; afterwards every row must be stored with it."""
    training, cutter = begin("adam", "embedding", False)
    assert cutter.table.schema.fields == ()
    training.train()
    assert cutter.take() == set(range(ROWS))
    assert [f.name for f in cutter.table.schema.fields] == ["exp_avg", "exp_avg_sq"]
    training.train()
    assert len(cutter.take()) < ROWS


def test_tracking_draws_no_random_numbers():
    """The training's streams are its own."""
    training, cutter = begin("sgd", "embedding", False)
    before = torch.get_rng_state()
    cutter.take()
    training.evaluate()
    cutter.take()
    assert torch.equal(before, torch.get_rng_state())


def test_small_tables_cost_nothing_per_step():
    """Under the size limit a table is looked at by hash, quietly, whatever its optimizer."""
    training = Training("sgd", "embedding", True, 0)
    tracking = Tracking(training.model, training.optimizer)
    (table,) = tracking.tables
    assert table.tracker == "hashes"
    assert not tracking._hooks[0].tables


def test_close_takes_all_hooks_away():
    """After close neither model nor optimizer knows deltashard."""
    training = Training("sgd", "embedding", False, 0)
    tracking = Tracking(training.model, [training.optimizer], settings=ALL_SEEN)
    tracking.close()
    assert not training.optimizer._optimizer_step_post_hooks
    assert not training.optimizer._optimizer_step_pre_hooks


@pytest.fixture(scope="module", autouse=True)
def over_marking(record_testsuite_property):
    """Report over-marking of the random runs as a figure."""
    yield
    for tracker in ("gradients", "hashes"):
        changed, selected = OVER[(tracker, "changed")], OVER[(tracker, "selected")]
        if changed:
            record_testsuite_property(f"over_marking_{tracker}", round(selected / changed - 1, 4))


def test_dense_and_sparse_gradients_of_one_table_do_not_hide_rows():
    """A dense lookup and a sparse functional one, in one backward pass and in two."""
    training, cutter = begin("sgd", "embedding", False)
    functional = torch.nn.functional
    with quiet():
        for together in (True, False):
            training.optimizer.zero_grad()
            sparse = functional.embedding(torch.tensor([100, 101]), training.weight, sparse=True).sum()
            if together:
                (training.loss() + sparse).backward()
            else:
                training.loss().backward()
                sparse.backward()
            training.optimizer.step()
            cutter.take()


def test_a_scheduled_optimizer_is_tracked_by_gradients():
    """A scheduler wraps `step` and changes nothing."""
    with quiet():
        training, cutter = begin("sgd", "embedding", True)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
        for _ in range(3):
            training.train()
            scheduler.step()
            cutter.take()
    assert cutter.table.tracker == "gradients"


def test_a_weight_that_grew_never_fails_a_step() -> None:
    """`weight.data = bigger`, and ids beyond the old rows: the step is taken, the next save is a baseline of the new shape."""
    table = nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    tracking = Tracking(table, optimizer, settings=PLAIN)
    table.weight.data = torch.zeros(200, 8)
    with quiet():
        table(torch.tensor([150])).sum().backward()
        optimizer.step()
    assert tracking.tables[0].tracker == "hashes"
    tracking.refresh()
    assert tracking.regrown
    tracking.close()


@pytest.mark.parametrize("early", [True, False])
def test_a_hook_of_the_user_moves_the_table_to_hashes(early, caplog):
    """Registered before or after tracking: whatever it drops or writes is found, and why is said once."""
    training = Training("sgd", "embedding", True, 0)

    def hook(optimizer, _args, _kwargs):
        optimizer.zero_grad()
        with torch.no_grad():
            training.weight[5] += 1.0

    if early:
        training.optimizer.register_step_post_hook(hook)
    cutter = Cutter(training, Tracking(training.model, [training.optimizer, training.dense], settings=PLAIN))
    if not early:
        training.optimizer.register_step_post_hook(hook)
    with quiet(), caplog.at_level(logging.INFO, "deltashard.tracking"):
        for _ in range(3):
            training.train()
            cutter.take()
    assert cutter.table.tracker == "hashes"
    assert "another step hook" in cutter.table.reason
    training.dense.register_step_post_hook(hook)  # not this table's optimizer: no matter
    assert caplog.text.count("row hashes") == (0 if early else 1)


def test_two_trackings_of_one_optimizer_do_not_take_each_other_for_strangers():
    """Two runs may be written from one training."""
    with quiet():
        training, cutter = begin("sgd", "embedding", True)
        other = Tracking(training.model, [training.optimizer, training.dense], settings=PLAIN)
        for _ in range(3):
            training.train()
            cutter.take()
    assert {cutter.table.tracker, other.tables[0].tracker} == {"gradients"}


def test_the_look_after_a_cut_leaves_other_hooks_alone():
    """What runs once before the next step must not change the hooks while torch goes through them."""
    from deltashard.save.step_order import OrderWatch
    from deltashard.tracking.step_clock import StepClock

    training, cutter = begin("sgd", "embedding", True)
    watch = OrderWatch(cutter.tracking, {}, StepClock(cutter.tracking))
    watch.arm()
    calls = []
    training.dense.register_step_pre_hook(lambda *_: calls.append(1))
    with quiet():
        training.train()
    assert calls == [1]
    assert cutter.tracking.steps.before_next == []


def test_two_parameters_over_one_storage_are_hashed():
    """The step of one changes the rows of the other: identity says nothing, memory does."""
    first, second = make_table("embedding", True), make_table("embedding", True)
    second.weight = nn.Parameter(first.weight.data)
    model = nn.ModuleDict({"a": first, "b": second})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    tracking = Tracking(model, optimizers, settings=PLAIN)
    tracking.refresh()
    tracking.cut_taken(1, "all")
    tracking.committed(1, baseline=True)
    with quiet():
        first(torch.tensor([3])).sum().backward()
        optimizers[0].step()
    tracking.refresh()
    for table in tracking.tables:
        assert table.prepare_cut("since_commit").ids.tolist() == [3]
        assert "shares its memory" in table.reason


def test_memory_that_becomes_shared_while_training_is_noticed():
    """`b.weight.data = a.weight.data` after some steps."""
    first, second = make_table("embedding", True), make_table("embedding", True)
    model = nn.ModuleDict({"a": first, "b": second})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    tracking = Tracking(model, optimizers, settings=PLAIN)
    assert {t.tracker for t in tracking.tables} == {"gradients"}
    second.weight.data = first.weight.data
    tracking.refresh()
    assert {t.tracker for t in tracking.tables} == {"hashes"}


def test_a_module_that_is_replaced_is_found_by_name(caplog):
    """The old module still holds its parameter: only the model tells. New content, said."""
    training, cutter = begin("adagrad", "embedding", True)
    with quiet():
        training.train()
        cutter.take()
        training.replace_module()
        assert cutter.take() == set(range(ROWS))
        assert cutter.table.param is training.weight
        for _ in range(3):
            training.train()
            cutter.take()
    assert "was replaced" in caplog.text
    assert [f.name for f in cutter.table.schema.fields] == ["sum"]


@pytest.mark.parametrize("optimizers", [True, False])
def test_a_table_that_is_added_later_is_in_the_next_cut(optimizers):
    """Whole, with its optimizer state by its own name; one that goes is no longer saved."""
    training = Training("adagrad", "embedding", True, 0)
    tracking = Tracking(training.model, [training.optimizer] if optimizers else [], settings=PLAIN)
    tracking.refresh()
    tracking.cut_taken(1, "all")
    tracking.committed(1, baseline=True)
    assert not tracking.regrown
    late = training.model["late"] = make_table("embedding", True)
    training.optimizer.add_param_group({"params": [late.weight]})
    with quiet():
        late(torch.tensor([1])).sum().backward()
        training.train(clear=False)
    tracking.refresh()
    assert tracking.regrown
    table = tracking.by_key["late.weight"]
    assert table.prepare_cut("since_commit").all
    if optimizers:
        assert [f.name for f in table.schema.fields] == ["sum"]
        assert tracking.optimizers[0].capture()["groups"][1]["params"] == ["late.weight"]
    tracking.cut_taken(2, "all")
    tracking.committed(2, baseline=True)
    with quiet():
        late(torch.tensor([7])).sum().backward()
        training.optimizer.step()
    tracking.refresh()
    assert 7 in table.prepare_cut("since_commit").ids.tolist()
    del training.model["late"]
    tracking.refresh()
    assert [t.fqn for t in tracking.tables] == ["table.weight"]
    assert tracking.regrown


def test_a_step_looks_at_its_own_optimizers_tables_only(monkeypatch):
    """40 tables with an optimizer each: one step, one table, before it and after it."""
    from deltashard.tracking.tracking import TrackedTable

    modules = nn.ModuleList(make_table("embedding", True) for _ in range(40))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    tracking = Tracking(modules, optimizers, settings=PLAIN)
    asked = []
    for name in ("before_step", "after_step"):
        real = getattr(TrackedTable, name)
        monkeypatch.setattr(
            TrackedTable,
            name,
            lambda table, *args, real=real: (asked.append(table.fqn), real(table, *args))[1],
        )
    with quiet():
        modules[7](torch.tensor([1])).sum().backward()
        optimizers[7].step()
    assert asked == ["7.weight", "7.weight"]
    tracking.close()


def test_tables_on_hashes_are_looked_at_together_in_chunks(monkeypatch):
    """Every chunk is hashed once, by whichever thread; the marks are those of one look after the other."""
    from deltashard.state import row_hash

    monkeypatch.setattr(row_hash, "_CHUNK_BYTES", 512)
    modules = nn.ModuleList(make_table("embedding", True) for _ in range(30))
    tracking = Tracking(modules, torch.optim.Adam(modules.parameters(), lr=0.1), settings=PLAIN)
    tracking.refresh()
    tracking.cut_taken(1, "all")
    tracking.committed(1, baseline=True)
    with torch.no_grad():
        for i, module in enumerate(modules):
            module.weight[[i, ROWS - 1 - i]] += 1.0
    tracking.refresh()
    for i, table in enumerate(tracking.tables):
        assert table.prepare_cut("since_commit").ids.tolist() == [i, ROWS - 1 - i]


def test_shared_jobs_run_once_each_and_a_failure_is_told():
    """Whoever takes a job; nothing runs any more when it returns."""
    from deltashard.state.kernel_thread import share

    done = []
    share([lambda i=i: done.append(i) for i in range(200)])
    assert sorted(done) == list(range(200))
    share([])

    def fail():
        raise ValueError("job")

    with pytest.raises(ValueError, match="job"):
        share([*[lambda: done.append(0)] * 5, fail, *[lambda: done.append(0)] * 5])


class Rebinds(nn.Module):
    """A table beside a buffer that each forward makes anew."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(100_000, 8, sparse=True)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, ids):
        self.average = self.average * 0.9 + 1
        return self.items(ids).sum()


def _one_step(model, optimizer):
    model(torch.tensor([1, 2, 3])).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_write_from_outside_is_seen_though_tensors_of_the_model_move():
    model = Rebinds()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracking = Tracking(model, [optimizer])
    _one_step(model, optimizer)
    tracking.refresh()
    tracking.cut_taken(1, "all", full=True)
    tracking.committed(1, baseline=True)
    _one_step(model, optimizer)
    with torch.no_grad():
        model.items.weight[77_777] += 1
    assert tracking.refresh().commit == 100_000
    tracking.close()


def test_a_lazy_field_is_seen_though_tensors_of_the_model_move():
    model = Rebinds()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    tracking = Tracking(model, [optimizer])
    tracking.refresh()
    tracking.cut_taken(1, "all", full=True)
    tracking.committed(1, baseline=True)
    _one_step(model, optimizer)
    assert tracking.refresh().commit == 100_000
    tracking.close()
