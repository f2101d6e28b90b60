"""Programs whose changes tracking could miss: at every snapshot, an unselected row is unchanged bit for bit."""

from __future__ import annotations

from functools import partial, partialmethod
from unittest import mock

import pytest
import torch
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import Tensor, nn

from tests.support.trainer.tracking_case import COLUMNS, LR, PLAIN, ROWS, changed_rows, quiet

sgd, adagrad = torch.optim.SGD, torch.optim.Adagrad
Table = partial(nn.Embedding, sparse=True)


def lookup(module, *rows):
    return module(torch.tensor(rows)).sum()


class AuditlessProgram:
    """Tables without audits. Each snapshot commits at once, and fails if an unselected row has changed."""

    def __init__(self, optimize=adagrad, later=lambda _self: None, settings=PLAIN, **kinds):
        torch.manual_seed(0)
        kinds = kinds or {"e": Table}
        self.model = nn.ModuleDict({name: kind(ROWS, COLUMNS) for name, kind in kinds.items()})
        vars(self).update(self.model.items())
        made = optimize([each.weight for each in self.model.values()])
        self.optimizers = made if isinstance(made, list) else [made]
        self.settings = settings
        later(self.begin())

    def begin(self):
        """Track the tables and optimizers with a new Tracking."""
        self.tracking, self.number = Tracking(self.model, self.optimizers, settings=self.settings), 0
        self.trackers = {each.fqn.removesuffix(".weight"): each for each in self.tracking.tables}
        self.take_snapshot("all")
        return self

    def fields(self, weight):
        """Return weights and row state of a table, found without deltashard."""
        found = {"weight": weight}
        for nth, optimizer in enumerate(self.optimizers):
            state = optimizer.state.get(weight, {}).items()
            found |= {f"{k}@{nth}": v for k, v in state if isinstance(v, Tensor) and v.shape[:1] == (ROWS,)}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def take_snapshot(self, mode="since_commit"):
        """Take a snapshot and return the selected rows by table."""
        self.number += 1
        self.faults = self.tracking.audit_before_commit()
        self.tracking.refresh()
        now = {name: self.fields(each.weight) for name, each in self.model.items()}
        self.selected = {}
        for name, tracked in self.trackers.items():
            chosen = tracked.select_rows(mode)
            rows = self.selected[name] = set(range(ROWS)) if chosen.all else set(chosen.ids.tolist())
            missed = set() if mode == "all" else changed_rows(self.before[name], now[name]) - rows
            assert not missed, f"missed {sorted(missed)} of {name} under {tracked.tracker}: {tracked.reason}"
        self.before = now
        self.tracking.snapshot_taken(self.number, mode)
        self.tracking.committed(self.number, baseline=mode == "all")
        self.tracking.audit_sample()
        return self.selected

    def flow(self, *losses):
        sum(losses).backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def train_three_steps(self, loss=None, between=lambda: None):
        """Run three steps with a snapshot after each. Step i uses `loss(i)`; `between` runs after its backward pass."""
        tables = [*self.model.values()]
        for i in range(3):
            self.model.zero_grad()
            self.flow(loss(i) if loss else sum(lookup(e, 10 + i + 50 * n, 20) for n, e in enumerate(tables)))
            between()
            self.step()
            self.take_snapshot()

    def expect(self, **hashed):
        """Check that the named tables are on hashes with this reason, and that the others select rows by gradients."""
        for name, tracked in self.trackers.items():
            if name in hashed:
                assert tracked.tracker == "hashes"
                assert hashed[name] in tracked.reason
            else:
                assert tracked.tracker == "gradients", tracked.reason
                assert len(self.selected[name]) < ROWS


def prepared(how):
    """Return a table to which `how` was applied."""
    return lambda *shape: (made := Table(*shape), how(made))[0]


def zero_eps_adagrad(weights):
    optimizer = adagrad(weights, eps=0.0, initial_accumulator_value=0.1)
    optimizer.state[weights[0]]["sum"][50] = 0
    return optimizer


def shared_state_adagrad(weights):
    optimizer = adagrad(weights)
    optimizer.state[weights[1]]["sum"] = optimizer.state[weights[0]]["sum"]
    return optimizer


