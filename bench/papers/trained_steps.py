"""The demo's training on real data with timed steps and recorded saves; a neighbour; and a training to be killed.

The killed training is forked off a process that has imported torch: each start takes little time. It trains forever and
writes its progress into a file in memory, which survives a SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from demo_training import BATCH, DemoTraining, pair_table_rows
from save_costs import TimedSave

FIELDS = (
    "restored", "step", "snapshot_step", "committed", "snapshots", "commits", "longest_gap", "longest_flight",
)  # fmt: skip
"""Fields of a killed trainer's record, int64 each: steps, and counts of this life."""
NEVER = -1
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["torch", "deltashard", "baskets", "model", "trained_steps"])


class EndlessTraining(DemoTraining):
    """The demo's model and optimizers on its real data, epoch after epoch."""

    def __init__(self, seed: int = 5) -> None:
        import baskets

        retail = baskets.load()
        super().__init__(retail, seed)
        self._loader = baskets.training_loader(retail, batch_size=BATCH, seed=seed)
        self.epoch_steps = len(self._loader)
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def step(self) -> None:
        self.train(next(self._batches))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
        }

    @property
    def bytes(self) -> int:
        tensors = [*self.model.state_dict().values()]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if hasattr(value, "nbytes")]
        return sum(tensor.nbytes for tensor in tensors)


class StepTrace:
    """Steps of a training and its saves, as its own thread observes them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.ended_s: list[float] = []
        """Unix seconds at each step's end."""
        self.saves: list[TimedSave] = []
        self.durable_s: list[float] = []
        self.stalls_s: list[float] = []
        self.failures = 0
        self._by_step: dict[int, TimedSave] = {}

    def on_event(self, name: str, facts: Any) -> None:
        """Record an event of `Checkpointer(on_event=)`, which is called within the timed step."""
        at = len(self.seconds)
        if name == "snapshot":
            self._by_step[facts["step"]] = save = TimedSave(snapshot=at)
            self.saves.append(save)
            self.stalls_s.append(facts["stall_s"])
        elif name == "committed" and (found := self._by_step.get(facts["commit"].step)) is not None:
            found.durable = at
            self.durable_s.append(facts["commit"].durable_s)
        elif name == "save_failed":
            self.failures += 1

    def saved(self, seconds: float) -> None:
        """Record a save that blocked training until it was durable, in the timed step."""
        at = len(self.seconds)
        self.saves.append(TimedSave(snapshot=at, durable=at))
        self.stalls_s.append(seconds)
        self.durable_s.append(seconds)

    @property
    def commits(self) -> int:
        return len(self.durable_s)

    def step(self, training: EndlessTraining, end: Callable[[], object] = lambda: None) -> float:
        begun = time.perf_counter()
        training.step()
        end()
        self.seconds.append(time.perf_counter() - begun)
        self.ended_s.append(time.time())
        return self.seconds[-1]

    def run(
        self,
        training: EndlessTraining,
        end: Callable[[], object],
        *,
        seconds: float,
        stop_when: Callable[[], bool] = lambda: False,
    ) -> tuple[int, int]:
        """Train for a time or until `stop_when`; return the first and the last step + 1."""
        first, until = len(self.seconds), time.monotonic() + seconds
        while time.monotonic() < until and not stop_when():
            self.step(training, end)
        return first, len(self.seconds)


