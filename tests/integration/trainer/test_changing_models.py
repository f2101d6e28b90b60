"""Models that change during training restore exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltashard
import pytest
import torch
from deltashard.errors import CheckpointMismatch
from torch import nn

from tests.support.checkpointers import checkpointers
from tests.support.trainer.verdict import bits, differing

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

Made = tuple[nn.ModuleDict, torch.optim.Optimizer]


def made(optimizer: Callable[..., Any], *, late: bool = False) -> Made:
    torch.manual_seed(0)
    model = nn.ModuleDict({"films": nn.Embedding(300, 16, sparse=True)})
    if late:
        model["late"] = nn.Embedding(200, 16, sparse=True)
    return model, optimizer(list(model.parameters()))


def train(made: Made, ckpt: deltashard.Checkpointer | None, steps: range) -> None:
    model, optimizer = made
    for step in steps:
        optimizer.zero_grad()
        for table in model.values():
            table(torch.tensor([step, 3 * step + 1, 7])).square().sum().backward()
        optimizer.step()
        if ckpt is not None:
            ckpt.step()


Build = Callable[[Made], deltashard.Checkpointer]


@pytest.fixture
def checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    with checkpointers(tmp_path, monkeypatch, encoding="fp32") as make:
        yield lambda made: make(SimpleNamespace(net=made[0], optimizer=made[1]))


def same(a: Made, b: Made) -> None:
    one, other = ({"model": m.state_dict(), "state": [*map(o.state.get, m.parameters())]} for m, o in (a, b))
    assert differing(bits("", one), bits("", other)) == []


def test_added_table_and_replaced_module_are_saved(
    checkpointer: Build,
) -> None:
    """The next commit holds them in full, later ones their changes.

    A program that builds them restores the same bits.
    """
    kind = torch.optim.Adagrad
    changing = made(kind)
    model, optimizer = changing
    with checkpointer(changing) as ckpt:
        assert ckpt.restore() is None
        train(changing, ckpt, range(2))
        ckpt.save().wait(60)
        model["late"] = nn.Embedding(200, 16, sparse=True)
        optimizer.add_param_group({"params": [model["late"].weight]})
        optimizer.state[model["late"].weight] = {"step": torch.tensor(0.0), "sum": torch.zeros(200, 16)}
        train(changing, ckpt, range(2, 4))
        assert ckpt.save().wait(60).baseline
        old, model["films"] = model["films"].weight, nn.Embedding(300, 16, sparse=True)
        optimizer.param_groups[0]["params"] = [model["films"].weight]
        optimizer.state[model["films"].weight] = optimizer.state.pop(old)
        train(changing, ckpt, range(4, 6))
        ckpt.save().wait(60)
        train(changing, ckpt, range(6, 8))
        ckpt.save().wait(60)

    def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind([{"params": [p]} for p in params])

    resumed = made(grouped, late=True)
    with checkpointer(resumed) as ckpt:
        restored = ckpt.restore()
        assert restored.step == 8
        same(changing, resumed)
        train(changing, None, range(8, 10))
        train(resumed, ckpt, range(8, 10))
    same(changing, resumed)


def test_grown_table_and_replaced_optimizer_are_in_next_baseline(
    checkpointer: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart that builds both restores them. A restart with the old model is refused, with both shapes."""

    def grown(made: Made) -> None:
        old = made[0]["films"]
        made[0]["films"] = nn.Embedding(350, 16, sparse=True)
        made[0]["films"].weight.data[: len(old.weight)] = old.weight.data

    model, first = made(torch.optim.SparseAdam)
    held: list[torch.optim.Optimizer] = [first]
    with checkpointer((model, held)) as ckpt:  # type: ignore[arg-type]  # the script changes this list later
        assert ckpt.restore() is None
        train((model, held[0]), ckpt, range(2))
        ckpt.save().wait(60)
        grown((model, first))
        held[0] = torch.optim.Adagrad(model.parameters(), lr=0.1)
        train((model, held[0]), ckpt, range(2, 4))
        ckpt.save()
        train((model, held[0]), ckpt, range(4, 6))
        commit = ckpt.save().wait(60)
        assert commit.step == 6
    assert "an optimizer was replaced during training" in caplog.text
    assert "films.weight changed from (300, 16) to (350, 16)" in caplog.text
    with (
        checkpointer(made(torch.optim.Adagrad)) as ckpt,
        pytest.raises(CheckpointMismatch, match=r"shrank: \[350, 16\] is stored"),
    ):
        ckpt.restore()
    resumed = made(torch.optim.Adagrad)
    grown(resumed)
    resumed = resumed[0], torch.optim.Adagrad(resumed[0].parameters(), lr=0.1)
    with checkpointer(resumed) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.exact, restored.notes) == (6, True, ())
    same((model, held[0]), resumed)
