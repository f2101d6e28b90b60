"""The snippets of docs/how-to run, in each page's order and against one store for each page.

The info string of a fence decides what happens to its snippet:

    python                      runs here, with a new model and optimizer, as in a new process
    python title="NAME.py"      is written to the file NAME.py, for the commands that follow
    bash                        runs in bash, and must exit with 0
    ... title="needs ..."       runs after the step of PREPARATIONS that the title names
    text, yaml                  is output, or configuration: nothing to run

s3://bucket/prefix is a directory here. A page whose first snippet is a command starts with a trained run, `dlrm`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import deltashard
import pytest
import torch
from deltashard_cli.main import cli
from torch.utils.data import DataLoader

from tests.support.tool import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

PAGES = sorted((ROOT / "docs/how-to").glob("*.md"))
FENCE = re.compile(r"^```(\w*) *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "s3://bucket/prefix"


class SnippetModel(torch.nn.Module):
    """A table and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(32, 8, sparse=True)
        self.top = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.items(ids))


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block of a page."""

    language: str
    title: str
    text: str

    @property
    def preparation(self) -> str:
        """Name of the step of PREPARATIONS before this snippet; empty: none."""
        return self.title.removeprefix("needs ") if self.title.startswith("needs ") else ""


def snippets(page: Path) -> list[Snippet]:
    """Return the fenced blocks of a page; an info string must be one that this module's docstring lists."""
    found = []
    for language, info, text in FENCE.findall(page.read_text()):
        title = re.fullmatch(r'title="(.+)"', info)
        assert language in ("python", "bash", "text", "yaml"), f"{page.name}: ```{language}"
        assert bool(title) == bool(info), f"{page.name}: ```{language} {info}"
        found.append(Snippet(language, title.group(1) if title else "", text))
    return found


@dataclass(frozen=True, slots=True)
class Workplace:
    """Directory of a page's store and files."""

    directory: Path

    def run(self, snippet: Snippet) -> None:
        """Run one snippet, or write it to its file."""
        text = snippet.text.replace(URL, f"file://{self.directory}/store")
        if snippet.language in ("text", "yaml"):
            return
        if snippet.preparation:
            PREPARATIONS[snippet.preparation](self.directory / "store")
        if snippet.language == "bash":
            self._run_bash(text)
        elif snippet.title and not snippet.preparation:
            (self.directory / snippet.title).write_text(text)
        else:
            exec(text, names())

    def _run_bash(self, text: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.directory,
            env=os.environ
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def empty_newest_log_entry(store: Path) -> None:
    """Damage the log of the run `dlrm`."""
    max((store / "dlrm/log").glob("0*.json")).write_bytes(b"")


PREPARATIONS = {"a damaged log": empty_newest_log_entry}


def names() -> dict[str, Any]:
    """Return the names that Python snippets use without defining them."""
    model = SnippetModel()
    return {
        "deltashard": deltashard,
        "torch": torch,
        "DataLoader": DataLoader,
        "model": model,
        "optimizer": torch.optim.Adagrad(model.parameters()),
        "data": torch.arange(32),
        "loss": lambda scores: scores.square().mean(),
    }


TRAINED = Snippet(
    "python",
    "",
    """
with deltashard.Checkpointer(model, optimizer, url="s3://bucket/prefix", run="dlrm") as ckpt:
    ckpt.restore()
    for batch in DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
        ckpt.step()
        if ckpt.steps < 8:  # close() saves the last step, which records the end of the trainer
            ckpt.save().wait()
""",
)
"""A run with eight checkpoints, at the steps 1 to 8."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DELTASHARD_SOCKET", raising=False)
    found, workplace = snippets(page), Workplace(tmp_path)
    if any("torchrec" in snippet.text for snippet in found):
        pytest.importorskip("torchrec")
    if found and found[0].language == "bash":
        workplace.run(TRAINED)
    for snippet in found:
        workplace.run(snippet)


GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("stores", "distributed", "operations", "deciding")]


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: page.stem)
def test_commands_in_sentences_exist(page: Path) -> None:
    """A command that a sentence or table names exists and has the options that follow it."""
    for name, rest in re.findall(r"`deltashard (\w+)([^`]*)`", page.read_text()):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--?\w[\w-]*", rest)) <= options, f"deltashard {name}{rest}"


def test_pages_are_short() -> None:
    """Each page covers one task in at most 350 words, not counting code."""
    words = {
        page.stem: len(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).split()) for page in PAGES
    }
    assert {page: count for page, count in words.items() if count > 350} == {}