class DecisionLog:
    """A sidecar's decisions, read from its log as it grows."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0
        self._rest = ""
        self.found: list[dict[str, Any]] = []
        """Each with `at_s` (Unix seconds), `interval` in words, `cause` and `why`."""

    def read(self) -> list[dict[str, Any]]:
        with self._log.open() as log:
            log.seek(self._at)
            text = self._rest + log.read()
            self._at = log.tell()
        *lines, self._rest = text.split("\n")
        self.found += [found for line in lines if (found := parse_decision(line)) is not None]
        return self.found


def parse_decision(line: str) -> dict[str, Any] | None:
    if '"interval.decided"' not in line:
        return None
    try:
        entry = json.loads(line)
        if entry["event"] != "interval.decided":
            return None
        at = datetime.fromisoformat(entry["timestamp"])
        return {"at_s": at.timestamp()} | {key: str(entry[key]) for key in ("interval", "cause", "why")}
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class CpuUsage:
    """Processor time since creation: ours (with ended children), and that of all other processes."""

    def __init__(self) -> None:
        self._begun = self._now()

    def _now(self) -> tuple[float, float, float]:
        ours = os.times()
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        busy = sum(map(int, fields)) - int(fields[3]) - int(fields[4])
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(ours[:4])

    def found(self) -> dict[str, float]:
        """Return shares of all processors' time: ours and other processes'; and the load average."""
        wall_s, busy_s, ours_s = (now - then for now, then in zip(self._now(), self._begun, strict=True))
        all_s = max(wall_s, 1e-9) * (os.cpu_count() or 1)
        return {
            "ours": ours_s / all_s,
            "others": max(0.0, busy_s - ours_s) / all_s,
            "load": os.getloadavg()[0],
        }


# A training that is killed


class TrainerRecord:
    """A trainer's progress, in a file that both processes map; it outlives the trainer."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(np.full(len(FIELDS), NEVER, np.int64).tobytes())
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(FIELDS))
        self._values = np.frombuffer(self._map, np.int64)

    def begin(self, restored: int) -> None:
        """Start a life after step `restored`; 0: at the beginning."""
        for name in FIELDS[1:]:
            self.set(name, restored if name in ("step", "snapshot_step", "committed") else 0)
        self.set("restored", restored)  # written last: it marks the other words as valid

    def set(self, name: str, value: int) -> None:
        """Write one word, atomically even if this process is killed."""
        self._values[FIELDS.index(name)] = value

    def get(self, name: str) -> int:
        return int(self._values[FIELDS.index(name)])

    def all(self) -> dict[str, int]:
        return {name: self.get(name) for name in FIELDS}

    # The trainer installs these.

    def on_event(self, name: str, facts: Any) -> None:
        if name == "snapshot":
            self.set("longest_gap", max(self.get("longest_gap"), facts["step"] - self.get("snapshot_step")))
            self.set("snapshot_step", facts["step"])
            self.set("snapshots", self.get("snapshots") + 1)
        elif name == "committed":
            flight = self.get("step") - facts["commit"].step
            self.set("longest_flight", max(self.get("longest_flight"), flight))
            self.set("committed", facts["commit"].step)
            self.set("commits", self.get("commits") + 1)


class KilledTrainer:
    """A trainer process that is killed, under the sidecar of `DELTASHARD_SOCKET`; a context manager."""

    def __init__(self, record: Path, *, pair_rows: int) -> None:
        self._path = record
        self._pair_rows = pair_rows

    def __enter__(self) -> Self:
        self._path.unlink(missing_ok=True)
        self.record = TrainerRecord(self._path)
        # The server's environment is from its own start.
        self.process = _forkserver.Process(
            target=train, args=(os.environ["DELTASHARD_SOCKET"], self._path, self._pair_rows), daemon=True
        )
        self.process.start()
        return self

    def until(self, what: Callable[[TrainerRecord], bool], *, seconds: float) -> bool:
        """Wait at most this long and return whether it happened. Raises `RuntimeError` if the trainer ended."""
        end = time.monotonic() + seconds
        while not (self.record.get("restored") != NEVER and what(self.record)):
            if not self.process.is_alive():
                raise RuntimeError(f"the trainer ended by itself, exit code {self.process.exitcode}")
            if time.monotonic() > end:
                return False
            time.sleep(0.0005)
        return True

    def kill(self) -> dict[str, int]:
        self.process.kill()
        self.process.join()
        return self.record.all()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


def train(socket: str, path: Path, pair_rows: int) -> None:
    import deltashard
    import torch

    os.environ["DELTASHARD_SOCKET"] = socket
    torch.set_num_threads(1)
    record = TrainerRecord(path)
    with pair_table_rows(pair_rows):
        training = EndlessTraining()
        ckpt = deltashard.Checkpointer(training.model, training.optimizers, on_event=record.on_event)
        resumed = ckpt.restore()
        step = resumed.step if resumed else 0
        record.begin(step)
        while True:
            training.step()
            step += 1
            record.set("step", step)  # before any snapshot can be taken there
            ckpt.step()
