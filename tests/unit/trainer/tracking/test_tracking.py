"""Tracking compared with a full comparison of weights and state: no miss under any optimizer, table and event."""

from __future__ import annotations

import copy
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
    CASES,
    COLUMNS,
    EVENTS,
    EXACT,
    PLAIN,
    ROWS,
    TableTraining,
    begin,
    make_table,
    quiet,
)

# Every row is sampled: the next snapshot must find even a write without a trace.
AUDIT_ALL = TrackingSettings(hash_below_bytes=0, audit_rows=ROWS)
TRACELESS = {"write_data"}


@settings(
    max_examples=int(os.environ.get("DELTASHARD_TRACKING_EXAMPLES", "400")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    case=st.sampled_from(CASES),
    events=st.lists(
        st.one_of(st.sampled_from(EVENTS), st.sampled_from(["train", "snapshot"])), min_size=1, max_size=14
    ),
    seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_no_row_that_changed_is_missed(case, events, seed):
    with quiet():
        training, checker = begin(*case, seed, AUDIT_ALL if TRACELESS & set(events) else PLAIN)
        for event in events:
            if event == "snapshot":
                checker.take()
            else:
                getattr(training, event)()
        checker.take()


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.slow
def test_plain_training_uses_the_cheapest_tracking(case):
    """Whitelisted optimizers stay on gradients, all others use hashes. Few unchanged rows are marked."""
    with quiet():
        training, checker = begin(*case)
        training.train()
        checker.take()
        checker.rows = checker.changed = checker.selected = 0
        for _ in range(6):
            training.train()
            training.evaluate()
            training.evaluate_with_graph()
            checker.take()
    name, kind, sparse = case
    exact = sparse and name in EXACT and kind != "max_norm"
    assert checker.table.tracker == ("gradients" if exact else "hashes"), checker.table.reason
    extra = (checker.selected - checker.changed) / max(checker.changed, 1)
    if not exact:
        assert extra == 0
    elif kind not in ("padded", "bag_offsets", "bag_max"):  # some rows of these tables get no gradient
        assert extra < 0.05, extra


def test_checker_detects_a_missed_row(monkeypatch):
    """The property is not vacuous: it fails if half of the rows of each gradient are dropped."""
    real = Marks.mark
    monkeypatch.setattr(Marks, "mark", lambda self, ids: real(self, ids[..., : ids.shape[-1] // 2]))
    with quiet():
        training, checker = begin("sgd", "embedding", True)
        training.train()
        training.train()
        with pytest.raises(AssertionError, match="missed"):
            checker.take()


def commit_all(tracking, snapshot_id=1):
    tracking.refresh()
    tracking.snapshot_taken(snapshot_id, "all", full=True)
    tracking.committed(snapshot_id, baseline=True)


def pair(share):
    """Return two embeddings under separate optimizers, looked up in rows 1, 2 and 2, 7. `share` ties their weights."""
    first, second = make_table("embedding", True), make_table("embedding", True)
    share(first, second)
    tables = nn.ModuleDict({"a": first, "b": second})
    weights = {id(each.weight): each.weight for each in (first, second)}.values()
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in weights]
    tracking = Tracking(tables, optimizers, settings=PLAIN)
    commit_all(tracking)
    with quiet():
        (first(torch.tensor([1, 2])).sum() + second(torch.tensor([2, 7])).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
    tracking.refresh()
    return first, second, tracking


def test_tied_embeddings_are_one_table():
    _, _, tracking = pair(lambda first, second: setattr(second, "weight", first.weight))
    (table,) = tracking.tables
    assert (table.fqn, table.aliases, table.tracker) == ("a.weight", ("b.weight",), "gradients")
    assert table.select_rows("since_commit").ids.tolist() == [1, 2, 7]


def test_parameters_sharing_storage_are_hashed():
    """The step of one changes rows of the other. Only addresses show the sharing, also if it begins later."""
    _, _, tracking = pair(lambda first, second: setattr(second, "weight", nn.Parameter(first.weight.data)))
    for table in tracking.tables:
        assert table.select_rows("since_commit").ids.tolist() == [1, 2, 7]
        assert "shares its memory" in table.reason
    first, second, tracking = pair(lambda *_: None)
    assert {t.tracker for t in tracking.tables} == {"gradients"}
    second.weight.data = first.weight.data
    tracking.refresh()
    assert {t.tracker for t in tracking.tables} == {"hashes"}


def test_removed_table_is_no_longer_saved():
    """The table is added during training and then removed. After each change the next save holds all rows."""
    training, checker = begin("adagrad", "embedding", True)
    tracking, late = checker.tracking, make_table("embedding", True)
    training.model["late"] = late
    training.optimizer.add_param_group({"params": [late.weight]})
    tracking.refresh()
    assert tracking.regrown
    commit_all(tracking, 2)
    assert tracking.optimizers[0].capture()["groups"][1]["params"] == ["late.weight"]
    del training.model["late"]
    tracking.refresh()
    assert [t.fqn for t in tracking.tables] == ["table.weight"]
    assert tracking.regrown


def test_copies_and_pickles_of_the_model_are_not_tracked():
    """Averaged models are deep copies. Copies and pickles carry no marks and mark nothing."""
    training, checker = begin("sgd", "embedding", True)
    duplicate = copy.deepcopy(training.model)
    other = pickle.loads(pickle.dumps(training.model))
    for model in (duplicate, other):
        with quiet():
            model["table"](torch.tensor([1, 2, 3])).sum().backward()
    assert checker.take() == set()


def test_replaced_parameter_is_detected_at_the_next_snapshot():
    """All rows of the new Parameter count. A Parameter of another shape is a new table of that name."""
    training, checker = begin("sgd", "embedding", True)
    training.model["table"].weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
    assert checker.take() == set(range(ROWS))
    assert checker.table.param is training.weight
    training.model["table"].weight = nn.Parameter(torch.randn(ROWS + 1, COLUMNS))
    checker.tracking.refresh()
    assert checker.tracking.regrown
    assert checker.tracking.by_key["table.weight"].schema.rows == ROWS + 1
    training.weight.data = torch.randn(ROWS + 2, COLUMNS)  # in place: the same parameter object
    checker.tracking.snapshot_taken(7, "all")
    checker.tracking.refresh()
    assert checker.tracking.regrown
    assert checker.tracking.by_key["table.weight"].select_rows("since_commit").all


def test_close_removes_all_hooks():
    training = TableTraining("sgd", "embedding", False, 0)
    tracking = Tracking(training.model, [training.optimizer], settings=AUDIT_ALL)
    tracking.close()
    assert not training.optimizer._optimizer_step_post_hooks
    assert not training.optimizer._optimizer_step_pre_hooks


def test_dense_and_sparse_gradients_of_one_table_do_not_hide_rows():
    training, checker = begin("sgd", "embedding", False)
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
            checker.take()


def test_hashed_tables_are_compared_in_chunks(monkeypatch):
    from deltashard.state import row_hash

    monkeypatch.setattr(row_hash, "_CHUNK_BYTES", 512)
    modules = nn.ModuleList(make_table("embedding", True) for _ in range(30))
    tracking = Tracking(modules, torch.optim.Adam(modules.parameters(), lr=0.1), settings=PLAIN)
    commit_all(tracking)
    with torch.no_grad():
        for i, module in enumerate(modules):
            module.weight[[i, ROWS - 1 - i]] += 1.0
    tracking.refresh()
    for i, table in enumerate(tracking.tables):
        assert table.select_rows("since_commit").ids.tolist() == [i, ROWS - 1 - i]


class Rebinds(nn.Module):
    """A table, and a buffer that each forward pass replaces."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(100_000, 8, sparse=True)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, ids):
        self.average = self.average * 0.9 + 1
        return self.items(ids).sum()


@pytest.mark.parametrize("lazy", [True, False])
def test_changes_are_detected_when_model_tensors_are_rebound(lazy):
    """All rows count after a write from outside, or after state appears at the first step."""
    model = Rebinds()
    kind = torch.optim.SparseAdam if lazy else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)

    def one_step():
        model(torch.tensor([1, 2, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()

    tracking = Tracking(model, [optimizer])
    if not lazy:
        one_step()
    commit_all(tracking)
    one_step()
    if not lazy:
        with torch.no_grad():
            model.items.weight[77_777] += 1
    assert tracking.refresh().commit == 100_000
    tracking.close()
