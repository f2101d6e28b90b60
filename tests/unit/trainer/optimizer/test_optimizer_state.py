"""Optimizer state through capture and restore: names, types, memory, and bit-identical training afterwards."""

from __future__ import annotations

import logging

import pytest
import torch
from deltashard.errors import StateError
from deltashard.optimizer.optimizer_state import views_of
from deltashard.state.value import decode_value, encode_value
from deltashard.tracking.tracking import Tracking, TrackingSettings
from deltashard_checkpoint.errors import UserError
from torch import Tensor, nn

from tests.support.trainer.tracking_case import OPTIMIZERS, TableTraining, quiet
from tests.support.trainer.verdict import bits, differing

SETTINGS = TrackingSettings(hash_below_bytes=0)


def detached(tree):
    """Return the tree as a checkpoint restores it: equal values in separate memory."""
    return decode_value(encode_value(tree).to_bytes())


def transfer(source: Tracking, target: Tracking) -> list[str]:
    """Restore `target` from the live state of `source` in the order of a restore: rows first, then trees."""
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
        table.reseed(torch.tensor([], dtype=torch.int64))
    return notes


def state_of(training: TableTraining) -> dict[str, object]:
    owner = training.optimizer
    inner = getattr(owner, "base", getattr(owner, "_inner", None))
    return {
        f"{type(o).__name__}.{k}": v
        for o in (owner, inner)
        if o is not None
        for k, v in o.state.get(training.weight, {}).items()
    }


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.slow
def test_a_restored_optimizer_continues_bit_for_bit(name, sparse):
    if not OPTIMIZERS[name][1 if sparse else 2]:
        pytest.skip("this optimizer takes no such gradients")
    with quiet():
        original, resumed = (
            TableTraining(name, "embedding", sparse, 1),
            TableTraining(name, "embedding", sparse, 2),
        )
        source = Tracking(original.model, [original.optimizer, original.dense], settings=SETTINGS)
        target = Tracking(resumed.model, [resumed.optimizer, resumed.dense], settings=SETTINGS)
        for _ in range(4):
            original.train()
        source.refresh()
        assert transfer(source, target) == []
        found, wanted = state_of(resumed), state_of(original)
        assert differing(bits("", found), bits("", wanted)) == []
        for key, value in wanted.items():
            if isinstance(value, Tensor) and not value.is_sparse:
                assert value.data_ptr() != found[key].data_ptr()
        resumed.rng.set_state(original.rng.get_state())
        for _ in range(5):
            original.train()
            resumed.train()
    assert torch.equal(original.weight, resumed.weight)


def test_param_groups_are_restored_in_place():
    """The groups include tensor learning rates that a scheduler holds, and are matched by their parameters."""

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
    """load_state_dict would cast row state to bfloat16; a restore does not."""
    model = nn.Embedding(16, 4, dtype=torch.bfloat16, sparse=True)
    other = nn.Embedding(16, 4, dtype=torch.bfloat16, sparse=True)
    from deltashard.optim import RowWiseAdagrad

    source = Tracking(model, RowWiseAdagrad(model.parameters()))
    owner = RowWiseAdagrad(other.parameters())
    source.tables[0].state_tensors()["sum"].fill_(1 + 2**-20)
    transfer(source, Tracking(other, owner))
    assert owner.state[other.weight]["sum"].dtype == torch.float32
    assert (owner.state[other.weight]["sum"] == 1 + 2**-20).all()


def test_parameters_outside_the_model_are_saved_with_their_optimizer():
    def build(value):
        model, extra = nn.Embedding(8, 2), nn.Parameter(torch.full((1,), value))
        return model, extra, Tracking(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))

    _, _, source = build(3.0)
    _, extra, target = build(1.0)
    target.optimizers[0].restore(detached(source.optimizers[0].capture()))
    assert extra.item() == 3.0


def test_state_without_an_owner_is_refused():
    from deltashard_checkpoint.format.schema import FieldSpec

    table = Tracking(nn.Embedding(8, 2)).tables[0]
    with pytest.raises(UserError, match="no optimizer"):
        table.allocate_state(FieldSpec(name="sum", kind="rowwise", dtype="float32"))


