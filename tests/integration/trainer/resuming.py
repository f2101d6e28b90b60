# ruff: noqa: NPY002 - numpy's global generator is what is tested
"""Trains one small DLRM-like model under one optimizer, in forked children: uninterrupted, killed, resumed.

Run as a script: `resuming.py WORKDIR CASE...`. For every case three children are forked from this process, which has
imported everything and has no threads: `plain` trains without deltashard, `killed` saves on the way and is killed with
SIGKILL after a further step, `resumed` comes back and trains to the end. Each writes its final state.
"""

import os
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path

import deltashard
import numpy as np
import torch
import torch._dynamo  # what every child's first optimizer would import
from torch import nn

ROWS, DIM, STEPS, SAVE_AT, KILL_AT = 600, 8, 26, 15, 18


class Items(torch.utils.data.Dataset):
    """Baskets of 5 items; `noisy` draws from the process's generators at every access."""

    def __init__(self, noisy: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.items = torch.randint(ROWS, (160, 5), generator=generator)
        self.labels = torch.rand(160, 1, generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int):
        label = self.labels[i]
        if self.noisy:
            label = label + 0.1 * torch.rand(1) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.items[i], label.float()


class Net(nn.Module):
    """Two tables, batch norm, dropout, a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=sparse)
        self.extra = nn.Embedding(50, DIM, sparse=sparse)
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.drop = nn.Dropout(0.3)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, x):
        both = torch.cat([self.items(x), self.extra(x[:, 0] % 50)], 1)
        return self.top(self.drop(self.norm(both)))


class Own(torch.optim.Optimizer):
    """Nobody has heard of it: lazy state, one value a row and one a weight, decays rows without a gradient."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                state = self.state[p]
                if not state:
                    state["ticks"] = 0
                    state["slow"] = p.detach().clone()
                    state["norm"] = torch.zeros(p.shape[0])
                state["ticks"] += 1
                state["norm"].mul_(0.9).add_(grad.reshape(len(p), -1).square().mean(1))
                scale = (state["norm"] + 1e-3).rsqrt().view(-1, *([1] * (p.dim() - 1)))
                p.sub_(group["lr"] * grad * scale)
                if state["ticks"] % 5 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


def _split(net, tables, dense):
    table = [net.items.weight, net.extra.weight]
    rest = [p for p in net.parameters() if not any(p is t for t in table)]
    return [tables(table), dense(rest)]


optim = torch.optim
CASES = {
    # name: (sparse gradients, optimizers, noisy dataset, workers, skip)
    "sgd": (True, lambda n: [optim.SGD(n.parameters(), lr=0.1)], False, 2, "sampler"),
    "momentum": (False, lambda n: [optim.SGD(n.parameters(), lr=0.1, momentum=0.9)], False, 2, "sampler"),
    "sparse_momentum": (
        True,
        lambda n: _split(n, lambda p: optim.SGD(p, lr=0.1, momentum=0.9), lambda p: optim.SGD(p, lr=0.1)),
        False,
        0,
        "sampler",
    ),
    "adagrad": (True, lambda n: [optim.Adagrad(n.parameters(), lr=0.1)], True, 0, "sampler"),
    "adam": (False, lambda n: [optim.Adam(n.parameters(), lr=0.01)], True, 2, "replay"),
    "adamw": (False, lambda n: [optim.AdamW(n.parameters(), lr=0.01, amsgrad=True)], False, 2, "sampler"),
    "sparse_adam": (
        True,
        lambda n: _split(n, lambda p: optim.SparseAdam(p, lr=0.01), lambda p: optim.Adam(p, lr=0.01)),
        False,
        2,
        "replay",
    ),
    "rmsprop": (False, lambda n: [optim.RMSprop(n.parameters(), lr=0.01, centered=True)], False, 0, "replay"),
    "rowwise_adagrad": (
        True,
        lambda n: _split(
            n, lambda p: deltashard.optim.RowWiseAdagrad(p, lr=0.1), lambda p: optim.Adagrad(p, lr=0.1)
        ),
        False,
        2,
        "sampler",
    ),
    "own": (False, lambda n: [Own(n.parameters())], False, 2, "sampler"),
}


def train(case: str, role: str, work: Path) -> None:
    sparse, make, noisy, workers, skip = CASES[case]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    net = Net(sparse)
    optimizers = make(net)
    schedulers = [optim.lr_scheduler.StepLR(o, 4, 0.8) for o in optimizers]
    loader = torch.utils.data.DataLoader(Items(noisy), batch_size=16, shuffle=True, num_workers=workers)
    ckpt = None
    step = first = 0
    if role != "plain":
        ckpt = deltashard.Checkpointer(
            net,
            optimizers,
            state={f"scheduler{i}": s for i, s in enumerate(schedulers)},
            url=work / "store",
            run=case,
            encoding="fp32",
            differential="consecutive",
            arena_bytes=64 << 20,
            content_hash=True,
            sidecar={"linger_s": 20.0},
        )
        resumed = ckpt.restore()
        assert (resumed is None) == (role == "killed"), resumed
        if resumed is not None:
            assert resumed.step == SAVE_AT, resumed
            assert resumed.verified is True, resumed
            assert resumed.lost_steps == KILL_AT - SAVE_AT, resumed
            step = resumed.step
        loader = ckpt.wrap(loader, skip=skip)
        first = loader.epoch
    for _ in range(first, 100):
        for x, y in loader:
            for o in optimizers:
                o.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            for o, s in zip(optimizers, schedulers, strict=True):
                o.step()
                s.step()
            step += 1
            if ckpt is not None:
                ckpt.step()
                if role == "killed" and step in (3, 9, SAVE_AT):
                    ckpt.save("test").wait(60)
                if role == "killed" and step == KILL_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS:
                break
        if step == STEPS:
            break
    if ckpt is not None:
        ckpt.close(deadline_s=60)
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            for key, value in list(entry.items()):
                if isinstance(value, torch.Tensor) and value.is_sparse:  # as it is: coalescing changes bits
                    entry[key] = [value._indices(), value._values(), value.is_coalesced()]
    state = {
        "net": net.state_dict(),
        "optim": [o.state_dict() for o in optimizers],
        "rng": torch.get_rng_state(),
    }
    torch.save(state, work / f"{case}.{role}.pt")


def main() -> int:
    # torch's own optimizers build sparse tensors without saying whether to check them.
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    torch.set_num_threads(1)
    work = Path(sys.argv[1])
    bad = 0
    for case in sys.argv[2:]:
        for role in ("plain", "killed", "resumed"):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    train(case, role, work)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            wanted = -signal.SIGKILL if role == "killed" else 0
            if status != wanted:
                print(f"{case} {role}: exit {status}", flush=True)
                bad += 1
    return bad


if __name__ == "__main__":
    sys.exit(main())
