"""Runs of a group whose ranks may be killed at any point, and each rank's own record outside of the store.

Each rank appends JSON lines to `WORKDIR/record-{rank}`, before or as soon as an event happens, so that they remain
after a kill. `test_kill_points` compares them with one another and with the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deltashard
import torch
import torch.distributed as dist
import xxhash
from deltashard.attach.launcher import normal_url, runtime_dir
from deltashard.group import coordinator_thread
from deltashard_checkpoint import crash_point
from torch import nn

from tests.integration.trainer.ranks.group import all_agree
from tests.support.eventually import eventually

TABLES, ROWS, DIM = 4, 200, 4
MOST_STEPS = 20_000


class RankNet(nn.Module):
    """A table for each of four ranks to save, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        self.drop = nn.Dropout(0.2)
        self.top = nn.Linear(TABLES * DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [table(x[:, i]) for i, table in enumerate(self.tables)]
        return self.top(self.drop(torch.cat(found, 1)))


class RankTraining:
    """One rank's data-parallel training. Batches come from its own random numbers.

    Gradients are averaged here, because DistributedDataParallel rebuilds its buckets after a process' first step and
    would then sum four ranks' gradients in another order than in a process that was not restarted.
    """

    def __init__(self, rank: int, workdir: Path, **options: Any) -> None:
        self.rank = rank
        self.file = os.open(workdir / f"record-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        torch.manual_seed(3)
        self.model = RankNet()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        torch.manual_seed(100 + rank)
        self.committed: list[int] = []
        """Steps of the checkpoints that this rank was notified of."""
        self.ckpt = deltashard.Checkpointer(
            self.model, self.optimizer, on_event=self.on_event, run="group",
            **{"url": workdir / "store", "encoding": "fp32", "content_hash": True, "grace_s": None,
               "arena_bytes": 160 << 20, "sidecar": {"linger_s": 20.0}} | options,
        )  # fmt: skip

    def record(self, what: str, **facts: Any) -> None:
        os.write(self.file, json.dumps([what, facts]).encode() + b"\n")

    def on_event(self, name: str, facts: Mapping[str, Any]) -> None:
        if name == "committed":
            self.committed.append(facts["commit"].step)
            self.record("notified", seq=facts["commit"].seq, step=facts["commit"].step)
        elif name not in ("snapshot", "skipped", "restored"):
            self.record(name, **{key: str(value) for key, value in facts.items()})

    @property
    def commits(self) -> int:
        return len(self.committed)

    def content(self) -> str:
        found = xxhash.xxh3_64()
        for tensor in self.model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        for held in self.optimizer.state_dict()["state"].values():
            for value in held.values():
                found.update(torch.as_tensor(value).numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()

    def restore(self) -> None:
        restored = self.ckpt.restore()
        if restored is None:
            self.record("restored", seq=0, step=0, exact=True, notes=[])
        else:
            self.record(
                "restored", seq=restored.seq, step=restored.step, exact=restored.verified,
                notes=list(restored.notes), content=self.content(),
            )  # fmt: skip

    def steps(self) -> Iterator[int]:
        """Train and yield the number of each finished step, which is recorded before a snapshot can include it."""
        for step in range(self.ckpt.steps + 1, MOST_STEPS):
            self.optimizer.zero_grad()
            self.model(torch.randint(ROWS, (4, TABLES))).square().mean().backward()
            parameters = list(self.model.parameters())
            gradients = torch.cat([each.grad.reshape(-1) for each in parameters])
            dist.all_reduce(gradients)
            for each, sum_ in zip(parameters, gradients.split([p.numel() for p in parameters]), strict=True):
                each.grad = sum_.reshape(each.shape)
            self.optimizer.step()
            self.record("step", step=step, content=self.content())
            self.ckpt.step()
            yield step
        raise AssertionError(f"{MOST_STEPS} steps, and {self.commits} commits")


def _set_node(rank: int, nodes: int, first: int = 0) -> None:
    share = dist.get_world_size() // nodes
    os.environ.update(GROUP_RANK=str(first + rank // share), LOCAL_RANK=str(rank % share))


def _arm(rank: int, workdir: Path, victim: str, point: str, nth: int) -> None:
    """Make this rank, or the sidecar that it starts, kill itself at `point`. A running sidecar is killed first."""
    if victim == f"rank {rank}":
        crash_point._armed, crash_point._left = point, nth
    node = int(os.environ["GROUP_RANK"])
    if victim in (f"sidecar {node}", "sidecar of any") and os.environ["LOCAL_RANK"] == "0":
        ready = runtime_dir(normal_url(workdir / "store"), "group", node) / "ready.json"
        if ready.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(ready.read_text())["pid"], signal.SIGKILL)
            ready.unlink()
        os.environ["DELTASHARD_CRASH_AT"] = f"{point}:{nth}"


# Scenarios: (rank, workdir, options) -> result of the rank.


def trained(
    rank: int,
    workdir: Path,
    nodes: str,
    commits: str,
    end: str,
    victim: str = "",
    point: str = "",
    nth: str = "1",
    wakes: str = "",
) -> Any:
    """Restore, train until all ranks were notified of `commits` commits, and close or be killed.

    Meanwhile `victim` ("rank 2", "sidecar 1" or "sidecar of any") is killed when it reaches `point` the nth time.
    `nodes` is the number of machines. `wakes` is the pid of a stopped process that continues after the first commit, on
    other machines than these.
    """
    _set_node(rank, int(nodes), first=2 if wakes else 0)
    _arm(rank, workdir, victim, point, int(nth))
    training = RankTraining(rank, workdir, every_steps=12)
    training.record("begun", victim=victim, point=point)
    sidecar = training.ckpt.sidecar_pid
    training.restore()
    for step in training.steps():
        if step % 7 == 3 and rank == step % dist.get_world_size():
            training.ckpt.save()
        if wakes and rank == 0 and training.commits:
            os.kill(int(wakes), signal.SIGCONT)
            wakes = ""
        if all_agree(training.commits >= int(commits)):
            break
    if end == "kill":
        training.record("ended", lost=sidecar != training.ckpt.sidecar_pid)
        os.kill(os.getpid(), signal.SIGKILL)
    training.ckpt.close()
    training.record("closed", step=training.ckpt.steps)
    return {"commits": training.commits}


def stale(rank: int, workdir: Path) -> Any:
    """All ranks but rank 2 are killed. Rank 2 is stopped on an unreachable machine and continues alone later."""
    _set_node(rank, 2)
    training = RankTraining(rank, workdir, every_steps=12)
    training.restore()
    stopped = workdir / "stopped"
    for _ in training.steps():
        if all_agree(training.commits >= 1):
            break
    if rank != 2:
        eventually(stopped.exists, "rank 2 to stop")
        os.kill(os.getpid(), signal.SIGKILL)
    stopped.with_suffix(".new").write_text(str(os.getpid()))
    stopped.with_suffix(".new").rename(stopped)
    os.kill(os.getpid(), signal.SIGSTOP)
    met = []
    for what in (
        lambda: next(training.steps()),  # its peers have exited
        training.ckpt.step,  # a program that continues in spite of the error
        lambda: training.ckpt.save().wait(20),
        lambda: training.ckpt.close(deadline_s=10),
    ):
        try:
            what()
            met.append("")
        except Exception as error:
            met.append(f"{type(error).__name__}: {error}")
    (workdir / "stale-result").write_text(json.dumps(met))
    os._exit(0)


def uneven(rank: int, workdir: Path) -> Any:
    """Rank 2 is ten times slower. Rank 1 is stopped while an order waits for it, until the order is cancelled."""
    coordinator_thread.ANSWER_S = 1.0
    # Only explicit saves create orders here: an order that rank 1 has answered does not need rank 1 until its step.
    training = RankTraining(rank, workdir, every_s=3600)
    training.restore()
    orders, pids = training.ckpt._wiring.coordinator_thread, [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def wake(before: int) -> None:
        eventually(lambda: orders.cancelled > before, "the cancelled order")
        os.kill(pids[1], signal.SIGCONT)

    stopped_at = 0
    for step in training.steps():
        time.sleep(0.02 if rank == 2 else 0.002)
        if rank == 0 and (step == 12 or (stopped_at and (step - stopped_at) % 12 == 0)):
            training.ckpt.save()
        if not stopped_at and all_agree(training.commits >= 1):
            stopped_at, seen = step, training.commits
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 0:
                eventually(
                    lambda: b"T" in Path(f"/proc/{pids[1]}/stat").read_bytes().split()[2], "rank 1 to stop"
                )
                threading.Thread(target=wake, args=(orders.cancelled,), daemon=True).start()
                training.ckpt.save("while rank 1 is stopped")
        elif stopped_at and all_agree(training.commits >= seen + 2):
            break
    training.ckpt.close()
    return {"cancelled": orders.cancelled}
