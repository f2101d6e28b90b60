"""SIGKILLs of the sidecar while its trainer attaches, opens an attempt and restores, at random instants.

`attach_kills.py WORKDIR COUNT [SEED]`, run as a script: lives of one program, one after the other. In each the
sidecar is killed once in every phase, a random while after the phase began; the program catches nothing, and its
`close()` makes the last step durable. Prints one JSON line a life, and one at the end: kills by the phase that they hit,
and the longest life.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltashard
import torch
from deltashard.attach.launcher import normal_url, runtime_dir
from deltashard.attach.session import Link, SidecarSession
from deltashard.restore import frame_stream
from torch import nn

RUN = "kills"
ROWS, COLUMNS = 60_000, 64
LONGEST_S = {"attach": 2.5, "open": 0.08, "restore": 0.25}
"""A kill comes so long after its phase began, at most."""


class Phases:
    """Which call of the trainer is under way: set by wrappers around the calls themselves."""

    def __init__(self) -> None:
        self.now = ""
        self._changed = threading.Condition()

    def within(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*positional: Any, **named: Any) -> Any:
            with self._changed:
                before, self.now = self.now, name
                self._changed.notify_all()
            try:
                return call(*positional, **named)
            finally:
                self.now = before

        return wrapped

    def wait_for(self, name: str, over: threading.Event) -> bool:
        """Whether the phase began before it was all `over`."""
        with self._changed:
            while self.now != name and not over.is_set():
                self._changed.wait(0.005)
        return not over.is_set()


class Killer(threading.Thread):
    """One kill in each phase, in order."""

    def __init__(self, phases: Phases, runtime: Path, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.hit: Counter[str] = Counter()
        self._phases, self._runtime, self._chance = phases, runtime, chance

    def run(self) -> None:
        for phase, longest_s in LONGEST_S.items():
            killed = False
            while not killed and self._phases.wait_for(phase, self.over):
                time.sleep(self._chance.uniform(0.0, longest_s))
                instant = self._phases.now or "between"
                killed = self._kill()
                self.hit[instant] += killed

    def _kill(self) -> bool:
        """Whether there was a sidecar: one that is only being started counts."""
        killed = False
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"deltashard_sidecar.main" in words and os.fsencode(self._runtime) in words:
                os.kill(int(folder.name), signal.SIGKILL)
                killed = True
        return killed


class Program:
    """A table with row-wise state and a dense layer, under a Checkpointer."""

    def __init__(self, url: str) -> None:
        torch.manual_seed(1)
        self.table = nn.Embedding(ROWS, COLUMNS, sparse=True)
        self.top = nn.Linear(COLUMNS, 1)
        self.optimizers = [
            torch.optim.Adagrad(self.table.parameters(), lr=0.1),
            torch.optim.Adam(self.top.parameters(), lr=0.01),
        ]
        self.ckpt = deltashard.Checkpointer(
            nn.ModuleDict({"table": self.table, "top": self.top}),
            self.optimizers,
            url=url,
            run=RUN,
            encoding="fp32",
            arena_bytes=64 << 20,
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.top(self.table(torch.randint(ROWS, (64, 8))).mean(1)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.ckpt.step()

    def state(self) -> list[torch.Tensor]:
        """Copies of all that must come back."""
        found = [self.table.weight, *self.top.parameters()]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in found]


def first_life(url: str) -> tuple[int, list[torch.Tensor]]:
    program = Program(url)
    program.ckpt.restore()
    program.train(3)
    program.ckpt.save().wait(120)
    kept = program.ckpt.steps, program.state()
    program.ckpt.close()
    return kept


def life(url: str, kept: tuple[int, list[torch.Tensor]], killer: Killer) -> tuple[int, list[torch.Tensor]]:
    """Attach and restore under kills, exactly; train on, and make that durable."""
    killer.start()
    program = Program(url)
    restored = program.ckpt.restore()
    killer.over.set()
    killer.join()
    assert restored is not None
    assert restored.step == kept[0]
    assert all(map(torch.equal, program.state(), kept[1]))
    program.train(2)
    kept = program.ckpt.steps, program.state()
    program.ckpt.close()
    return kept


def main() -> int:
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    torch.set_num_threads(1)
    url, count = normal_url(Path(sys.argv[1]) / "store"), int(sys.argv[2])
    chance = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    phases, hit, longest_s, lives = Phases(), Counter[str](), 0.0, 0
    kept = first_life(url)
    SidecarSession._attach = phases.within("attach", SidecarSession._attach)
    Link.open = phases.within("open", Link.open)
    frame_stream.read_frames = phases.within("restore", frame_stream.read_frames)
    while hit.total() < count:
        killer = Killer(phases, runtime_dir(url, RUN), chance)
        began_s = time.monotonic()
        kept = life(url, kept, killer)
        lives += 1
        hit += killer.hit
        longest_s = max(longest_s, time.monotonic() - began_s)
        print(json.dumps({"life": lives, "hit": killer.hit}), flush=True)
    done = {"lives": lives, "kills": hit.total(), "hit": hit, "longest_s": round(longest_s, 1)}
    print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
