"""Models that are more than parameters and buffers: a restore returns all of their state, or they are refused."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from deltashard import config
from deltashard.errors import CheckpointMismatch, StateError, UserError
from deltashard.save.step_order import StepOrderCheck
from deltashard.state import contract
from deltashard.state.discovery import Inventory
from deltashard.tracking.step_clock import StepClock
from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import FlatParameter

from tests.support.trainer.blob_program import BlobProgram


class Ema(nn.BatchNorm1d):
    """A batch norm that counts its calls in plain attributes and returns them in its extra state."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls = 0
        self.peak: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.peak = x.detach().max() if self.peak is None else torch.maximum(self.peak, x.detach().max())
        return super().forward(x) * (1 + 1 / self.calls)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "peak": self.peak}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.calls, self.peak = state["calls"], state["peak"]


class Renaming(nn.Module):
    """A module that renames its weight in its state_dict and adds a schedule that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.5
        return x @ self.weight * self.rate

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "kernel"] = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "rate"] = self.rate

    def _load_from_state_dict(self, held: dict[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(held[prefix + "kernel"])
        self.rate = held[prefix + "rate"]


class Dropping(nn.Module):
    """A module that omits a buffer from its state_dict and rebuilds it from the loaded values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("cache", torch.zeros(4))
        self.loads = 0
        self.register_state_dict_post_hook(_drop_cache)
        self.register_load_state_dict_pre_hook(_add_cache)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _drop_cache(module: nn.Module, held: dict[str, Any], prefix: str, _metadata: Any) -> None:
    del held[prefix + "cache"]


def _add_cache(module: Any, held: dict[str, Any], prefix: str, *_: Any) -> None:
    module.loads += 1
    held[prefix + "cache"] = held[prefix + "weight"] * 2


class Rounding(nn.Module):
    """A module that returns its state_dict in half precision: loading it would lose bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self._register_state_dict_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _halve(module: nn.Module, held: dict[str, Any], prefix: str, _metadata: Any) -> None:
    held[prefix + "weight"] = held[prefix + "weight"].half()


class OverriddenStateDict(nn.Module):
    """A model that overrides state_dict itself. No module's own state has the counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen = {"batches": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["batches"] += 1
        return self.inner(x) / self.seen["batches"]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().state_dict(*args, **kwargs) | {"seen": dict(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.seen = dict(state["seen"])
        return super().load_state_dict({k: v for k, v in state.items() if k != "seen"}, *args, **kwargs)


def _everything(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if not name.startswith("_") and name != "training":
                found[f"{path}.{name}"] = value.clone() if isinstance(value, Tensor) else value
    return found


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize(
    "make", [Ema, Renaming, Dropping, Rounding, OverriddenStateDict], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, lambda m: nn.Sequential(nn.Identity(), m)])
def test_resumed_module_equals_the_uninterrupted_one(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """The state is equal bit for bit, including plain attributes that the module's contract names."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()

    def program(seed: int) -> tuple[BlobProgram, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = wrap(make())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return BlobProgram(model, optimizer), optimizer

    first, optimizer = program(0)
    train(first.model, optimizer, range(3))
    raw = first.take_snapshot()
    train(first.model, optimizer, range(3, 6))

    second, optimizer = program(1)
    assert second.restore(raw) == []
    train(second.model, optimizer, range(3, 6))
    mine, others = _everything(first.model), _everything(second.model)
    differ = {name for name in mine if not _equal(mine[name], others[name])}
    # Dropping's contract records that the cache is rebuilt. It was loaded once.
    assert {name.rpartition(".")[2] for name in differ} == ({"cache", "loads"} if make is Dropping else set())


def test_dropped_buffer_is_not_saved_and_rebuilt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "deltashard"):
        first = BlobProgram(Dropping())
    assert "leaves cache out of its state_dict" in caplog.text
    raw = first.take_snapshot()
    assert "dense/cache" not in raw
    second = BlobProgram(Dropping())
    second.restore(raw)
    assert torch.equal(second.model.cache, 2 * first.model.weight)
    # State that an older version saved of the module is ignored.
    second.restore(raw | {"dense/cache": raw["dense/weight"]})


def test_checkpoint_without_module_contracts_is_accepted_with_a_note() -> None:
    raw = BlobProgram(nn.Sequential(nn.BatchNorm1d(4))).take_snapshot()
    older = {name: data for name, data in raw.items() if name != "meta"}
    older["meta"] = memoryview(_tree({"step": 1}))
    (note,) = BlobProgram(nn.Sequential(Ema())).restore(older)
    assert "module 0" in note
    with pytest.raises(CheckpointMismatch, match="what module 0 says"):
        BlobProgram(nn.Sequential(Ema())).restore(raw)


def _tree(value: Any) -> bytes:
    from deltashard.state.value import encode_value

    return encode_value(value).to_bytes()


def _table(rows: int = 4096) -> nn.Sequential:
    return nn.Sequential(OrderedDict(items=nn.Embedding(rows, 8), top=nn.Linear(8, 1)))


def test_a_state_dict_that_copies_a_table_is_refused() -> None:
    model = _table()
    model._register_state_dict_hook(lambda module, held, prefix, _: {k: v.clone() for k, v in held.items()})
    with pytest.raises(StateError, match=r"a copy of a table \(items.weight\)"):
        BlobProgram(model)


def test_whole_model_contract_does_not_copy_tables(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No blob has a copy of a table, and the restore writes none."""
    model = _table()
    model.register_load_state_dict_post_hook(lambda module, keys: None)
    program = BlobProgram(model)
    raw = program.take_snapshot()
    assert sum(map(len, raw.values())) < 100_000
    before = model.items.weight.detach().clone()
    program.restore(raw)
    assert torch.equal(model.items.weight, before)


def test_loading_that_writes_a_table_is_refused() -> None:
    model = _table()
    model.register_load_state_dict_post_hook(lambda module, keys: module.items.weight.data.mul_(2))
    program = BlobProgram(model)
    with pytest.raises(CheckpointMismatch, match="changes rows of a table"):
        program.restore(program.take_snapshot())


@pytest.mark.parametrize("held", ["model", "list", "mapping", "getter"])
def test_model_in_state_is_refused_with_a_remedy(held: str) -> None:
    model = _table()
    value = {
        "model": model,
        "list": [model],
        "mapping": {"weights": model.items.weight.detach()},
        "getter": (model.state_dict, model.load_state_dict),
    }[held]
    with pytest.raises(StateError, match=r"holds table items.weight.*leave it out of state="):
        BlobProgram(model, mine=value)


def test_only_a_large_dense_model_in_state_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3000, 2000), nn.Linear(2000, 1))
    with pytest.raises(StateError, match="written twice at every save"):
        BlobProgram(model, mine=model)
    BlobProgram(model, head=model[1])


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch marks these as beta or deprecated
def test_buffers_that_cannot_be_stored_are_refused_at_construction(
    buffer: Callable[[], Tensor], why: str
) -> None:
    """Buffers that no checkpoint holds are accepted."""
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer())
    with pytest.raises(UserError, match=rf"odd .*{why}.*cannot be saved"):
        config.check_model(model)
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer(), persistent=False)
    config.check_model(model)


