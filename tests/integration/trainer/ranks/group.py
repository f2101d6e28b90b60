"""Scenarios for `rank_zygote`: several ranks under DistributedDataParallel, with kills, signals and errors."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deltashard
import torch
import torch.distributed as dist
import xxhash
from deltashard.errors import DeltashardError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ROWS, DIM, BATCH = 900, 8, 4


class BasketDataset(torch.utils.data.Dataset):
    """A dataset of 240 baskets of 5 items with a label. Each basket contains its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.items = torch.randint(ROWS, (240, 5), generator=generator)
        self.labels = torch.rand(240, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return i, self.items[i], self.labels[i]


class GroupNet(nn.Module):
    """Two tables, batch norm, dropout, a dense layer."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(rows, DIM, mode="mean")
        self.first = nn.Embedding(rows, DIM)
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.drop = nn.Dropout(0.3)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.drop(self.norm(torch.cat([self.items(x), self.first(x[:, 0])], 1))))


class DdpProgram:
    """A training loop of one rank under DistributedDataParallel, with or without deltashard."""

    def __init__(
        self, rank: int, workdir: Path, *, ckpt: bool = True, data: str = "dealt", **options: Any
    ) -> None:
        """`data`: "dealt" (torch's sampler), "sampled" (deltashard's), "shared" by all ranks, or each rank's "own"."""
        self.rank = rank
        torch.manual_seed(3)
        self.model = DistributedDataParallel(GroupNet())
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        torch.manual_seed(100 + rank)
        random.seed(rank)
        baskets, self.shared = BasketDataset(), data == "shared"
        samplers: dict[str, Any] = {
            "dealt": lambda: DistributedSampler(baskets, shuffle=True, seed=5),
            "sampled": lambda: deltashard.ResumableSampler(baskets, seed=5),
        }
        self.loader: Any = DataLoader(
            baskets,
            batch_size=12 if self.shared else BATCH,
            shuffle=None if data in samplers else True,
            sampler=samplers[data]() if data in samplers else None,
            generator=torch.Generator().manual_seed(5) if self.shared else None,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, gamma=0.9)
        self.seen: list[int] = []
        self.ckpt = None
        if ckpt:
            self.ckpt = deltashard.Checkpointer(
                self.model,
                self.optimizer,
                state={"scheduler": self.scheduler},
                url=workdir / "store",
                **{"run": "group", "encoding": "fp32", "content_hash": True, "grace_s": None} | options,
            )
            self.loader = self.ckpt.wrap(self.loader, shared=self.shared)

    def steps(self) -> Iterator[int]:
        epoch = self.loader.epoch if self.ckpt is not None else 0
        step = 0 if self.ckpt is None else self.ckpt.steps
        while True:
            if isinstance(self.loader.sampler, DistributedSampler):
                self.loader.sampler.set_epoch(epoch)
            for batch in self.loader:
                share = slice(self.rank, None, dist.get_world_size()) if self.shared else slice(None)
                numbers, items, labels = (each[share] for each in batch)
                self.seen += numbers.tolist()
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(items) * random.uniform(0.9, 1.1), labels).backward()
                self.optimizer.step()
                self.scheduler.step()
                step += 1
                if self.ckpt is not None:
                    self.ckpt.step()
                yield step
            epoch += 1

    def train(self, until: int) -> None:
        """Train up to step `until`."""
        for step in self.steps():
            if step >= until:
                break

    def state(self) -> dict[str, Any]:
        return self.sums() | {
            "torch": torch.rand(1).item(),
            "python": random.random(),
            "lr": self.scheduler.get_last_lr(),
        }

    def sums(self) -> dict[str, str]:
        tensors = dict(self.model.module.state_dict())
        for i, held in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{i}/{key}": torch.as_tensor(value) for key, value in held.items()}
        return {k: xxhash.xxh3_64_hexdigest(v.contiguous().numpy().tobytes()) for k, v in tensors.items()}


# Scenarios: (rank, workdir, options) -> result of the rank.


def plain(rank: int, workdir: Path, until: str, data: str = "dealt") -> Any:
    program = DdpProgram(rank, workdir, ckpt=False, data=data)
    program.train(int(until))
    return {"state": program.state(), "seen": program.seen}


def killed(rank: int, workdir: Path, save_at: str, kill_at: str, data: str = "dealt") -> Any:
    program = DdpProgram(rank, workdir, data=data)
    program.ckpt.restore()
    for step in program.steps():
        if step == int(save_at):
            program.ckpt.save().wait(60)
        if step == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)


