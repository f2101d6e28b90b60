"""Lives of a training program, for `test_cloud_lives.py`: `cloud_life.py FOLDER URL ...`, two of each URL, forked.

A life resumes where it can, saves at one step, and says of each step what the table's bytes hash to. The life that saved
is killed with its sidecar six steps later, in the middle of whatever they do.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import deltashard
import torch

from tests.support.trainer.toy_loop import Loop


def digest(loop: Loop) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in loop.table())).hexdigest()


def life(url: str, steps: int, save_at: int) -> None:
    """Train to `steps`; die on the way when something was saved at `save_at`."""
    torch.set_num_threads(1)
    loop = Loop(seed=1)
    options = {"run": "cloud", "encoding": "fp32", "arena_bytes": 64 << 20, "state": {"data": loop.generator}}
    ckpt = deltashard.Checkpointer(loop.net, loop.optimizer, url=url, **options)
    ckpt.restore()
    print(f"resumed {ckpt.steps} {digest(loop)}", flush=True)
    while ckpt.steps < steps:
        loop.train(1, ckpt)
        print(f"step {ckpt.steps} {digest(loop)}", flush=True)
        if ckpt.steps == save_at:
            print(f"saved {ckpt.save().wait(120).step}", flush=True)
        if save_at and ckpt.steps == save_at + 2:
            ckpt.save()  # nobody waits for it
        if save_at and ckpt.steps == save_at + 6:
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


if __name__ == "__main__":
    for n, url in enumerate(sys.argv[2:]):
        forked(Path(sys.argv[1]) / f"first-{n}", url, 20, save_at=10)
        forked(Path(sys.argv[1]) / f"second-{n}", url, 16)
