"""Optimizers, tables and training events that the tracking tests combine at random."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deltashard.optim import RowWiseAdagrad
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

ROWS, COLUMNS = 120, 6
LR = 0.05


class Lazy(torch.optim.Optimizer):
    """A user's own class: state appears at the first step, and a moving average changes rows without gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["calls"] = 0
                    state["seen"] = torch.zeros(p.shape[0], 1) if p.dim() == 2 else torch.zeros(p.shape[0])
                    state["mean"] = torch.zeros_like(p)
                state["calls"] += 1
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                state["mean"].mul_(0.5).add_(grad)
                state["seen"] += (grad != 0).any(1, keepdim=True) if p.dim() == 2 else grad != 0
                p.sub_(state["mean"], alpha=group["lr"])


class LookaheadWrapper:
    """A wrapper that is not a torch optimizer; every second step it pulls the weights half way to its slow copies."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.param_groups = base.param_groups
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self.count = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.base.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.count % 2 == 0:
                    slow.lerp_(p.data, 0.5)
                    p.data.copy_(slow)


class WrappedLookahead(torch.optim.Optimizer):
    """A torch optimizer that wraps another one and writes through `.data`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._inner = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._inner.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow_buffer", p.detach().clone())
                slow.lerp_(p.data, 0.5)
                p.data.copy_(slow)


# name -> (factory, takes sparse gradients, takes dense ones)
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], bool, bool]] = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=LR), True, True),
    "sgd_foreach_off": (lambda ps: torch.optim.SGD(ps, lr=LR, foreach=False), True, True),
    "sgd_fused": (lambda ps: torch.optim.SGD(ps, lr=LR, fused=True), False, True),
    "sgd_momentum": (lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9), True, True),
    "sgd_decay": (lambda ps: torch.optim.SGD(ps, lr=LR, weight_decay=0.01), False, True),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=LR), True, True),
    "adagrad_lr_decay": (lambda ps: torch.optim.Adagrad(ps, lr=LR, lr_decay=0.1), True, True),
    "adam": (lambda ps: torch.optim.Adam(ps, lr=LR), False, True),
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=LR), False, True),
    "sparse_adam": (lambda ps: torch.optim.SparseAdam(ps, lr=LR), True, False),
    "rmsprop": (lambda ps: torch.optim.RMSprop(ps, lr=LR), False, True),
    "rowwise_adagrad": (lambda ps: RowWiseAdagrad(ps, lr=LR), True, True),
    "adafactor": (lambda ps: torch.optim.Adafactor(ps, lr=LR), False, True),
    "lazy": (Lazy, True, True),
    "lookahead": (lambda ps: LookaheadWrapper(torch.optim.SGD(ps, lr=LR)), True, True),
    "lookahead_wrapped": (lambda ps: WrappedLookahead(torch.optim.Adagrad(ps, lr=LR)), True, True),
}
EXACT = {"sgd", "sgd_foreach_off", "adagrad", "adagrad_lr_decay", "sparse_adam", "rowwise_adagrad"}
"""With sparse gradients."""

TABLES = ("embedding", "padded", "bag_sum", "bag_mean", "bag_max", "bag_weighted", "bag_offsets", "max_norm")
CASES = [
    (name, kind, sparse)
    for name, (_, takes_sparse, takes_dense) in OPTIMIZERS.items()
    for kind in TABLES
    for sparse in (False, True)
    # Bags of mode max, and renormalised tables, have no sparse gradients in torch.
    if (takes_sparse and kind not in ("bag_max", "max_norm") if sparse else takes_dense)
]
"""(optimizer, kind of table, whether its gradients are sparse) that go together."""


def make_table(kind: str, sparse: bool) -> nn.Module:
    if kind == "embedding":
        return nn.Embedding(ROWS, COLUMNS, sparse=sparse)
    if kind == "padded":
        return nn.Embedding(ROWS, COLUMNS, padding_idx=3, sparse=sparse)
    if kind == "max_norm":
        return nn.Embedding(ROWS, COLUMNS, max_norm=1.0, sparse=sparse)
    mode = {"bag_mean": "mean", "bag_max": "max"}.get(kind, "sum")
    return nn.EmbeddingBag(
        ROWS, COLUMNS, mode=mode, sparse=sparse, padding_idx=3 if kind == "bag_offsets" else None
    )