def test_sharded_tensors_are_refused_at_construction() -> None:
    """The cases are DTensors of FSDP2 and similar. FSDP1 holds a flat parameter, a different piece on every rank."""

    class ShardedSubclass(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = nn.Linear(2, 2)
    model.register_buffer("part", torch.zeros(2).as_subclass(ShardedSubclass))
    for module, message in (
        ("torch.distributed.tensor", "part is sharded"),
        ("mine", "part is a ShardedSubclass"),
    ):
        ShardedSubclass.__module__ = module
        with pytest.raises(UserError, match=message):
            config.check_model(model)
    flat = nn.Linear(2, 2)
    flat.register_parameter("_flat_param", FlatParameter(torch.zeros(3)))
    with pytest.raises(UserError, match="_flat_param is sharded .a flat parameter of FSDP"):
        config.check_model(flat)


def test_expanded_buffers_are_restored() -> None:
    def build(value: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.full((1, 3), value).expand(4, 3))
        return model

    again = build(2.0)
    BlobProgram(again).restore(BlobProgram(build(1.0)).take_snapshot())
    assert torch.equal(again.mask, torch.ones(4, 3))
    differing = build(1.0)
    differing.mask = torch.arange(12.0).view(4, 3)
    with pytest.raises(CheckpointMismatch, match="share memory"):
        BlobProgram(again).restore(BlobProgram(differing).take_snapshot())


class Observer(nn.Module):
    """A module whose buffers take their shape from the first batch, as in quantisation-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("high", None)

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.detach().amin(0), x.detach().amax(0)
        if self.low.numel() == 0:
            self.low.resize_(low.shape).copy_(low)
        self.low.copy_(torch.minimum(self.low, low))
        self.high = high if self.high is None else torch.maximum(self.high, high)
        return x


def test_buffers_that_grew_in_training_are_restored() -> None:
    model = nn.Sequential(Observer())
    program = BlobProgram(model)
    model(torch.randn(3, 5))
    raw = program.take_snapshot()
    again = nn.Sequential(Observer())
    resumed = BlobProgram(again)
    assert resumed.restore(raw) == []
    assert torch.equal(again[0].low, model[0].low)
    assert torch.equal(again[0].high, model[0].high)
    third = nn.Sequential(Observer())
    BlobProgram(third).restore(resumed.take_snapshot())
    assert torch.equal(third[0].high, model[0].high)
    other = nn.Sequential(Observer())
    other[0].low = torch.zeros(7)
    with pytest.raises(CheckpointMismatch, match=r"0.low is stored as"):
        BlobProgram(other).restore(raw)


def test_cast_after_construction_is_reported_and_saved(caplog: pytest.LogCaptureFixture) -> None:
    model = _table()
    program = BlobProgram(model)
    model.half()
    with caplog.at_level(logging.WARNING, "deltashard"):
        raw = program.take_snapshot()
        program.take_snapshot()
    (warning,) = [
        r.getMessage() for r in caplog.records if "changed after the Checkpointer was built" in r.message
    ]
    assert "items.weight changed from float32 to float16" in warning
    assert program.tracking.tables[0].schema.dtype == "float16"
    again = _table().half()
    BlobProgram(again).restore(raw)
    assert torch.equal(again.top.weight, model.top.weight)
    with pytest.raises(CheckpointMismatch, match="float16"):
        BlobProgram(_table()).restore(raw)


def test_strict_false_restores_what_fits() -> None:
    """Other shapes, missing and unknown names and other state are not changed but reported. The rest is restored."""
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Linear(4, 2)))
    mine = {"x": 1}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = BlobProgram(model, optimizer, mine=mine, tensor=torch.zeros(3), removed={"y": 1})
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    raw = first.take_snapshot()
    again = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Linear(4, 3), c=nn.Linear(3, 1)))
    optimizer = torch.optim.Adam(again.parameters(), lr=0.5)
    restored: dict[str, Any] = {}
    program = BlobProgram(again, optimizer, mine=restored, tensor=torch.zeros(5), new={"z": 1})
    with pytest.raises(CheckpointMismatch):
        program.restore(raw)
    notes = "\n".join(program.restore(raw, strict=False))
    for name in ("b.weight", "c.weight", "state['removed']", "state['new']", "state['tensor']"):
        assert name in notes
    assert torch.equal(again.a.weight, model.a.weight)
    assert restored == mine
    assert optimizer.state[again.a.weight]["step"] == 1
    again(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def test_another_default_device_changes_nothing() -> None:
    """The library's own tensors are on the devices that it chooses, not on the program's default device."""
    model = _table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    extra = torch.eye(3).to_sparse()
    torch.set_default_device("meta")
    try:
        program = BlobProgram(model, optimizer, extra=extra)
        program.tracking.audit_sample()
        raw = program.take_snapshot()
        program.restore(raw)
    finally:
        torch.set_default_device(None)
    assert program.model.top.weight.device.type == "cpu"


def test_wrapper_without_base_init_is_unwrapped_or_refused() -> None:
    class InnerWrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
        state = property(lambda self: self.inner.state)  # type: ignore[assignment]

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    class BaselessOptimizer(torch.optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            self.param_groups, self.state = [{"params": params, "lr": 0.1}], {}

    model = _table()
    program = BlobProgram(model, InnerWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert program.tracking.tables[0].tracker == "hashes"
    assert "optim/0" in program.take_snapshot()
    order = StepOrderCheck(program.tracking, {}, StepClock(program.tracking))
    order.arm()
    order.close()
    with pytest.raises(UserError, match="super"):
        BlobProgram(model, BaselessOptimizer(list(model.parameters())))


def test_sharded_modules_have_no_contract() -> None:
    """Sharded modules declare their tables themselves. A contract of a module around them is refused."""

    class ExtraStateModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def get_extra_state(self) -> int:
            return 1

    sharded = nn.Linear(1, 1)
    sharded._register_state_dict_hook(lambda *_: None)
    inventory = Inventory(sharded=[sharded])
    assert contract.contracts_of(nn.ModuleDict({"it": sharded}), lambda: inventory) == []
    with pytest.raises(
        StateError, match=r"its own get_extra_state and contains sharded tables.*ExtraStateModule"
    ):
        contract.contracts_of(nn.ModuleDict({"it": ExtraStateModule(sharded)}), lambda: inventory)
