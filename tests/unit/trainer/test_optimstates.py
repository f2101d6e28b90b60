"""Optimizer state through capture and restore: names, types, memory, and training that goes on bit for bit."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from deltashard.optimstates import field_kind
from deltashard.tracking import Tracking, TrackingSettings
from deltashard_checkpoint.errors import UserError
from torch import Tensor, nn

from tests.unit.trainer.tracking_cases import OPTIMIZERS, Training, quiet

SETTINGS = TrackingSettings(hash_below_bytes=0)


def detached(tree):
    """What encoding and decoding a tree gives: equal values in memory of their own."""
    return copy.deepcopy(tree)


def transfer(source: Tracking, target: Tracking) -> list[str]:
    """Restore `target` from the live state of `source`, the way a restore does it: rows first, then trees."""
    notes = []
    for name, tensor in source.dense().items():
        target.dense()[name].data.copy_(tensor)
    for old, new in zip(source.tables, target.tables, strict=True):
        new.param.data.copy_(old.param)
        values = old.state_tensors()
        for spec in old.schema.fields:
            live = new.allocate_state(spec)
            live.view(live.shape[0], -1).copy_(values[spec.name].reshape(live.shape[0], -1))
    for old, new in zip(source.optimizers, target.optimizers, strict=True):
        notes += new.restore(detached(old.capture()))
    for table in target.tables:
        target.reseed(table, torch.tensor([], dtype=torch.int64))
    return notes


def state_of(training: Training) -> dict[str, object]:
    owner = training.optimizer
    inner = getattr(owner, "base", getattr(owner, "_inner", None))
    return {
        f"{type(o).__name__}.{k}": v
        for o in (owner, inner)
        if o is not None
        for k, v in o.state.get(training.weight, {}).items()
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        if a.is_sparse:
            return (
                b.is_sparse
                and torch.equal(a._indices(), b._indices())
                and torch.equal(a._values(), b._values())
            )
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_restored_optimizer_continues_bit_for_bit(name, sparse):
    """Any optimizer: state arrives with its keys, types and values, and five further steps end in equal weights."""
    if not OPTIMIZERS[name][1 if sparse else 2]:
        pytest.skip("torch has no such gradients for it")
    with quiet():
        original, resumed = Training(name, "embedding", sparse, 1), Training(name, "embedding", sparse, 2)
        source = Tracking(original.model, [original.optimizer, original.dense], settings=SETTINGS)
        target = Tracking(resumed.model, [resumed.optimizer, resumed.dense], settings=SETTINGS)
        for _ in range(4):
            original.train()
        source.refresh()
        assert transfer(source, target) == []
        ours, theirs = state_of(resumed), state_of(original)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert same(value, ours[key]), key
            if isinstance(value, Tensor) and not value.is_sparse:
                assert value.data_ptr() != ours[key].data_ptr()
        if name == "lookahead":  # its own counter is not in any state: the user hands it over by state=
            resumed.optimizer.count = original.optimizer.count
        resumed.rng.set_state(original.rng.get_state())
        for _ in range(5):
            original.train()
            resumed.train()
    assert torch.equal(original.weight, resumed.weight)


def test_groups_come_back_in_place():
    """Learning rates, also tensor ones that a scheduler holds, and groups matched by their parameters."""

    def build(lr):
        model = nn.ModuleDict({"a": nn.Embedding(8, 2), "b": nn.Linear(2, 2)})
        return model, torch.optim.Adam(
            [
                {"params": model["a"].parameters(), "lr": lr},
                {"params": model["b"].parameters(), "betas": (0.5, 0.9)},
            ],
            lr=torch.tensor(0.25),
        )

    model, optimizer = build(0.5)
    other_model, other = build(0.125)
    held = other.param_groups[1]["lr"]
    optimizer.param_groups[1]["lr"].fill_(0.75)
    target = Tracking(other_model, other)
    target.optimizers[0].restore(detached(Tracking(model, optimizer).optimizers[0].capture()))
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups[1]["lr"] is held
    assert held == 0.75
    assert other.param_groups[1]["betas"] == (0.5, 0.9)
    tree = target.optimizers[0].capture()
    assert tree["groups"][0]["params"] == ["a.weight"]
    with pytest.raises(UserError, match="parameter groups"):
        target.optimizers[0].restore({**tree, "groups": tree["groups"][:1]})


def test_low_precision_weights_keep_float32_state():
    """load_state_dict would cast row state to bfloat16; this does not."""
    model = nn.Embedding(16, 4, dtype=torch.bfloat16, sparse=True)
    other = nn.Embedding(16, 4, dtype=torch.bfloat16, sparse=True)
    from deltashard.optim import RowWiseAdagrad

    source = Tracking(model, RowWiseAdagrad(model.parameters()))
    owner = RowWiseAdagrad(other.parameters())
    source.tables[0].state_tensors()["sum"].fill_(1 + 2**-20)
    transfer(source, Tracking(other, owner))
    assert owner.state[other.weight]["sum"].dtype == torch.float32
    assert (owner.state[other.weight]["sum"] == 1 + 2**-20).all()


def test_kinds_of_state():
    """Row-wise, point-wise, or part of the optimizer's blob."""
    assert field_kind(torch.zeros(5), 5, 3) == "rowwise"
    assert field_kind(torch.zeros(5, 1), 5, 3) == "rowwise"
    assert field_kind(torch.zeros(5, 3), 5, 3) == "pointwise"
    for other in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(()), 3, None, torch.zeros(5, 3).to_sparse()):
        assert field_kind(other, 5, 3) is None