class UserAdagrad(torch.optim.Optimizer):
    """A user's row-wise Adagrad. Rows without a gradient do not change; subclasses choose when its state is made."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def make_state(self, p):
        self.state[p]["sum"] = torch.full((p.shape[0],), 0.25)

    def needs_state(self, p):
        return "sum" not in self.state[p]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            if self.needs_state(p):
                self.make_state(p)
            grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            self.state[p]["sum"] += grad.square().mean(1)
            p.sub_(self.rate(p) * grad / self.state[p]["sum"].sqrt().unsqueeze(1))

    def rate(self, p):
        return 0.1


class FlaggedAdagrad(UserAdagrad):
    """An Adagrad with a plain attribute that records whether its state exists."""

    initialized = False

    def needs_state(self, p):
        first, self.initialized = not self.initialized, True
        return first


class KeyedAdagrad(UserAdagrad):
    """An Adagrad with state, and references to it, in its own dictionaries and lists."""

    def __init__(self, params):
        super().__init__(params)
        self.seen = {}
        self.sums = []

    def needs_state(self, p):
        return p not in self.seen

    def make_state(self, p):
        super().make_state(p)
        self.seen[p] = {"scale": torch.ones(()), "sum": self.state[p]["sum"]}
        self.sums = [self.state[p]["sum"]]

    def rate(self, p):
        self.seen[p]["scale"] *= 0.5
        self.sums[0] += 0.125
        self.seen[p]["sum"] += 0.125
        return self.seen[p]["scale"]


class RandomOptimizer(UserAdagrad):
    """An Adagrad with its own generator, as for stochastic rounding."""

    def __init__(self, params):
        super().__init__(params)
        self.rng = torch.Generator().manual_seed(5)

    def rate(self, p):
        return torch.rand((), generator=self.rng)


class ExtraStateOptimizer(UserAdagrad):
    """An optimizer with further entries in its state_dict, held where deltashard does not search attributes."""

    __slots__ = ("hidden",)

    def __init__(self, params):
        super().__init__(params)
        self.hidden = 0

    def rate(self, p):
        self.hidden += 1
        return 0.1 / self.hidden

    def state_dict(self):
        return {**super().state_dict(), "hidden": self.hidden}

    def load_state_dict(self, state_dict):
        self.hidden = state_dict["hidden"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "hidden"})


class PlainObject:
    """An object that the tree codec cannot hold."""

    made = False


class ReinitializingOptimizer(UserAdagrad):
    """An Adagrad that makes its state at its first step, even if state exists. It has no flag that could be saved."""

    in_place = False

    def __init__(self, params):
        super().__init__(params)
        self.box = PlainObject()

    def needs_state(self, p):
        first, self.box.made = not self.box.made, True
        return first

    def make_state(self, p):
        if self.in_place and "sum" in self.state[p]:
            self.state[p]["sum"].fill_(0.25)
        else:
            super().make_state(p)


class InPlaceReinitializingOptimizer(ReinitializingOptimizer):
    """A variant that initializes its state in the restored memory."""

    in_place = True


def build_tracked(kind, sparse=True):
    torch.manual_seed(3)
    model = nn.Embedding(40, 4, sparse=sparse)
    optimizer = kind(list(model.parameters()))
    return model, optimizer, Tracking(model, optimizer, settings=SETTINGS)


def train_step(model, optimizer, ids):
    optimizer.zero_grad()
    with quiet():
        model(ids).square().sum().backward()
        optimizer.step()


def watch_first_step_reports(tracking):
    """Watch the first step of the optimizers and return the list of its reports."""
    reports = []
    tracking.report = lambda name, facts: reports.append((name, dict(facts)))
    tracking.watch_first_step()
    return reports


@pytest.mark.parametrize(
    "kind", [FlaggedAdagrad, KeyedAdagrad, RandomOptimizer, ExtraStateOptimizer], ids=lambda k: k.__name__
)
def test_extra_optimizer_attributes_are_restored(kind, caplog):
    model, optimizer, source = build_tracked(kind)
    for i in range(4):
        train_step(model, optimizer, torch.arange(10 * i, 10 * i + 10))
    source.refresh()
    other_model, other, target = build_tracked(kind)
    groups, state = other.param_groups, other.state
    assert transfer(source, target) == []
    target.watch_first_step()
    assert other.param_groups is groups
    assert other.state is state
    for i in range(3):
        train_step(model, optimizer, torch.tensor([i, 20]))
        train_step(other_model, other, torch.tensor([i, 20]))
    assert torch.equal(model.weight, other_model.weight)
    assert torch.equal(optimizer.state[model.weight]["sum"], other.state[other_model.weight]["sum"])
    assert "initialises it at its first step" not in caplog.text
    # Restored attributes also count as changed: the next checkpoint holds them.
    assert source.optimizers[0].capture().keys() == target.optimizers[0].capture().keys()


def test_unchanged_attributes_are_not_restored():
    class Tuned(UserAdagrad):
        def __init__(self, params, gain=1.0):
            super().__init__(params)
            self.gain = gain
            self.calls = 0

        def rate(self, p):
            self.calls += 1
            return self.gain

    model, optimizer, source = build_tracked(Tuned)
    train_step(model, optimizer, torch.arange(4))
    _, other, target = build_tracked(lambda ps: Tuned(ps, gain=2.0))
    assert transfer(source, target) == []
    assert (other.gain, other.calls) == (2.0, 1)
    assert "beside" not in build_tracked(torch.optim.Adagrad)[2].optimizers[0].capture()


def test_unsupported_optimizer_attributes_are_reported():
    """Objects are listed and not pickled. An unsupported entry of a state_dict is refused."""
    _, _, tracking = build_tracked(ReinitializingOptimizer)
    assert tracking.optimizers[0].unsaved == ["ReinitializingOptimizer.box"]

    class Wrong(UserAdagrad):
        def state_dict(self):
            return {**super().state_dict(), "box": PlainObject()}

    _, _, tracking = build_tracked(Wrong)
    with pytest.raises(UserError, match=r"entry 'box' of Wrong"):
        tracking.optimizers[0].capture()


def test_a_wrapper_around_an_optimizer_keeps_its_own_counter():
    """The wrapper has its own state, shares the inner optimizer's state, or has none."""

    class StepCounter:
        def __init__(self, inner, *, share):
            self.inner, self.count = inner, 0
            if share:
                self.state, self.param_groups = inner.state, inner.param_groups

        def step(self):
            self.count += 1
            self.inner.step()

    for share in (True, False):
        kind = lambda ps, share=share: StepCounter(torch.optim.SGD(ps, lr=0.1), share=share)  # noqa: E731
        _, optimizer, source = build_tracked(kind)
        optimizer.count = 7
        _, other, target = build_tracked(kind)
        assert transfer(source, target) == []
        assert other.count == 7


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        ReinitializingOptimizer,
        InPlaceReinitializingOptimizer,
        FlaggedAdagrad,
        torch.optim.Adam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
    ids=lambda k: k.__name__,
)
def test_discarded_restored_state_is_reported(kind, sparse, caplog):
    """An optimizer that makes its state again at the first step is reported; one that decays or keeps it is not."""
    if sparse and kind in (torch.optim.Adam, torch.optim.RMSprop):
        pytest.skip("this optimizer takes no such gradients")
    model, optimizer, source = build_tracked(kind, sparse)
    train_step(model, optimizer, torch.arange(30))
    source.refresh()
    other_model, other, target = build_tracked(kind, sparse)
    transfer(source, target)
    reports = watch_first_step_reports(target)
    with caplog.at_level(logging.WARNING, "deltashard.tracking"):
        train_step(model, optimizer, torch.tensor([1, 2]))
        train_step(other_model, other, torch.tensor([1, 2]))
        train_step(other_model, other, torch.tensor([1, 2]))
    discards = issubclass(kind, ReinitializingOptimizer)
    assert caplog.text.count("initialises it at its first step") == (1 if discards else 0)
    assert reports == ([("optimizer_state_reset", {"table": "weight", "field": "sum"})] if discards else [])


