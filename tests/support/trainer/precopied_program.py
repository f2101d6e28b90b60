"""A program with a real sidecar that keeps each snapshot's content, and compares each checkpoint with it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deltashard
import torch
from deltashard.snapshot import precopy
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from torch import nn

from tests.support.eventually import eventually


class PrecopiedProgram:
    """Tables, each under an optimizer, and a dense layer under another one."""

    def __init__(
        self, folder: Path, tables: Mapping[str, nn.Module], optimizers: Sequence[Any], top: nn.Module, **options: Any
    ) -> None:  # fmt: skip
        self.folder, self.tables, self.top, self.optimizers = folder, tables, top, optimizers
        self.model = nn.ModuleDict({**tables, "top": top})
        self.snapshots: dict[int, dict[str, torch.Tensor]] = {}
        self.messages: list[tuple[str, dict[str, Any]]] = []
        options = {"arena_bytes": 64 << 20, "keep_last": 100, "encoding": "fp32", "grace_s": None} | options
        self.ckpt = deltashard.Checkpointer(
            self.model, optimizers, url=folder / "store", run="r", on_event=self._on_event, **options
        )
        self.ckpt.restore()

    def _on_event(self, name: str, facts: Any) -> None:
        self.messages.append((name, dict(facts)))
        if name == "snapshot":
            self.snapshots[facts["step"]] = self.on_snapshot()

    def on_snapshot(self) -> dict[str, torch.Tensor]:
        """Return the state to compare later; called on the training thread at each snapshot."""
        return self.state()

    def state(self) -> dict[str, torch.Tensor]:
        found = {"top.weight": self.top.weight}
        for (name, table), optimizer in zip(self.tables.items(), self.optimizers, strict=False):
            found[f"{name}.weight"] = table.weight
            for key, value in optimizer.state.get(table.weight, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and len(value) == len(table.weight):
                    found[f"{name}.weight {key}"] = value
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    @property
    def copying(self) -> precopy.Precopy | None:
        return self.ckpt._outcomes.precopy._now

    def wait_for_copy(self) -> None:
        if (now := self.copying) is not None:
            eventually(lambda: now.done, what="the copy")

    def wait_idle(self) -> None:
        """Wait until no save is in flight, and the copying thread is idle."""
        self.ckpt._outcomes.drain(float("inf"))
        for job in (self.ckpt._outcomes.comparison.job, self.ckpt._program.tracking._sampling):
            if job is not None:
                job.exception(60)

    def newest(self) -> Any:
        return RunLog(open_store(f"file://{self.folder / 'store'}"), "r").refresh().newest()

    def check(self) -> None:
        """Check that every existing checkpoint equals the snapshot of its step, bit for bit."""
        entries = RunLog(open_store(f"file://{self.folder / 'store'}"), "r").refresh().checkpoints
        assert entries
        for seq, entry in entries.items():
            with deltashard.open_checkpoint(self.folder / "store", "r", which=f"seq:{seq}") as stored:
                snapshot = {name: tensor.cpu() for name, tensor in self.snapshots[entry.step].items()}
                assert torch.equal(stored.dense["top.weight"], snapshot.pop("top.weight")), entry.step
                for name, table in self.tables.items():
                    rows = stored.rows(f"{name}.weight", torch.arange(len(table.weight)))
                    held = {f"{name}.weight": rows.weights}
                    held |= {f"{name}.weight {key}": value for key, value in rows.state.items()}
                    for key, value in held.items():
                        assert torch.equal(value.view(-1), snapshot.pop(key).view(-1)), (entry.step, key)
                assert not snapshot, "parts of the snapshot that the checkpoint lacks"
