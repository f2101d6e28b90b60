"""Programs whose changes a proof could overlook: at every cut, an unselected row is what it was, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from deltashard.tracking.tracking import Tracking, TrackingSettings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.trainer.tracking_case import COLUMNS, LR, PLAIN, ROWS, changed_rows, quiet

NO_LOOKUP = "come from no tracked lookup (functional use"
PARTS = "parts that come from no tracked lookup"
WRITTEN = "written outside of backward"

sgd, adagrad = torch.optim.SGD, torch.optim.Adagrad


def table(**how):
    return nn.Embedding(ROWS, COLUMNS, **how)


def ids(*rows):
    return torch.tensor(rows)


class Program:
    """Tables under optimizers; a cut commits at once, and fails if a row that changed since the last is not selected.

    No audit covers up for the trackers. State is found without deltashard's help.
    """

    def __init__(self, optimize=adagrad, settings=PLAIN, **tables):
        torch.manual_seed(0)
        self.model = nn.ModuleDict(tables or {"e": table()})
        vars(self).update(self.model.items())
        made = optimize([each.weight for each in self.model.values()])
        self.optimizers = made if isinstance(made, list) else [made]
        self.settings, self.number = settings, 0

    def begin(self):
        """Track it from here on; what is prepared before that is how the tracker finds it."""
        self.tracking = Tracking(self.model, self.optimizers, settings=self.settings)
        self.cut("all")
        return self

    @property
    def optimizer(self):
        return self.optimizers[0]

    @property
    def trackers(self):
        return {table.fqn.removesuffix(".weight"): table for table in self.tracking.tables}

    def fields(self, weight):
        """Weights and row state of a table."""
        found = {"weight": weight}
        for nth, optimizer in enumerate(self.optimizers):
            state = optimizer.state.get(weight, {}).items()
            found |= {
                f"{key}@{nth}": v for key, v in state if isinstance(v, Tensor) and v.shape[:1] == (ROWS,)
            }
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def cut(self, mode="since_commit"):
        """The rows that were selected, by table."""
        self.number += 1
        self.faults = self.tracking.audit_before_commit()
        self.tracking.refresh()
        now = {name: self.fields(each.weight) for name, each in self.model.items()}
        self.selected = {}
        for name, tracked in self.trackers.items():
            chosen = tracked.prepare_cut(mode)
            self.selected[name] = set(range(ROWS)) if chosen.all else set(chosen.ids.tolist())
            missed = (
                set() if mode == "all" else changed_rows(self.before[name], now[name]) - self.selected[name]
            )
            assert not missed, f"missed {sorted(missed)} of {name} under {tracked.tracker}: {tracked.reason}"
        self.before = now
        self.tracking.cut_taken(self.number, mode)
        self.tracking.committed(self.number, baseline=mode == "all")
        self.tracking.audit_sample()
        return self.selected

    def flow(self, *losses):
        sum(losses).backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self):
        self.model.zero_grad()

    def train(self, *losses):
        self.zero()
        self.flow(*losses)
        self.step()

    def trains(self, loss):
        """Three steps with a cut after each; `loss(i)` of the i-th."""
        for i in range(3):
            self.train(loss(i))
            self.cut()
        return self

    def expect(self, whole=False, **hashed):
        """Tables named here are on hashes and their reason says so; the others on gradients, which choose rows.

        `whole`: of one of these every row counts as changed at the last cut.
        """
        for name, tracked in self.trackers.items():
            if name in hashed:
                assert tracked.tracker == "hashes"
                assert hashed[name] in tracked.reason
            else:
                assert tracked.tracker == "gradients", tracked.reason
                assert (len(self.selected[name]) == ROWS) == whole


def look(module, *rows):
    return module(ids(*rows)).sum()


def look_past(module, *rows):
    """The same, past the module."""
    return functional.embedding(ids(*rows), module.weight).sum()


CASES = {}


def case(**expected):
    """Add a program to the table of cases, with what `Program.expect` is to find at its end."""

    def add(program):
        CASES[program.__name__] = (program, expected)
        return program

    return add


# -- what a module looks up is not what it was called with


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 1)


class Positions(nn.Embedding):
    """As BART's: called with tokens, it looks up where they stand."""

    def forward(self, tokens):
        return super().forward(torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1) + 2)


class Indexed(nn.Embedding):
    def forward(self, ids):
        return self.weight[ids + 1]


