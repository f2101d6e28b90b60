"""The README's two scripts run, and differ only in the lines that deltashard needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard_checkpoint.log.commit_log import RunLog
from deltashard_checkpoint.stores.url import open_store
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[3]
STEPS = 6

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class ReadmeModel(torch.nn.Module):
    """A table and a dense layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.EmbeddingBag(200, 8, sparse=True)
        self.top = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.items(ids))


def blocks() -> tuple[str, str]:
    without, with_it = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return without, with_it


def run(script: str, **more: Any) -> dict[str, Any]:
    """Run the script with a test model, data and loss, fewer steps, and another store."""
    assert "100_000" in script
    names = {
        "DLRM": ReadmeModel,
        "Adagrad": torch.optim.Adagrad,
        "DataLoader": DataLoader,
        "data": torch.arange(24).view(STEPS, 4),
        "loss": lambda scores: scores.square().mean(),
        **more,
    }
    exec(script.replace("100_000", str(STEPS)), names)
    return names


def test_both_scripts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the plain script, the script with checkpoints, and the latter again after its last step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    without, with_it = blocks()
    assert run(without)["step"] == STEPS
    with_it = with_it.replace("s3://bucket/prefix", f"file://{tmp_path}/store")
    for resumed in (None, STEPS):
        names = run(with_it, deltashard=deltashard)
        assert names["step"] == STEPS
        assert (names["resumed"] and names["resumed"].step) == resumed
    newest = RunLog(open_store(f"file://{tmp_path}/store"), "dlrm").refresh().newest()
    assert newest.step == STEPS