TWO = {"a": Table, "b": Table}
GROUPS = TWO | {"optimize": lambda weights: adagrad([{"params": [weight]} for weight in weights])}
MOVED = TWO | {"optimize": lambda weights: [sgd(weights[:1], lr=LR), sgd(weights[1:], lr=LR)]}
EACH = TWO | {"optimize": lambda weights: [adagrad([weight]) for weight in weights]}
SUBNORMAL = prepared(lambda e: e.weight.data[50].fill_(1e-40))
MINUS_ZERO = {
    "e": prepared(lambda e: e.weight.data[50].fill_(-0.0)),
    "optimize": sgd,
    "later": lambda p: p.optimizers[0].param_groups[0].update(lr=-LR),
}


class UnseenChangeCase(AuditlessProgram):
    """The cases of the table below that are more than plain training."""

    def probe_backward_before_step(self, *more):
        """Run a probe's backward pass between a backward pass and its step."""

        def probe():
            kept, self.e.weight.grad = self.e.weight.grad, None
            self.flow(lookup(self.e, 101, 102))
            self.e.weight.grad = kept
            for row in more:
                self.flow(lookup(self.e, row))

        self.train_three_steps(between=probe)

    probe_and_lookup_before_step = partialmethod(probe_backward_before_step, 51)

    def gradients_applied_one_step_late(self):
        """Apply gradients one step late, after a snapshot."""
        pending = [None]

        def swap():
            pending.append(self.e.weight.grad)
            self.e.weight.grad = pending.pop(0)

        self.train_three_steps(between=swap)

    def accumulated_over_snapshots(self):
        self.flow(lookup(self.e, 1, 2))
        self.take_snapshot()
        for _ in range(2):
            self.step()
            assert self.take_snapshot() == {"e": {1, 2}}
        self.flow(lookup(self.e, 7))
        self.take_snapshot()
        self.step()
        assert self.take_snapshot() == {"e": {1, 2, 7}}

    def shared_gradient_tensor(self):
        self.train_three_steps(
            lambda i: lookup(self.a, i), lambda: setattr(self.b.weight, "grad", self.a.weight.grad)
        )

    def gradients_swapped_between_tables(self):
        def swap():
            self.a.weight.grad, self.b.weight.grad = self.b.weight.grad, self.a.weight.grad

        self.train_three_steps(lambda i: lookup(self.a, i) + lookup(self.b, 100 + i), swap)

    def gradients_made_on_a_replica(self):
        """Make the gradients on a tracked replica, which then receives the weights."""

        def give():
            self.b.weight.data = self.a.weight.data.clone()
            self.a.weight.grad, self.b.weight.grad = self.b.weight.grad, None

        self.train_three_steps(lambda i: lookup(self.b, 20 + i), give)

    def step_fails_after_one_group(self):
        """Fail a step after one group, which has a gradient from before a snapshot. The program continues."""
        self.flow(lookup(self.a, 50), lookup(self.b, 50))
        self.take_snapshot()
        state = self.optimizers[0].state[self.b.weight]
        kept = state.pop("sum")
        with pytest.raises(KeyError):
            self.step()
        state["sum"] = kept
        self.train_three_steps()

    def step_pre_hooks_removed(self):
        """Remove all hooks that run before steps, and clear the gradient in a hook that runs after them."""
        self.train_three_steps()
        optimizer = self.optimizers[0]
        before, ours = optimizer._optimizer_step_pre_hooks, dict(optimizer._optimizer_step_pre_hooks)
        before.clear()
        dropping = optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
        optimizer._optimizer_step_post_hooks.move_to_end(dropping.id, last=False)
        self.train_three_steps(lambda i: lookup(self.e, 50 + i))
        assert self.selected == {"e": set(range(ROWS))}
        dropping.remove()
        before.update(ours)
        self.train_three_steps()

    def moved_to_another_optimizer(self, at=1, back=()):
        """Move a table, with a gradient from before a snapshot, to another optimizer. The first one steps no more."""
        self.flow(lookup(self.a, 50), lookup(self.b, 50))
        self.take_snapshot()
        first, other = (each.param_groups[0]["params"] for each in self.optimizers)
        other.insert(at, first.pop())
        self.optimizers[1].step()
        first.extend(other.pop(at) for _ in back)
        self.take_snapshot()
        self.optimizers = self.optimizers[1:]
        self.train_three_steps()

    # At the front: all parameters of all optimizers are the same, in the same order.
    moved_to_the_front = partialmethod(moved_to_another_optimizer, at=0)
    moved_and_back = partialmethod(moved_to_another_optimizer, back=[1])

    def step_replaced_on_the_class(self):
        real = sgd.step

        def step(optimizer, closure=None):
            real(optimizer, closure)
            self.e.weight.data[50] += 1

        with mock.patch.object(sgd, "step", step):
            self.train_three_steps()

    def subnormal_weight(self):
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush subnormals")
        try:
            self.train_three_steps()
        finally:
            torch.set_flush_denormal(False)

    def state_fields_swapped(self):
        """Exchange the names of two fields of the state, and nothing else."""
        self.train_three_steps()
        state = self.optimizers[0].state[self.e.weight]
        step, mean, square = state.values()
        state.clear()
        state.update(step=step, exp_avg_sq=mean, exp_avg=square)
        self.train_three_steps()

    def hogwild_write(self):
        """Writes of another process leave no trace in this one, as `.data` writes do not."""
        self.e.weight.share_memory_()
        self.train_three_steps(between=lambda: self.e.weight.data[50].add_(1))