@case()
def remap():
    p = Program(e=Shifted(ROWS, COLUMNS)).begin()
    return p.trains(lambda i: look(p.e, 10 + i, 20, 30))


@case()
def bart():
    p = Program(sgd, e=Positions(ROWS, COLUMNS)).begin()
    return p.trains(lambda i: p.e(torch.randint(50, ROWS, (4, 16))).sum())


@case(e=NO_LOOKUP)
def index_module():
    p = Program(e=Indexed(ROWS, COLUMNS)).begin()
    return p.trains(lambda i: look(p.e, 10 + i))


@case()
def patched_forward():
    p = Program()
    p.e.forward = lambda ids: functional.embedding((ids * 7 + 3) % ROWS, p.e.weight)
    return p.begin().trains(lambda i: look(p.e, 10 + i))


@case()
def fwd_hook_after():
    p = Program()
    p.e.register_forward_hook(lambda module, args, _output: functional.embedding(args[0] + 1, module.weight))
    return p.begin().trains(lambda i: look(p.e, 10 + i))


@case(e=NO_LOOKUP)
def fwd_hook_later():
    p = Program().begin()
    p.e.register_forward_hook(lambda module, args, _output: functional.embedding(args[0] + 1, module.weight))
    return p.trains(lambda i: look(p.e, 10 + i))


def refilled(batch):
    """`batch` picks the ids of a buffer that is refilled between the forward and the backward pass."""
    p = Program(e=nn.EmbeddingBag(ROWS, COLUMNS, mode="sum")).begin()
    buffer = torch.zeros(4, 3, dtype=torch.int64)
    for i in range(3):
        buffer.copy_(torch.arange(12).view(4, 3) + 20 * i)
        p.zero()
        loss = batch(p, buffer).sum()
        buffer.fill_(0)
        loss.backward()
        p.step()
        p.cut()
    return p


@case()
def refill():
    return refilled(lambda p, buffer: p.e(buffer[:, 1:2]))


def checkpointed(module, rows):
    return checkpoint(module, rows, use_reentrant=False)


@case()
def checkpointed_plain():
    p = Program().begin()
    return p.trains(lambda i: checkpointed(p.e, ids(10 + i, 20)).sum())


@case(e=NO_LOOKUP)
def checkpointed_shifted():
    p = Program(e=Shifted(ROWS, COLUMNS)).begin()
    return p.trains(lambda i: checkpointed(p.e, ids(10 + i, 20)).sum())


@case(e="the ids of a lookup were written")
def checkpointed_refill():
    return refilled(lambda p, buffer: checkpointed(p.e, buffer))


# -- the gradient that is applied is another one than the last that flowed


@case()
def stash():
    """A probe's backward pass comes in between."""
    p = Program().begin()
    for i in range(3):
        p.zero()
        p.flow(look(p.e, 1 + i, 2 + i))
        kept, p.e.weight.grad = p.e.weight.grad, None
        p.flow(look(p.e, 101, 102))
        p.e.weight.grad = kept
        p.step()
        p.cut()
    return p


@case()
def late_opt_two_passes():
    """The same, and autograd adds to what was put back."""
    p = Program().begin()
    for i in range(3):
        p.zero()
        p.flow(look(p.e, 1 + i))
        kept, p.e.weight.grad = p.e.weight.grad, None
        p.flow(look(p.e, 101))
        p.e.weight.grad = kept
        p.flow(look(p.e, 51 + i))
        p.step()
        p.cut()
    return p


@case()
def late():
    """Gradients are applied one step late, over a cut."""
    p, pending = Program().begin(), None
    for i in range(4):
        p.zero()
        p.flow(look(p.e, 10 * i, 10 * i + 1))
        pending, p.e.weight.grad = p.e.weight.grad, pending
        p.step()
        p.cut()
    return p


@case()
def accumulated_over_cuts():
    """A gradient from before a cut is applied after it, again after the next, and once more with another pass."""
    p = Program().begin()
    p.flow(look(p.e, 1, 2))
    p.cut()
    for _ in range(2):
        p.step()
        assert p.cut() == {"e": {1, 2}}
    p.flow(look(p.e, 7))
    p.step()
    assert p.cut() == {"e": {1, 2, 7}}
    p.flow(look(p.e, 9))
    p.cut()
    p.step()
    assert p.cut() == {"e": {1, 2, 7, 9}}
    p.train(look(p.e, 5))
    assert p.cut() == {"e": {5}}
    return p