def survived(rank: int, workdir: Path, until: str, save_at: str = "0", kill_at: str = "0") -> Any:
    """Partial recovery: rank 0, which saves most replicated data, is killed. Return each rank's state before and after.

    The other ranks wait in a collective that cannot finish, until SIGTERM arrives, as from torchrun.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with devices recovery is full
    (workdir / f"pid-{rank}").write_text(str(os.getpid()))
    program = DdpProgram(
        rank, workdir, recovery="partial", pls_target=0.1, planned_steps=100, grace_s=20.0, content_hash=False
    )
    try:
        with program.ckpt:
            restored = program.ckpt.restore()
            begun = program.sums()
            for step in program.steps():
                if step == int(save_at):
                    program.ckpt.save().wait(60)
                if step == int(kill_at):
                    (workdir / f"sums-{rank}.json").write_text(json.dumps(program.sums()))
                    if rank == 0:
                        others = " ".join(
                            (workdir / f"pid-{r}").read_text() for r in range(1, dist.get_world_size())
                        )
                        waits = f"tail --pid={os.getpid()} -f /dev/null; kill -TERM {others}"
                        subprocess.Popen(["sh", "-c", waits], start_new_session=True)
                        os.kill(os.getpid(), signal.SIGKILL)
                if step == int(until):
                    break
    except RuntimeError:
        os._exit(0)  # the group is broken: the harness must not wait for it
    return {
        "begun": begun, "seen": program.seen, "mode": restored.mode, "step": restored.step, "pls": restored.pls,
        "scheduler": program.scheduler.last_epoch, "committed": program.ckpt.stats.last_commit.step,
    }  # fmt: skip


def resumed(
    rank: int,
    workdir: Path,
    until: str,
    loaders: Any = "restart",
    data: str = "dealt",
    run: str = "group",
) -> Any:
    program = DdpProgram(rank, workdir, data=data, run=run)
    restored = program.ckpt.restore(loaders=loaders)
    at = program.ckpt.steps
    program.train(int(until))
    program.ckpt.close()
    facts = {"step": None, "exact": None, "notes": []} if restored is None else {
        "step": restored.step, "exact": restored.verified, "notes": list(restored.notes)
    }  # fmt: skip
    last = program.ckpt.stats.last_commit
    return {
        "restored": facts, "resumed_at": at, "state": program.state(), "seen": program.seen,
        "committed": None if last is None else [last.seq, last.step],
    }  # fmt: skip


def all_agree(here: bool) -> bool:
    """Return whether the condition holds on all ranks, which learn of commits at different steps."""
    agreed = torch.tensor([int(here)])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())


def terminated(rank: int, workdir: Path) -> Any:
    """Each rank gets SIGTERM at another instant during training. All ranks exit with the same step saved."""
    program = DdpProgram(rank, workdir, grace_s=30.0)
    program.ckpt.restore()
    for step in program.steps():
        (workdir / f"step-{rank}").write_text(str(step))
        if step == 10 + rank:
            os.kill(os.getpid(), signal.SIGTERM)


def disagreeing(rank: int, workdir: Path, what: str) -> Any:
    """The ranks' trainings differ. Each rank gets an error message."""
    options: dict[str, Any] = {"url": workdir / "store", "run": "group"}
    torch.manual_seed(rank if what == "replicas" else 0)
    model: nn.Module = GroupNet(ROWS + (rank if what == "model" else 0))
    if what in ("run", "encoding") and rank == 1:
        os.environ.update(GROUP_RANK="1", LOCAL_RANK="0")  # with a separate agent and sidecar
        options |= {"run": "another"} if what == "run" else {"encoding": "q4"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = deltashard.Checkpointer(model, optimizer, **options)
    try:
        ckpt.restore(which="none" if what == "call" and rank == 1 else "latest")
    finally:
        ckpt.close()
    return {}


def uneven(rank: int, workdir: Path) -> Any:
    """Ranks end at different steps. close() reports it, and the previous checkpoint remains."""
    program = DdpProgram(rank, workdir)
    program.ckpt.restore()
    program.train(4)
    program.ckpt.save().wait(60)
    for _ in range(rank):  # without a collective
        program.ckpt.step()
    program.ckpt.close(deadline_s=60.0)


def replicas(rank: int, workdir: Path) -> Any:
    """One rank changes a replicated parameter locally. Nothing inconsistent is committed, and an event reports it."""
    program = DdpProgram(rank, workdir)
    events = []
    program.ckpt._listener._on_event = lambda name, facts: events.append([name, facts.get("error")])
    program.ckpt.restore()
    handle = None
    for step in program.steps():
        if step == 5 and rank == 1:
            with torch.no_grad():
                program.model.module.top.bias += 1.0
        if step == 6:
            program.ckpt.save().wait(60)
        if step >= 8:
            # Rank 0 compares on a separate thread, so steps continue until it has finished.
            known = torch.tensor([int(any(name == "replicas_differ" for name, _ in events))])
            dist.all_reduce(known)
            if known.item():
                break
    handle = program.ckpt.save()
    try:
        handle.wait(3)
    except (DeltashardError, TimeoutError) as error:
        return {
            "events": [e for e in events if e[0] == "replicas_differ"],
            "error": str(error),
            "commits": program.ckpt.stats.commits,
        }
    return {"events": events}
