"""The expected state of every step: the same training without deltashard and without failures, and the store read directly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.log.entry import Checkpoint
from deltashard_checkpoint.stores.url import open_store

from tests.cluster.trainers.model import RecommenderTraining, digest_of
from tests.support.machine import limit_s


class Reference:
    """Trains on demand, in this process; keeps a digest of everything and one of the weights, by step."""

    def __init__(self) -> None:
        self._training = RecommenderTraining()
        self._batches = iter(self._training.loader)
        self._step = 0
        self._digests: dict[int, str] = {}
        self._weights: dict[int, str] = {}

    def _advance(self) -> None:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = iter(self._training.loader)
            batch = next(self._batches)
        self._training.train(batch)
        self._step += 1
        self._digests[self._step] = self._training.digest()
        self._weights[self._step] = digest_of(self._training.model.state_dict())

    def digest(self, step: int) -> str:
        while self._step < step:
            self._advance()
        return self._digests[step]

    def weights_digest(self, step: int) -> str:
        self.digest(step)
        return self._weights[step]

    @property
    def names(self) -> list[str]:
        return sorted(self._training.model.state_dict())


def checkpoints(url: str, run: str) -> list[Checkpoint]:
    """Return the live checkpoints of a run, oldest first, from the log only."""
    with open_store(url) as store:
        state = RunLog(store, run).refresh()
    return [state.checkpoints[seq] for seq in sorted(state.checkpoints)]


def newest_step(url: str, run: str) -> int:
    """Step of the newest committed checkpoint; 0 when there is none."""
    found = checkpoints(url, run)
    return found[-1].step if found else 0


def command_line(*arguments: str) -> dict[str, Any]:
    """Run `deltashard ... --json`, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "deltashard_cli.main", *arguments, "--json"],
        capture_output=True, text=True, timeout=limit_s(120), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def exported(url: str, run: str, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (step, weights) of the newest checkpoint, as the command line exports them.

    The command chooses the checkpoint: training may continue, and a checkpoint named earlier may be deleted.
    """
    file = folder / "newest.pt"
    result = command_line("export", url, str(file), "--run", run, "--force")
    found: dict[str, torch.Tensor] = torch.load(file)
    return int(result["step"]), found