@case(b=WRITTEN)
def tiedgrad():
    p = Program(a=table(), b=table()).begin()
    for i in range(3):
        p.zero()
        p.flow(look(p.a, 1 + i, 2 + i))
        p.b.weight.grad = p.a.weight.grad
        p.step()
        p.cut()
    return p


@case(a=WRITTEN, b=WRITTEN)
def grad_swap_tables():
    p = Program(a=table(), b=table()).begin()
    for i in range(3):
        p.zero()
        p.flow(look(p.a, 1 + i), look(p.b, 100 + i))
        p.a.weight.grad, p.b.weight.grad = p.b.weight.grad, p.a.weight.grad
        p.step()
        p.cut()
    return p


@case(e=WRITTEN, replica="written outside of its optimizer's steps")
def ema_model_grad_tracked():
    """A tracked replica makes the gradients."""
    e = table()
    p = Program(lambda ps: [adagrad([w], lr=LR) for w in ps], e=e, replica=copy.deepcopy(e)).begin()
    for i in range(3):
        p.zero()
        p.flow(look(p.replica, 20 + i))
        p.e.weight.grad = p.replica.weight.grad
        p.optimizer.step()
        with torch.no_grad():
            p.replica.weight.copy_(p.e.weight)
        p.cut()
    return p


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise RuntimeError("boom")


def half_way(p, first, error):
    """The backward pass of `first` raises when that of a later lookup is done; a step with a functional lookup follows."""
    with pytest.raises(RuntimeError, match=error):
        p.flow(first, look(p.e, 6))
    p.train(look_past(p.e, 8), look(p.e, 7))
    p.cut()
    return p


@case(e=PARTS)
def stale_flow():
    p = Program().begin()
    return half_way(p, Boom.apply(look(p.e, 5)), "boom")


@case(e=PARTS)
def stale_anomaly():
    p = Program().begin()
    with torch.autograd.detect_anomaly():
        return half_way(p, (look(p.e, 5) * 0).sqrt(), "nan")


@case()
def sparse_flip_backward():
    """A module that makes sparse gradients later; nothing is raised into the backward pass."""
    p = Program().begin()
    p.e.sparse = True
    return p.trains(lambda i: look(p.e, 10 + i))


# -- steps that nobody saw whole


def in_groups(weights):
    return sgd([{"params": [weight]} for weight in weights], lr=LR, fused=True)


def torn(spoil, error):
    """A fused step fails after its first group, which applies a gradient from before a cut; the program goes on."""
    p = Program(in_groups, a=table(), b=table()).begin()
    p.flow(look(p.a, 50), look(p.b, 50))
    p.cut()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        spoil(p, patch)
        p.step()
    for i in range(2):
        p.train(look(p.a, i), look(p.b, i))
        p.cut()
    return p


@case()
def fused_torn():
    def spoil(p, _patch):
        p.b.weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, COLUMNS), (ROWS, COLUMNS))

    return torn(spoil, RuntimeError)


@case()
def kbd_fused():
    real, calls = torch._fused_sgd_, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    return torn(lambda _p, patch: patch.setattr(torch, "_fused_sgd_", interrupted), KeyboardInterrupt)


@case(whole=True)
def pre_only_cleared():
    """Someone drops all hooks before steps, and the gradient in one after them."""
    p = Program(e=table(sparse=True)).begin()
    p.trains(lambda i: look(p.e, 10 + i))
    p.optimizer._optimizer_step_pre_hooks.clear()
    after = p.optimizer._optimizer_step_post_hooks
    ours = dict(after)
    after.clear()
    p.optimizer.register_step_post_hook(lambda optimizer, _args, _kwargs: optimizer.zero_grad())
    after.update(ours)
    return p.trains(lambda i: look(p.e, 50 + i))


def moved(put):
    """A table goes from one optimizer to another with a gradient from before the cut; `put` it into the other's list."""
    p = Program(
        lambda ps: [sgd([ps[0]], lr=LR), sgd([ps[1]], lr=LR, fused=True)], a=table(), b=table()
    ).begin()
    p.flow(look(p.a, 50), look(p.b, 50))
    p.cut()
    p.optimizers[0].param_groups[0]["params"].clear()
    put(p.optimizers[1].param_groups[0]["params"], p.a.weight)
    p.step()
    p.cut()
    for i in range(2):
        p.train(look(p.a, i), look(p.b, i))
        p.cut()
    return p


@case()
def moved_to_fused():
    return moved(lambda params, weight: params.append(weight))


