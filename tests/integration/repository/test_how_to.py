"""Every Python snippet of docs/how-to runs, in the page's order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.tool import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

PAGES = sorted((ROOT / "docs/how-to").glob("*.md"))


class SnippetModel(torch.nn.Module):
    """A table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(32, 8, sparse=True)
        self.top = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.items(ids))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs with a new model and optimizer, as in a new process, on the store of the blocks before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        model = SnippetModel()
        names: dict[str, Any] = {
            "deltashard": deltashard,
            "torch": torch,
            "DataLoader": DataLoader,
            "model": model,
            "optimizer": torch.optim.Adagrad(model.parameters()),
            "data": torch.arange(32),
            "loss": lambda scores: scores.square().mean(),
        }
        exec(block.replace("s3://bucket/prefix", f"file://{tmp_path}/store"), names)


def test_pages_are_short() -> None:
    """Each page covers one task in at most 350 words, not counting code."""
    words = {
        page.stem: len(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split()) for page in PAGES
    }
    assert {page: count for page, count in words.items() if count > 350} == {}
