"""What `Checkpointer(...)` refuses before it starts anything: each refusal names the argument and the remedy."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import deltashard
import numpy as np
import pytest
import torch
from deltashard.config import CheckpointConfig, optimizers_of
from deltashard.errors import UserError
from torch import nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", None),
        ("model", {}),
        ("state", [1]),
        ("state", {1: {}}),
        ("url", 3),
        ("url", ""),
        ("run", 7),
        ("every_s", math.nan),
        ("every_s", math.inf),
        ("every_s", -1.0),
        ("every_s", "30"),
        ("every_s", True),
        ("every_steps", -1),
        ("every_steps", 1.5),
        ("every_steps", "10"),
        ("every_steps", True),
        ("goal", 3),
        ("goal", "cheap"),
        ("goal", "overhead=60%"),
        ("goal", ""),
        ("fresh", "no"),
        ("precopy", "yes"),
        ("content_hash", 1),
        ("keep_last", 0),
        ("grace_s", math.nan),
        ("validate", "yes"),
        ("on_event", 1),
        ("recovery", "some"),
        ("recovery", None),
        ("sidecar", ["linger_s"]),
        ("optimizer", "adam"),
        ("optimizer", 3),
        ("optimizer", ["adam"]),
        ("optimizer", nn.Linear(2, 2)),
    ],
)
def test_rubbish_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    """Nothing was started, and the message has the argument and something to do."""
    given: dict[str, Any] = {"model": model(), "url": tmp_path / "store", "run": "run", name: value}
    with pytest.raises(UserError, match=f"{name}= takes ") as caught:
        deltashard.Checkpointer(given.pop("model"), given.pop("optimizer", ()), **given)
    assert caught.value.remedy
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"recovery": "partial"}, "how much may be lost"),
        ({"recovery": "partial", "pls_target": 0.1}, "how much may be lost"),
        ({"recovery": "partial", "pls_target": 0.0, "planned_steps": 10}, "a share above 0"),
        ({"recovery": "partial", "pls_target": 2, "planned_steps": 10}, "a share above 0"),
        ({"recovery": "partial", "pls_target": math.nan, "planned_steps": 10}, "a share above 0"),
        ({"recovery": "partial", "pls_target": 0.1, "planned_steps": 0}, "a whole number, 1 or more"),
        ({"recovery": "partial", "pls_target": 0.1, "planned_steps": 9, "grace_s": None}, "hear of SIGTERM"),
        ({"pls_target": 0.1}, "means nothing without partial recovery"),
        ({"planned_steps": 0}, "a whole number, 1 or more"),
    ],
)
def test_terms_of_partial_recovery_are_whole_or_refused(
    tmp_path: Path, given: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        deltashard.Checkpointer(model(), url=tmp_path / "store", run="run", **given)
    assert caught.value.remedy
    assert not (tmp_path / "store").exists()


def test_a_model_without_memory_is_refused() -> None:
    """On the meta device there is nothing to save, and nothing to restore into."""
    with torch.device("meta"):
        empty = model()
    with pytest.raises(UserError, match=r"0\.weight is on the meta device") as caught:
        deltashard.Checkpointer(empty, url="file:///nowhere", run="r")
    assert "to_empty" in caught.value.remedy


def test_an_optimizer_of_another_model_is_refused() -> None:
    """It would step something else than what is saved; one shared parameter is enough to be taken."""
    mine, other = model(), model()
    with pytest.raises(UserError, match="none of the 4 parameters of Adam belongs to the model") as caught:
        optimizers_of(torch.optim.Adam(other.parameters()), mine)
    assert "this very model's parameters" in caught.value.remedy
    temperature = nn.Parameter(torch.zeros(()))
    partly = torch.optim.SGD([*mine.parameters(), temperature], lr=0.1)
    assert optimizers_of(partly, mine) == [partly]


def test_every_way_to_hand_optimizers_over() -> None:
    """None, one, a list, a dict, a generator, a wrapper that is no Optimizer; a scheduler is none."""
    net = model()
    adam, sgd = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.1)

    class Wrapper:
        def __init__(self) -> None:
            self.inner = adam

        def step(self) -> None:
            self.inner.step()

    wrapper = Wrapper()
    assert optimizers_of(None, net) == optimizers_of((), net) == []
    assert optimizers_of(adam, net) == [adam]
    assert optimizers_of([adam, sgd], net) == [adam, sgd]
    assert optimizers_of({"a": adam, "b": sgd}, net) == [adam, sgd]
    assert optimizers_of((o for o in (adam, sgd)), net) == [adam, sgd]
    assert optimizers_of(wrapper, net) == [wrapper]
    with pytest.raises(UserError, match="schedulers belong in state="):
        optimizers_of(torch.optim.lr_scheduler.ConstantLR(adam), net)
    with pytest.raises(UserError, match="the Adam at 2 was given before"):
        optimizers_of([adam, sgd, adam], net)


def test_numbers_of_every_kind_are_taken() -> None:
    """Whole and real numbers of numpy as well; 0 is off."""
    all_seconds: list[Any] = [None, 0, 0.5, np.float32(3)]
    for seconds in all_seconds:
        CheckpointConfig(model=model(), every_s=seconds)
    counts: list[Any] = [None, 0, 10, np.int64(10)]
    for count in counts:
        CheckpointConfig(model=model(), every_steps=count)


def test_the_config_has_the_arguments_of_the_checkpointer() -> None:
    """Each field by its name and default: what is added to one is added to the other."""
    signature = inspect.signature(deltashard.Checkpointer).parameters.values()
    arguments = {
        each.name: dataclasses.MISSING if each.default is inspect.Parameter.empty else each.default
        for each in signature
    }
    assert arguments == {each.name: each.default for each in dataclasses.fields(CheckpointConfig)}