class TableTraining:
    """One table under one optimizer, and the events that may affect it; on torch's default device."""

    def __init__(self, optimizer: str, kind: str, sparse: bool, seed: int) -> None:
        device = torch.get_default_device()
        self.rng = torch.Generator(device).manual_seed(seed)
        torch.manual_seed(seed)
        self.kind = kind
        self.model = nn.ModuleDict({"table": make_table(kind, sparse), "dense": nn.Linear(COLUMNS, 1)})
        factory = OPTIMIZERS[optimizer][0]
        self.optimizer = factory([self.model["table"].weight])
        self.dense = torch.optim.SGD(self.model["dense"].parameters(), lr=LR)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        self.cleared = True

    @property
    def weight(self) -> nn.Parameter:
        return self.model["table"].weight

    def ids(self, n: int = 6) -> Tensor:
        return torch.randint(ROWS, (n,), generator=self.rng)

    def look_up(self, ids: Tensor) -> Tensor:
        table = self.model["table"]
        if not self.kind.startswith("bag"):
            return table(ids)
        if self.kind == "bag_offsets":
            return table(ids, torch.tensor([0, 2, 2, 5]))
        if self.kind == "bag_weighted":
            weights = torch.rand(ids.numel(), generator=self.rng)
            return table(ids.view(-1, 2), per_sample_weights=weights.view(-1, 2))
        return table(input=ids.view(-1, 2))

    def loss(self) -> Tensor:
        return self.model["dense"](self.look_up(self.ids())).square().mean()

    def snapshot(self) -> dict[str, Tensor]:
        """Return the weights and all optimizer state with rows, found independently of deltashard."""
        found = {"weight": self.weight.detach().clone()}
        seen = []
        for owner in (
            self.optimizer,
            getattr(self.optimizer, "base", None),
            getattr(self.optimizer, "_inner", None),
        ):
            if owner is None or any(owner.state is s for s in seen):
                continue
            seen.append(owner.state)
            for key, value in owner.state.get(self.weight, {}).items():
                if (
                    isinstance(value, Tensor)
                    and not value.is_sparse
                    and value.dim()
                    and value.shape[0] == ROWS
                ):
                    found[f"{type(owner).__name__}.{key}"] = value.detach().clone()
        return found

    # Events

    def train(self, *losses: Tensor, clear: bool = True) -> None:
        if clear:
            self.optimizer.zero_grad()
            self.dense.zero_grad()
        sum(losses or (self.loss(),)).backward()
        self.optimizer.step()
        self.dense.step()

    def train_functional(self) -> None:
        extra = functional.embedding(
            self.ids(), self.weight, sparse=getattr(self.model["table"], "sparse", False)
        )
        self.train(self.loss(), extra.square().sum())

    def train_only_functional(self) -> None:
        self.train(
            functional.embedding(self.ids(), self.weight, sparse=self.model["table"].sparse).square().sum()
        )

    def train_tied(self) -> None:
        """Use the whole table as the output layer: every row gets a gradient."""
        if self.model["table"].sparse:
            return
        self.train(functional.linear(self.look_up(self.ids())[:1], self.weight).square().sum())

    def accumulate(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def accumulate_and_step(self) -> None:
        self.loss().backward()
        self.optimizer.step()

    def step_again(self) -> None:
        """Step without zeroing: the existing gradient is applied once more."""
        if self.weight.grad is not None:
            self.optimizer.step()

    def forward_early(self) -> None:
        """Do a lookup before another step and its backward pass after it (as a pipeline does)."""
        early = self.look_up(self.ids()).sum()
        self.train()
        with warnings.catch_warnings():
            self.optimizer.zero_grad()
            try:
                early.backward()
            except RuntimeError:  # some lookups need the weights of their forward pass
                return
            self.optimizer.step()

    def closure(self) -> None:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.optimizer.step(evaluate)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.look_up(self.ids(20))
        self.model.train()

    def evaluate_with_graph(self) -> None:
        self.model.eval()
        self.look_up(self.ids(20))
        self.model.train()

    def scaled(self, skip: bool = False) -> None:
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            return
        self.optimizer.zero_grad()
        loss = self.loss() * (float("inf") if skip else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scaled_skip(self) -> None:
        self.scaled(skip=True)

    def edit_gradient(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        if not self.weight.grad.is_sparse:
            self.weight.grad[self.ids()] += 0.5
        self.optimizer.step()

    def own_gradient(self) -> None:
        if self.model["table"].sparse:
            return
        self.optimizer.zero_grad()
        (grad,) = torch.autograd.grad(self.loss(), [self.weight])
        grad[self.ids()] += 1.0
        self.weight.grad = grad
        self.optimizer.step()

    def zero_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        if self.weight.grad is not None and self.weight.grad.is_sparse:
            self.weight.grad = None
        self.train(clear=False)

    def _inner(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "base", self.optimizer)

    def hook_that_zeroes(self) -> None:
        """Install a user's step hook that drops the gradient before other hooks can read it, from now on."""
        self._inner().register_step_post_hook(lambda optimizer, _args, _kwargs: optimizer.zero_grad())
        self.train()

    def hook_that_writes(self) -> None:
        """Install hooks that write rows after the step, and before it."""

        def write(*_: Any) -> None:
            with torch.no_grad():
                self.weight[self.ids()] += 1.0

        after = self._inner().register_step_post_hook(write)
        self.train()
        after.remove()
        before = self._inner().register_step_pre_hook(write)
        self.train()
        before.remove()

    def global_hook(self) -> None:
        """Install the same hook for all optimizers of the process."""

        def write(*_: Any) -> None:
            with torch.no_grad():
                self.weight[self.ids()] += 1.0

        hook = register_optimizer_step_post_hook(write)
        self.train()
        hook.remove()

    def replace_module(self) -> None:
        """Replace the table's module, and the old weight in the optimizer by the new one."""
        sparse = getattr(self.model["table"], "sparse", False)
        self.model["table"] = make_table(self.kind, sparse)
        for group in self._inner().param_groups:
            group["params"][:] = [self.weight]
        if isinstance(
            self._inner(), torch.optim.Adagrad
        ):  # before torch 2.12 only its constructor makes state
            self._inner().state[self.weight] = torch.optim.Adagrad([self.weight]).state[self.weight]

    def move_into_shared_memory(self) -> None:
        """Make the weight a view of memory that another owner holds, too."""
        larger = torch.zeros(2 * ROWS, COLUMNS)
        larger[:ROWS] = self.weight.data
        self.weight.data = larger[:ROWS]

    def momentum_on(self) -> None:
        for group in self.optimizer.param_groups:
            if "nesterov" in group and not group["fused"]:  # SGD; RMSprop itself cannot switch it on
                group["momentum"] = 0.9
        self.train()
        self.train()

    def decay_on(self) -> None:
        if self.model["table"].sparse:
            return
        for group in self.optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.1
        self.train()

    def write(self) -> None:
        with torch.no_grad():
            self.weight[self.ids()] += 1.0

    def write_between(self) -> None:
        """Write between the backward pass and the step, where the next hook could attribute it to the optimizer."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.write()
        self.optimizer.step()

    def write_data(self) -> None:
        self.weight.data[self.ids()] = 0.125

    def rebind_data(self) -> None:
        self.weight.data = self.weight.data.clone().mul_(1.5)

    def write_state(self) -> None:
        for value in self.optimizer.state.get(self.weight, {}).values():
            if isinstance(value, Tensor) and not value.is_sparse and value.dim() and len(value) == ROWS:
                value[self.ids()] += 1.0

    def reload_optimizer(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer) and not isinstance(
            self.optimizer, WrappedLookahead
        ):
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            self.write_state()

    def renormalise(self) -> None:
        """Let max_norm of a functional lookup write weights in a forward pass."""
        with torch.no_grad():
            functional.embedding(self.ids(), self.weight, max_norm=0.5)


EVENTS = [
    *sorted(
        name
        for name, value in vars(TableTraining).items()
        if callable(value)
        and not name.startswith("_")
        and name not in ("ids", "look_up", "loss", "snapshot", "scaled")
    ),
    "scaled",
]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings of sparse invariants (once per process) and of the order of schedulers: not under test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# Trackers alone: the audit must not compensate for them.
PLAIN = TrackingSettings(hash_below_bytes=0, audit_rows=0)


def changed_rows(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[int]:
    """Return rows whose bits differ; every row when a field was added or removed."""
    if before.keys() != after.keys():
        return set(range(ROWS))
    rows: set[int] = set()
    for name, old in before.items():
        a, b = (x.reshape(ROWS, -1).contiguous().view(torch.uint8) for x in (old, after[name]))
        rows.update((a != b).any(1).nonzero().view(-1).tolist())
    return rows


class SelectionChecker:
    """Takes snapshots that commit at once, and compares each selection with the actual changes."""

    def __init__(self, training: TableTraining, tracking: Tracking) -> None:
        self.training, self.tracking = training, tracking
        self.table = tracking.by_key["table.weight"]
        self.snapshot_id = 0
        self.rows = self.changed = self.selected = 0
        self.take("all")

    def take(self, mode: str = "since_commit") -> set[int]:
        self.snapshot_id += 1
        self.tracking.audit_before_commit()
        self.tracking.refresh()
        selection = self.table.select_rows(mode)
        rows = set(range(ROWS)) if selection.all else set(selection.ids.tolist())
        now = self.training.snapshot()
        if mode != "all":
            expected = changed_rows(self.before, now)
            assert rows >= expected, (
                f"missed {sorted(expected - rows)} under {self.table.tracker}: {self.table.reason}"
            )
            self.rows += ROWS
            self.changed += len(expected)
            self.selected += len(rows)
        self.before = now
        self.tracking.snapshot_taken(self.snapshot_id, mode)
        self.tracking.committed(self.snapshot_id, baseline=mode == "all")
        self.tracking.audit_sample()
        return rows


def begin(
    optimizer: str, kind: str, sparse: bool, seed: int = 0, how=PLAIN
) -> tuple[TableTraining, SelectionChecker]:
    training = TableTraining(optimizer, kind, sparse, seed)
    tracking = Tracking(training.model, [training.optimizer, training.dense], settings=how)
    return training, SelectionChecker(training, tracking)
