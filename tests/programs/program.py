# ruff: noqa: NPY002 - user programs draw from numpy's global generator
"""One user program described by a `Spec`: the model, its optimizers, its loaders and its loop."""

from __future__ import annotations

import collections
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import deltashard
import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.programs.dimension import STEPS, Spec
from tests.support.trainer.verdict import bits, optimizer_bits

SAMPLES, BATCH, CHANGE_AT, WAIT_S = 19, 4, 4, 60
_IN_STATE, _HIDDEN = np.random.default_rng(5), np.random.default_rng(6)
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16}

optim = torch.optim
RULES: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "sparse_adam": lambda p: optim.SparseAdam(p, lr=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "rowwise": lambda p: deltashard.optim.RowWiseAdagrad(p, lr=0.1),
}


class LookaheadOptimizer(optim.Optimizer):
    """A wrapper like those on PyPI: it shares the inner optimizer's groups and keeps its own slow weights."""

    def __init__(self, inner: Any) -> None:
        self.optimizer, self.state, self.defaults = inner, collections.defaultdict(dict), inner.defaults
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for fast in group["params"] if group["counter"] == 0 else ():
                    slow = self.state[fast].setdefault("slow", fast.detach().clone())
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)
                group["counter"] = (group["counter"] + 1) % 3
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class ProgramNet(nn.Module):
    """Embedding tables under one linear layer."""

    def __init__(self, s: SimpleNamespace) -> None:
        super().__init__()
        self.bag, self.rarely = s.module == "bag", s.rarely_used
        options: dict[str, Any] = {"sparse": s.sparse, "dtype": _DTYPES[s.dtype]}
        if s.padding:
            options["padding_idx"] = 0
        if s.max_norm:
            options["max_norm"] = 1.5
        if self.bag:
            options["mode"] = s.pooling
        kind = nn.EmbeddingBag if self.bag else nn.Embedding
        self.tables = nn.ModuleList(kind(s.rows + t, s.width, **options) for t in range(s.tables))
        if s.shared:
            self.tables.append(kind(s.rows, s.width, _weight=self.tables[0].weight, **options))
        self.norm = nn.BatchNorm1d(s.width * len(self.tables)) if s.batch_norm else nn.Identity()
        self.drop = nn.Dropout(0.2 if s.dropout else 0.0)
        self.top = nn.Linear(s.width * len(self.tables), 1)

    def forward(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        found = []
        for number, table in enumerate(self.tables):
            rows = (ids * (number + 7)) % len(table.weight)
            out = table(rows) if self.bag else table(rows).mean(1)
            if self.rarely and number == len(self.tables) - 1 and step % 3:
                out = torch.zeros_like(out)
                out = out.detach()
            found.append(out.float())
        return self.top(self.drop(self.norm(torch.cat(found, 1)))).squeeze(1)


# Data


def _noise(kind: str, own: np.random.Generator) -> float:
    draws: dict[str, Callable[[], float]] = {
        "none": float, "torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "python": random.random,
        "attribute": own.random, "state": _IN_STATE.random, "hidden": _HIDDEN.random,
    }  # fmt: skip
    return draws[kind]()


class Sample(SimpleNamespace):
    """A batch of a class that the program defines."""


class ProgramDataset(Dataset):
    """A dataset whose sample `i` has three ids and a target."""

    def __init__(self, s: SimpleNamespace, samples: int) -> None:
        self.s, self.samples, self.own = s, samples, np.random.default_rng(9)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        ids = torch.tensor([i * 37 + 1, i * 101 + 5, i * 11 + 3])
        y = torch.tensor((i * 13 % 7) / 7 + _noise(self.s.augment, self.own))
        return {"ids": ids, "y": y} if self.s.batch == "dict" else (ids, y)


class ProgramStream(IterableDataset):
    """The samples in order, or through a shuffle buffer that draws from Python's generator."""

    def __init__(self, items: ProgramDataset, *, buffer: int) -> None:
        self.items, self.buffer = items, buffer

    def __iter__(self) -> Iterator[Any]:
        info, held = get_worker_info(), []
        for i in range(info.id if info else 0, len(self.items), info.num_workers if info else 1):
            held.append(i)
            if len(held) > self.buffer:
                yield self.items[held.pop(random.randrange(len(held)) if self.buffer else 0)]
        for i in held:
            yield self.items[i]


class OwnSampler(Sampler):
    """Draws an order from numpy's global generator or from its own."""

    def __init__(self, samples: int, own: np.random.Generator | None) -> None:
        self.samples, self.own = samples, own

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter((self.own or np.random).permutation(self.samples).tolist())


class CountingBatches:
    """Batches whose position is an attribute, as in TorchRec's random dataset; every `iter()` sets it to 0."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        return self

    def __next__(self) -> Any:
        self.position += 1
        if self.position > len(self.batches):
            raise StopIteration
        return self.batches[self.position - 1]


class BatchDataset(IterableDataset):
    """A dataset of whole batches."""

    def __init__(self, batches: CountingBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.batches), None)


def _in_object(samples: list[Any]) -> Sample:
    return Sample(ids=torch.stack([ids for ids, _ in samples]), y=torch.stack([y for _, y in samples]))


def _loader(s: SimpleNamespace, restarted: bool, samples: int = SAMPLES) -> Any:
    change = s.restart if restarted else "same"
    items = ProgramDataset(s, samples + (8 if change == "longer" else 0))
    n, batch = len(items), 5 if change == "batch_size" else BATCH
    options: dict[str, Any] = {"collate_fn": _in_object if s.batch == "object" else None}
    if s.workers or change == "workers":
        workers = s.workers + 1 if change == "workers" else s.workers
        options |= {"num_workers": workers, "persistent_workers": s.persistent}
    whole = options | {"batch_size": batch}
    if s.generator:
        whole["generator"] = torch.Generator().manual_seed(21)
    shuffle = s.shuffle and change != "unshuffled"
    batches = list(DataLoader(items, BATCH, collate_fn=options["collate_fn"]))
    make: dict[str, Callable[[], Any]] = {
        "map": lambda: DataLoader(items, shuffle=shuffle, **whole),
        "iterable": lambda: DataLoader(ProgramStream(items, buffer=0), **whole),
        "buffer": lambda: DataLoader(ProgramStream(items, buffer=6), **whole),
        "stateful": lambda: StatefulDataLoader(items, shuffle=shuffle, **whole),
        "stateful_iterable": lambda: StatefulDataLoader(ProgramStream(items, buffer=0), **whole),
        "stateful_numpy": lambda: StatefulDataLoader(items, sampler=OwnSampler(n, None), **whole),
        "resumable": lambda: DataLoader(items, sampler=deltashard.ResumableSampler(items, seed=3), **whole),
        "weighted": lambda: DataLoader(items, sampler=WeightedRandomSampler(torch.linspace(0.1, 1, n), n), **whole),
        "numpy_sampler": lambda: DataLoader(items, sampler=OwnSampler(n, None), **whole),
        "own_sampler": lambda: DataLoader(items, sampler=OwnSampler(n, np.random.default_rng(2)), **whole),
        "batch_sampler": lambda: DataLoader(
            items, batch_sampler=BatchSampler(RandomSampler(items), batch, drop_last=False), **options
        ),
        "distributed": lambda: DataLoader(items, sampler=DistributedSampler(items, 1, 0, seed=4), **whole),
        "factory": lambda: lambda epoch, start: iter(batches[(epoch + k) % len(batches)] for k in range(start, len(batches))),
        "counting": lambda: BatchDataset(CountingBatches(batches)),
        "list": lambda: batches,
    }  # fmt: skip
    return make[s.loader]()


def _parts(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, Sample):
        return batch.ids, batch.y
    return (batch["ids"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


class UserProgram:
    """One process of the program: `run()` trains to `STEPS`, or is killed before."""

    def __init__(self, spec: Spec, *, kill: int = 0, restarted: bool = False, reported: list[str]) -> None:
        """Configure the process; it ends at step `kill` (0: never), after a restore counted from the restored step."""
        self.s = s = SimpleNamespace(**spec)
        self.kill, self.restarted, self.reported = kill, restarted, reported
        torch.manual_seed(11), np.random.seed(11), random.seed(11)
        self.net = ProgramNet(s)
        if s.freeze == "unfreeze":
            self.net.tables[0].weight.requires_grad_(False)
        self.tables = list(dict.fromkeys(table.weight for table in self.net.tables))
        self.dense = [*self.net.norm.parameters(), *self.net.top.parameters()]
        self.optimizers = self._optimizers()
        self.head = self.optimizers[-1]
        self.scheduler = self._scheduler(self.head)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) if s.scaler else None
        self.state: dict[str, Any] = {"rng": _IN_STATE} if s.augment == "state" else {}
        if self.scheduler is not None:
            self.state["scheduler"] = self.scheduler
        if self.scaler is not None:
            self.state["scaler"] = self.scaler
        if s.ema == "averaged":
            ema = optim.swa_utils.AveragedModel(
                self.net, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
            self.state["ema"] = ema
        elif s.ema == "tensors":
            self.state["ema"] = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        self.n = 0

    def _optimizers(self) -> list[Any]:
        s = self.s
        dense_groups = [{"params": self.dense}]
        if s.groups == 2:
            dense_groups = [{"params": self.dense[:-1]}, {"params": self.dense[-1:], "lr": 0.02}]
        if s.optimizers == "one":
            rule = RULES[s.table_rule]
            made = [rule([{"params": self.tables}, *dense_groups])]
        else:
            rule = RULES[s.table_rule]
            tables = [[t] for t in self.tables] if s.optimizers == "each" else [self.tables]
            made = [*(rule(t) for t in tables), RULES[s.dense_rule](dense_groups)]
        if self.restarted and s.restart == "rate":
            for group in made[-1].param_groups:
                group["lr"] *= 3
        return [*made[:-1], LookaheadOptimizer(made[-1])] if s.wrapper == "lookahead" else made

    def _scheduler(self, optimizer: Any) -> Any:
        rates = optim.lr_scheduler
        make: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "step": lambda: rates.StepLR(optimizer, 3, 0.7),
            "one_cycle": lambda: rates.OneCycleLR(
                optimizer, 0.05, total_steps=STEPS + 1, cycle_momentum=False
            ),
            "plateau": lambda: rates.ReduceLROnPlateau(optimizer, patience=1),
            "lambda": lambda: rates.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        }
        return make[self.s.scheduler]()

    def run(self) -> None:
        s = self.s
        options: dict[str, Any] = {"content_hash": s.content_hash, "precopy": s.precopy}
        event = lambda kind, facts: self.reported.append(f"event {kind}: {dict(facts)}")  # noqa: E731
        self.ckpt = deltashard.Checkpointer(
            self.net, self.optimizers, state=self.state, on_event=event, **options
        )
        wrap: dict[str, Any] = {} if s.skip == "default" else {"skip": s.skip}
        wrap |= {"pipelined": True} if s.loop == "pipelined" else {}
        bare = _loader(s, self.restarted)
        second = _loader(s, self.restarted, 10) if s.loop in ("zip", "nested", "alternate") else None
        if s.wrap_first:
            loader = self.ckpt.wrap(bare, name="first", **wrap)
            second = None if second is None else self.ckpt.wrap(second, name="second")
        resumed = self.ckpt.restore()
        if resumed is not None:
            self.n = resumed.step
            for note in resumed.notes:
                self.reported.append(f"note: {note}")
        if not s.wrap_first:
            loader = self.ckpt.wrap(bare, name="first", **wrap)
            second = None if second is None else self.ckpt.wrap(second, name="second")
        if self.restarted and self.kill:
            self.kill = self.n + self.kill if self.s.second_kill else 0
        if self.restarted and s.restart == "draws":
            torch.rand(5), np.random.rand(3), random.random()
        self.restored = self.n
        if s.between == "spare":
            iter(loader)
        elif s.between == "peek":
            next(iter(loader), None)  # at the end of an epoch there is no next batch, as documented
        self.loader = loader
        self.between_epochs = getattr(loader, "delivered", 0) % -(-SAMPLES // BATCH) == 0
        self.held = DataLoader(ProgramDataset(SimpleNamespace(augment="none", batch="tuple"), 8), 4)
        self._loop(loader, second, getattr(bare, "sampler", None))
        self.ckpt.close()

    def _loop(self, loader: Any, second: Any, sampler: Any) -> None:
        loops: dict[str, Callable[[], Iterator[Any]]] = {
            "next": lambda: self._next(loader),
            "epochs": lambda: self._epochs(loader, sampler),
            "next_iter": lambda: (next(iter(loader)) for _ in itertools.count()),
            "islice": lambda: self._passes(lambda: itertools.islice(loader, 3)),
            "break": lambda: self._early_break(loader, used=False),
            "break_used": lambda: self._early_break(loader, used=True),
            "cycle": lambda: itertools.cycle(loader),
            "kept": lambda: self._cached(list(loader)),
            "two_steps": lambda: (batch for batch in self._passes(lambda: loader) for _ in range(2)),
            "filter": lambda: (b for b in self._passes(lambda: loader) if int(_parts(b)[0][0, 0]) % 3),
            "pipelined": lambda: self._prefetched(loader),
            "pipelined_undeclared": lambda: self._prefetched(loader),
            "zip": lambda: self._passes(lambda: zip(loader, second, strict=False)),
            "nested": lambda: ((x, y) for x in self._passes(lambda: loader) for y in second),
            "alternate": lambda: self._alternate(loader, second),
        }
        if self.n < STEPS:
            for batch in loops.get(self.s.loop, lambda: self._passes(lambda: loader))():
                self._train(batch)
                if self.n >= STEPS:
                    break

    def _passes(self, once: Callable[[], Any]) -> Iterator[Any]:
        while True:
            if self.s.reseed:
                torch.manual_seed(100 + self.loader.epoch)
            if self.s.loop == "enumerate":
                yield from (batch for _, batch in enumerate(once()))
            elif self.s.loop == "generator":
                yield from (batch for batch in once())
            else:
                yield from once()
            if self.s.between == "train_pass":
                collections.deque(once(), maxlen=0)

    def _next(self, loader: Any) -> Iterator[Any]:
        source = iter(loader)
        while True:
            try:
                batch = next(source)
            except StopIteration:
                source = iter(loader)
                batch = next(source)
            yield batch

    def _epochs(self, loader: Any, sampler: Any) -> Iterator[Any]:
        for epoch in range(loader.epoch, STEPS):
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)
            yield from loader

    def _early_break(self, loader: Any, *, used: bool) -> Iterator[Any]:
        while True:
            for i, batch in enumerate(loader):
                if i == 3 and not used:
                    break
                yield batch
                if i == 2 and used:
                    break

    def _cached(self, batches: list[Any]) -> Iterator[Any]:
        while batches:
            yield batches[self.n % len(batches)]

    def _prefetched(self, loader: Any) -> Iterator[Any]:
        while True:
            source, queue = iter(loader), collections.deque()
            while True:
                while len(queue) < 3 and (batch := next(source, None)) is not None:
                    queue.append(batch)
                if not queue:
                    break
                yield queue.popleft()

    def _alternate(self, one: Any, other: Any) -> Iterator[Any]:
        first, second = self._next(one), self._next(other)
        while True:
            yield next(second if self.n % 3 == 2 else first)

    def _loss(self, batch: Any) -> torch.Tensor:
        pairs = batch if self.s.loop in ("zip", "nested") else (batch,)
        loss = torch.zeros(())
        for each in pairs:
            ids, y = _parts(each)
            if self.s.loop_draws == "torch":
                ids = torch.cat([ids, torch.randint(50, (len(ids), 1))], 1)
            elif self.s.loop_draws == "numpy":
                ids = torch.cat([ids, torch.from_numpy(np.random.randint(0, 50, (len(ids), 1)))], 1)
            loss = loss + (self.net(ids, self.n) - y.float()).square().mean()
        return loss / self.s.accumulate

    def _train(self, batch: Any) -> None:
        """Run one step: a batch, and the optimizers after every `accumulate` batches."""
        s, n = self.s, self.n
        if n == CHANGE_AT:
            self._change()
        if s.freeze == "while" and CHANGE_AT <= n <= CHANGE_AT + 4:
            self.tables[0].requires_grad_(n == CHANGE_AT + 4)
        if n + 1 == self.kill and s.save == "request":
            self.ckpt.save("user")  # with a batch in hand
        zeros = s.zero_grad == "zeros"
        if n % s.accumulate == 0 and s.zero_grad != "after":
            self._zero(set_to_none=not zeros)
        if s.closure:

            def closure() -> torch.Tensor:
                loss = self._loss(batch)
                loss.backward()
                return loss

            loss = self.optimizers[0].step(closure)
        else:
            loss = self._loss(batch)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self._maybe_kill("backward")
            if (n + 1) % s.accumulate == 0:
                self._step_optimizers()
        if (n + 1) % s.accumulate == 0:
            self._after_optimizers(loss.detach())
        if s.between == "evaluate" and n % 4 == 3:
            self.net.eval()
            with torch.no_grad():
                for ids, _ in self.held:
                    self.net(ids, n)
            self.net.train()
        self.n += 1
        self.ckpt.step()
        if s.save in ("wait", "pin") and self.n % 3 == 0 and self.n % s.accumulate == 0:
            self.ckpt.save("user", **({"pin": f"at-{self.n}"} if s.save == "pin" else {})).wait(WAIT_S)
        self._maybe_kill("step")
        if self.n == self.kill and s.kill_where == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)

    def _zero(self, *, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def _step_optimizers(self) -> None:
        s = self.s
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        clipped = self.dense if s.sparse else [*self.tables, *self.dense]
        if s.clip == "norm":
            nn.utils.clip_grad_norm_(clipped, 0.5)
        elif s.clip == "value":
            nn.utils.clip_grad_value_(clipped, 0.2)
        for number, optimizer in enumerate(self.optimizers):
            if number:
                self._maybe_kill("optimizers")
            _ = optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def _after_optimizers(self, loss: torch.Tensor) -> None:
        s = self.s
        if self.scheduler is not None:
            self.scheduler.step(*([loss] if s.scheduler == "plateau" else []))
        if s.written == "clamp" and self.n % 4 == 3:
            with torch.no_grad():
                self.tables[0].clamp_(-0.9, 0.9)
        elif s.written == "data" and self.n % 4 == 3:
            self.tables[0].data.mul_(0.99)
        if s.ema == "averaged":
            self.state["ema"].update_parameters(self.net)
        elif s.ema == "tensors":
            with torch.no_grad():
                for name, p in self.net.named_parameters():
                    self.state["ema"][name].lerp_(p, 0.1)
        if s.zero_grad == "after":
            self._zero(set_to_none=True)

    def _change(self) -> None:
        s, net = self.s, self.net
        if s.freeze in ("table", "unfreeze"):
            self.tables[0].requires_grad_(s.freeze == "unfreeze")
        elif s.freeze == "dense":
            net.top.weight.requires_grad_(False)
        if s.growth != "none":
            self._grow()
        if s.replaced == "optimizer":
            self.optimizers = [*self.optimizers[:-1], optim.SGD(self.dense, lr=0.1, momentum=0.9)]
        elif s.replaced == "head":
            old = [net.top.weight, net.top.bias]
            net.top = nn.Linear(net.top.in_features, 1)
            self._exchange(old, [net.top.weight, net.top.bias])
        elif s.replaced == "group":
            extra = nn.Parameter(torch.zeros(1, net.top.in_features))
            net.top.register_parameter("extra", extra)
            self.optimizers[-1].add_param_group({"params": [extra], "lr": 0.03})

    def _grow(self) -> None:
        module = self.net.tables[0]
        old = module.weight
        weight = nn.Parameter(torch.cat([old.detach(), old.detach()[: len(old) // 2] * 0.5]))
        if self.s.growth == "module":
            options = {"mode": module.mode} if self.net.bag else {}
            grown = type(module)(
                len(weight), old.shape[1], _weight=weight.detach().clone(), sparse=module.sparse, **options
            )
            self.net.tables[0], weight = grown, grown.weight
        else:
            module.weight, module.num_embeddings = weight, len(weight)
        self._exchange([old], [weight])
        self.tables[0] = weight

    def _exchange(self, old: list[Any], new: list[Any]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for before, after in zip(old, new, strict=True):
                    group["params"] = [after if p is before else p for p in group["params"]]
                    if optimizer.state.pop(before, None) and isinstance(optimizer, optim.Adagrad):
                        optimizer.state[after] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(after)}
        self.dense = [next((b for a, b in zip(old, new, strict=True) if p is a), p) for p in self.dense]

    def _maybe_kill(self, where: str) -> None:
        if self.kill and where == self.s.kill_where and self.n >= self.kill - (where != "step"):
            os.kill(os.getpid(), signal.SIGKILL)

    def bits(self) -> dict[str, bytes]:
        """Return the bytes of parameters, buffers, the optimizers' state and rates, and the contents of `state=`."""
        found = bits("model", self.net.state_dict())
        for number, optimizer in enumerate(self.optimizers):
            found |= optimizer_bits(f"optimizer{number}", optimizer)
        for name, value in self.state.items():
            found |= bits(name, value.state_dict() if hasattr(value, "state_dict") else value)
        return found
