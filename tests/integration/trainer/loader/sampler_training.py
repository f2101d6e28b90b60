"""A training on a ResumableSampler, in lives that are forked from this process: killed, resumed, with other batches.

Run as a script: `sampler_training.py WORKDIR`. Each life writes what it read (`reads-{n}`), what every step trained on
(`steps-{n}`: step, epoch, samples) and what its `restore()` said (`restored-{n}.json`).
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import deltashard
import torch
import torch._dynamo  # what every child's first optimizer would import
from deltashard.errors import CheckpointMismatch
from torch import nn

SAMPLES = 60
LIVES = [
    # (batch size, workers, persistent, seed, the step to save at, the step to be killed at, 0: train to epoch 3)
    (4, 2, False, 7, 6, 9),
    (4, 0, False, 7, 11, 12),
    (6, 2, True, 7, 18, 20),  # 4 steps of its own epoch, and 3 of the next one
    (5, 1, False, 8, 19, 20),  # another seed: refused, or its epoch begins again
    (5, 2, False, 8, 0, 0),
]


class Items(torch.utils.data.Dataset):
    """Rows of a table; says what is read, from whichever process."""

    def __init__(self, said: int) -> None:
        self.said = said

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> int:
        os.write(self.said, f"{i}\n".encode())
        return i


def train(life: int, work: Path) -> None:
    batch_size, workers, persistent, seed, save_at, kill_at = LIVES[life]
    torch.manual_seed(life)
    net = nn.Embedding(SAMPLES, 4, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = Items(os.open(work / f"reads-{life}", os.O_CREAT | os.O_WRONLY | os.O_APPEND))
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=batch_size,
        sampler=deltashard.ResumableSampler(data, seed=seed),
        num_workers=workers,
        persistent_workers=persistent,
    )
    ckpt = deltashard.Checkpointer(
        net, optimizer, url=work / "store", run="sampled", encoding="fp32", grace_s=None
    )
    loader = ckpt.wrap(loader)
    refused = ""
    try:
        resumed = ckpt.restore(loaders="refuse")
    except CheckpointMismatch as error:
        refused = str(error)
        resumed = ckpt.restore()
    facts = {"refused": refused, "step": resumed.step, "notes": list(resumed.notes)} if resumed else None
    (work / f"restored-{life}.json").write_text(json.dumps(facts))
    with (work / f"steps-{life}").open("w") as steps, ckpt:
        for epoch in range(loader.epoch, 3):
            for batch in loader:
                optimizer.zero_grad()
                net(batch).square().mean().backward()
                optimizer.step()
                print(json.dumps([ckpt.steps + 1, epoch, batch.tolist()]), file=steps, flush=True)
                ckpt.step()
                if ckpt.steps == save_at:
                    ckpt.save().wait(60)
                if ckpt.steps == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    torch.set_num_threads(1)
    work, bad = Path(sys.argv[1]), 0
    for life, facts in enumerate(LIVES):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(life, work)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != (-signal.SIGKILL if facts[-1] else 0):
            print(f"life {life}: exit {status}", flush=True)
            bad += 1
    return bad


if __name__ == "__main__":
    sys.exit(main())