@pytest.mark.parametrize("discards", [False, True])
def test_state_equal_to_the_last_gradient_is_not_discarded(discards):
    """Adam with beta1 = 0 has zeros on rows that had no gradient. Only a few rows of a large table are trained."""
    torch.manual_seed(0)
    model = nn.Embedding(65_536, 2)
    params = list(model.parameters())
    optimizer = (
        ReinitializingOptimizer(params) if discards else torch.optim.Adam(params, lr=0.01, betas=(0.0, 0.999))
    )
    train_step(model, optimizer, torch.arange(9, 90, 2))  # a coarse check of each 8th row finds none
    tracking = Tracking(model, [optimizer])
    reports = watch_first_step_reports(tracking)
    if discards:
        optimizer.box.made = False
    train_step(model, optimizer, torch.arange(200, 300))
    tracking.close()
    assert bool(reports) == discards


def test_kernel_updated_parameters_are_not_optimizer_state():
    """TorchRec's scripts give an optimizer all parameters. Of a shard, nothing is stored until it is stepped."""
    dense, shard = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))
    optimizer = torch.optim.Adam([dense, shard])
    (view,) = views_of([optimizer], {dense: "top"}, (), {shard})
    tree = view.capture()
    assert (tree["groups"][0]["params"], tree["orphans"]) == (["top"], {})
    other = torch.optim.Adam([dense, nn.Parameter(torch.ones(1, 2))])  # a shard of another rank
    (view,) = views_of([other], {dense: "top"}, (), {other.param_groups[0]["params"][1]})
    assert view.restore(detached(tree)) == []
    shard.grad = torch.ones(4, 2)
    optimizer.step()
    (view,) = views_of([optimizer], {dense: "top"}, (), {shard})
    with pytest.raises(StateError, match="sharded table, which its kernel already updates"):
        view.capture()