def test_parameters_outside_the_model_travel_with_their_optimizer():
    """A temperature that the model does not hold is saved and restored under a name of its own."""

    def build(value):
        model, extra = nn.Embedding(8, 2), nn.Parameter(torch.full((1,), value))
        return model, extra, Tracking(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))

    _, _, source = build(3.0)
    _, extra, target = build(1.0)
    target.optimizers[0].restore(detached(source.optimizers[0].capture()))
    assert extra.item() == 3.0


def test_state_without_an_owner_is_refused():
    """A checkpoint with optimizer state needs an optimizer."""
    from deltashard_checkpoint.tables import FieldSpec

    table = Tracking(nn.Embedding(8, 2)).tables[0]
    with pytest.raises(UserError, match="no optimizer"):
        table.allocate_state(FieldSpec(name="sum", kind="rowwise", dtype="float32"))


class Forgetful(torch.optim.Optimizer):
    """Initialises its state at its own first step, whatever is there."""

    def __init__(self, params):
        super().__init__(params, {})
        self.fresh = True

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if self.fresh:
                self.state[p]["mean"] = torch.zeros_like(p)
            self.state[p]["mean"].add_(p.grad)
            p.sub_(self.state[p]["mean"])
        self.fresh = False


@pytest.mark.parametrize("kind", [Forgetful, torch.optim.Adam], ids=["forgetful", "adam"])
def test_an_optimizer_that_throws_restored_state_away_is_named(kind, caplog):
    """Its first step after the restore initialises state again: said in the log; a well-behaved one is not blamed."""

    def build():
        model = nn.Embedding(40, 4)
        optimizer = kind(list(model.parameters()))
        return model, optimizer, Tracking(model, optimizer, settings=SETTINGS)

    def step(model, optimizer, ids):
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        optimizer.step()

    model, optimizer, source = build()
    step(model, optimizer, torch.arange(40))
    source.refresh()
    other_model, other, target = build()
    transfer(source, target)
    target.watch_first_step()
    with caplog.at_level(logging.WARNING, "deltashard.tracking"):
        step(other_model, other, torch.tensor([1, 2]))
    assert ("initialises it again" in caplog.text) == (kind is Forgetful)
