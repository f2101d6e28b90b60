"""Kills a trainer at one of its crash points and resumes it: run as a script, `trainer_kills.py WORKDIR POINT...`.

Every process is forked from this one, which has imported everything and started no thread. For a save's point: train
to step 6, save (durable), continue, be killed inside the next save; then resume. For a restore's point: resume, be
killed inside the restore, resume again. The script prints one JSON line per point: what the last process restored.
"""

import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import deltashard
import torch
import torch._dynamo  # imports that every child's first optimizer needs
from deltashard.save import precopy_scheduler
from deltashard.snapshot import precopy
from deltashard_checkpoint import crash_point
from torch import nn

ROWS, FIRST, SECOND = 5000, 6, 10


def arm(point: str) -> None:
    """Arm the point for this forked process only, as DELTASHARD_CRASH_AT would (its sidecar must continue)."""
    crash_point._armed, crash_point._left = point, 1


class CheckpointedModel:
    """A model under a Checkpointer."""

    def __init__(self, work: Path, run: str) -> None:
        torch.manual_seed(1)
        self.table = nn.Embedding(ROWS, 16, sparse=True)
        self.top = nn.Linear(16, 1)
        model = nn.ModuleDict({"table": self.table, "top": self.top})
        # Content hashes read every batch of a snapshot: with them nothing is copied ahead.
        ahead = run.startswith("precopy.")
        self.optimizers = [
            torch.optim.Adagrad(self.table.parameters(), lr=0.1),
            torch.optim.Adam(self.top.parameters(), lr=0.01),
        ]
        self.ckpt = deltashard.Checkpointer(
            model, self.optimizers, url=work / "store", run=run, encoding="fp32" if ahead else "q4",
            arena_bytes=64 << 20, content_hash=not ahead, every_steps=SECOND if ahead else None, sidecar={"linger_s": 20.0},
        )  # fmt: skip

    def train(self, to: int) -> None:
        while self.ckpt.steps < to:
            x = torch.randint(ROWS, (16, 8))
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.top(self.table(x).mean(1)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.ckpt.step()


def train_until_killed(work: Path, run: str) -> None:
    trained = CheckpointedModel(work, run)
    assert trained.ckpt.restore() is None
    trained.train(FIRST)
    trained.ckpt.save().wait(60)
    torch.save(trained.table.weight.detach(), work / f"{run}.pt")
    if run.startswith(("snapshot.", "precopy.")):
        arm(run)
        trained.train(SECOND)
        if run.startswith("precopy."):
            # Train to the step before the timer's snapshot: the copying thread is killed, however late it runs.
            trained.train(FIRST + SECOND - 1)
            threading.Event().wait(60)
            raise TimeoutError(f"nothing was copied ahead of step {FIRST + SECOND}")
        trained.ckpt.save().wait(60)
    os.kill(os.getpid(), 9)


def restore_until_killed(work: Path, run: str) -> None:
    trained = CheckpointedModel(work, run)
    arm(run)
    trained.ckpt.restore()


def resume(work: Path, run: str) -> None:
    trained = CheckpointedModel(work, run)
    restored = trained.ckpt.restore()
    assert restored is not None
    exact = (
        torch.equal(trained.table.weight, torch.load(work / f"{run}.pt"))
        if restored.verified is None
        else restored.verified
    )
    trained.train(restored.step + 3)
    commit = trained.ckpt.save().wait(60)
    trained.train(restored.step + 5)
    trained.ckpt.close(deadline_s=60)
    found = {
        "point": run, "step": restored.step, "exact": exact, "lost_steps": restored.lost_steps,
        "next": commit.step - restored.step, "closed": trained.ckpt.stats.last_commit.step - restored.step,
    }  # fmt: skip
    print(json.dumps(found), flush=True)


def forked(action: Callable[[Path, str], None], work: Path, run: str) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action(work, run)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> int:
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    precopy.MIN_PRECOPY_TABLE_BYTES = precopy_scheduler.MIN_PRECOPY_BYTES = 0
    torch.set_num_threads(1)
    work = Path(sys.argv[1])
    for point in sys.argv[2:]:
        if forked(train_until_killed, work, point) != -9:
            return 1
        if point.startswith("restore.") and forked(restore_until_killed, work, point) != -9:
            return 1
        if forked(resume, work, point) != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
