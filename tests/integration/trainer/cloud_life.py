"""Lives of a training program, for `test_cloud_lives.py`: `cloud_life.py FOLDER URL ...`, two of each URL, forked.

A life resumes where it can, saves at one step, and says of each step what the state's bytes hash to. The life that saved is killed
with its sidecar six steps later, in the middle of whatever they do.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import deltashard
import torch
from torch import nn


class Net(nn.Module):
    """A table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(500, 16, sparse=True)
        self.top = nn.Linear(16, 1)


def digest(net: Net) -> str:
    """Of all weights."""
    found = hashlib.sha256()
    for value in net.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def life(url: str, steps: int, save_at: int) -> None:
    """Train to `steps`; die on the way when something was saved at `save_at`."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ckpt = deltashard.Checkpointer(
        net, optimizer, url=url, run="cloud", encoding="fp32", arena_bytes=64 << 20
    )
    resumed = ckpt.restore()
    step = resumed.step if resumed else 0
    print(f"resumed {step} {digest(net)}", flush=True)
    while step < steps:
        optimizer.zero_grad()
        rows = torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(step))
        net.top(net.items(rows)).sum().backward()
        optimizer.step()
        step += 1
        ckpt.step()
        print(f"step {step} {digest(net)}", flush=True)
        if step == save_at:
            print(f"saved {ckpt.save().wait(120).step}", flush=True)
        if save_at and step == save_at + 2:
            ckpt.save()  # nobody waits for it
        if save_at and step == save_at + 6:
            os.kill(ckpt.sidecar_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()


def forked(machine: Path, url: str, steps: int, save_at: int = 0) -> None:
    """One life on a machine of its own, what it says in a file there, with how it ended."""
    machine.mkdir()
    pid = os.fork()
    if pid == 0:
        os.environ |= {"XDG_CACHE_HOME": str(machine), "TMPDIR": str(machine)}
        with (machine / "said").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            life(url, steps, save_at)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with (machine / "said").open("a") as out:
        print(f"ended {code}", file=out)


def main() -> None:
    """Each URL's first life, and its second."""
    folder = Path(sys.argv[1])
    for n, url in enumerate(sys.argv[2:]):
        forked(folder / f"first-{n}", url, 20, save_at=10)
        forked(folder / f"second-{n}", url, 16)


if __name__ == "__main__":
    main()