DENSE = "its gradient is dense"
# Name -> how the program is made, the tables that end on hashes, and what their reason names.
CASES = {
    **dict.fromkeys(
        [
            "probe_backward_before_step",
            "probe_and_lookup_before_step",
            "gradients_applied_one_step_late",
            "accumulated_over_snapshots",
        ],
        ({}, {}),
    ),
    **dict.fromkeys(["moved_to_another_optimizer", "moved_to_the_front", "moved_and_back"], (MOVED, {})),
    "switched_to_dense_gradients": ({"later": lambda p: setattr(p.e, "sparse", False)}, {"e": DENSE}),
    "shared_gradient_tensor": (TWO, {}),
    "gradients_swapped_between_tables": (TWO, {}),
    "gradients_made_on_a_replica": (EACH, {"b": "is written outside of its optimizer"}),
    "step_fails_after_one_group": (GROUPS, {}),
    "step_pre_hooks_removed": ({}, {}),
    "step_replaced_on_the_class": ({"optimize": sgd}, {"e": "replaced on the class"}),
    "subnormal_weight": ({"e": SUBNORMAL, "optimize": sgd}, {}),
    "negative_learning_rate": (MINUS_ZERO, {}),
    "adagrad_with_zero_eps": ({"optimize": zero_eps_adagrad}, {}),
    "float16_weights": ({"e": partial(Table, dtype=torch.float16)}, {}),
    "shared_state": (
        TWO | {"optimize": shared_state_adagrad},
        {"a": "the state of b", "b": "the state of a"},
    ),
    "state_fields_swapped": ({"optimize": torch.optim.SparseAdam}, {}),
    "hogwild_write": ({}, {"e": "shared with other processes"}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_changed_row_is_missed(name):
    """A table changes to hashes only if no other tracking can detect its changes."""
    made, hashed = CASES[name]
    with quiet():
        case = UnseenChangeCase(**made)
        getattr(case, name, case.train_three_steps)()
    case.expect(**hashed)


def test_write_visible_in_versions_is_no_fault():
    """The write marks the table. Only writes without a trace are for the audit."""
    with quiet():
        program = AuditlessProgram(settings=TrackingSettings(hash_below_bytes=0, audit_rows=ROWS))
        program.train_three_steps()
    with torch.no_grad():
        program.e.weight.mul_(0.999)
    assert program.take_snapshot() == {"e": set(range(ROWS))}
    assert not program.faults
    assert program.trackers["e"].tracker == "gradients"
    program.e.weight.data[50] += 1
    program.take_snapshot()
    assert program.faults


@pytest.mark.parametrize("what", ["weight", "state"])
def test_checker_detects_a_missed_write(what):
    program = AuditlessProgram()
    program.train_three_steps()
    written = program.e.weight if what == "weight" else program.optimizers[0].state[program.e.weight]["sum"]
    written.data[5] += 1
    with pytest.raises(AssertionError, match=r"missed \[5\] of e under gradients"):
        program.take_snapshot()