@case()
def moved_to_fused_in_front():
    """All parameters of all optimizers are what they were, in the same order."""
    return moved(lambda params, weight: params.insert(0, weight))


@case(e="replaced on the class")
def classpatch():
    p, real = Program(sgd).begin(), sgd.step

    def step(self, closure=None):
        real(self, closure)
        p.e.weight.data[50] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sgd, "step", step)
        return p.trains(lambda i: look(p.e, 10 + i))


# -- a row without a gradient changes all the same


@case(e="denormals are flushed")
def denormal():
    p = Program(sgd)
    p.e.weight.data[50] = 1e-40
    p.begin()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        return p.trains(lambda i: look(p.e, 10 + i))
    finally:
        torch.set_flush_denormal(False)


@case(e="learning rate that is negative")
def neg_lr():
    p = Program(sgd)
    p.e.weight.data[50] = -0.0
    p.begin().optimizer.param_groups[0]["lr"] = -LR
    return p.trains(lambda i: look(p.e, 10 + i))


@case(e="eps = 0")
def eps0_init():
    p = Program(lambda ps: adagrad(ps, eps=0.0, initial_accumulator_value=0.1))
    p.optimizer.state[p.e.weight]["sum"][50] = 0
    return p.begin().trains(lambda i: look(p.e, 10 + i))


@case(e="eps may be 0 in float16")
def half():
    p = Program(e=table(dtype=torch.float16)).begin()
    return p.trains(lambda i: look(p.e, 10 + i))


@case(a="the state of b", b="the state of a")
def shared_state():
    p = Program(a=table(), b=table())
    p.optimizer.state[p.b.weight]["sum"] = p.optimizer.state[p.a.weight]["sum"]
    return p.begin().trains(lambda i: look(p.a, i) + look(p.b, 100 + i))


@case()
def key_swap():
    """Two fields of the state exchange their names, and nothing else."""
    p = Program(lambda ps: torch.optim.SparseAdam(ps), e=table(sparse=True)).begin()
    p.trains(lambda i: look(p.e, 10 + i))
    state, names = p.optimizer.state[p.e.weight], {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    swapped = {names.get(key, key): value for key, value in state.items()}
    state.clear()
    state.update(swapped)
    return p.trains(lambda i: look(p.e, 50 + i))


@case(e="shared with other processes")
def hogwild():
    """What another process writes leaves no trace here, as `.data` does not."""
    p = Program().begin()
    p.train(look(p.e, 10))
    p.cut()
    p.e.weight.share_memory_()
    for i in range(2):
        p.e.weight.data[50 + i] += 1
        p.cut()
    return p


@pytest.mark.parametrize("name", CASES)
def test_no_changed_row_is_missed(name):
    """At no cut of the program; its tables go over to hashes only where their changes cannot be told otherwise."""
    program, expected = CASES[name]
    with quiet():
        program().expect(**expected)


def test_two_trackings_share_an_optimizer():
    """Each marks rows of dense gradients for cuts of its own."""
    with quiet():
        one = Program().begin()
        other = copy.copy(one).begin()
        for i in range(4):
            if i % 2 == 0:
                one.zero()
            one.flow(look(one.e, 20 + i))
            one.step()
            one.cut()
            if i % 2:
                assert other.cut() == {"e": {19 + i, 20 + i}}
    one.expect()
    other.expect()


def test_a_write_that_versions_show_is_no_fault():
    """It marks the table; only what leaves no trace is for the audit to find."""
    with quiet():
        p = Program(
            settings=TrackingSettings(hash_below_bytes=0, audit_rows=ROWS), e=table(sparse=True)
        ).begin()
        p.trains(lambda i: look(p.e, 10 + i))
        with torch.no_grad():
            p.e.weight.mul_(0.999)
        p.cut()
        assert not p.faults
        p.expect(whole=True)
        p.e.weight.data[50] += 1
        p.cut()
        assert p.faults


@pytest.mark.parametrize("what", ["weight", "state"])
def test_the_comparison_would_see_a_miss(what):
    """A write without a trace, which is the audit's to find, fails a cut."""
    with quiet():
        p = Program().begin()
        p.trains(lambda i: look(p.e, 10 + i))
        written = p.e.weight if what == "weight" else p.optimizer.state[p.e.weight]["sum"]
        written.data[5] += 1
        with pytest.raises(AssertionError, match=r"missed \[5\] of e under gradients"):
            p.cut()
