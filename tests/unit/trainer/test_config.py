"""Arguments that `Checkpointer(...)` and `save()` refuse before anything starts, with the argument and the remedy."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import deltashard
import pytest
import torch
from deltashard.config import MAX_METADATA, CheckpointConfig, check_pin, optimizers_of, stored_metadata
from deltashard.errors import UserError
from torch import nn


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


INVALID_ARGUMENTS: dict[str, list[Any]] = {
    "model": [None, {}],
    "state": [[1], {1: {}}],
    "url": [3, ""],
    "run": [7],
    "every_s": [math.nan, math.inf, -1.0, "30", True],
    "every_steps": [-1, 1.5, "10", True],
    "goal": [3, "cheap", "overhead=60%", ""],
    "fresh": ["no"],
    "precopy": ["yes"],
    "content_hash": [1],
    "keep_last": [0],
    "grace_s": [math.nan],
    "validate": ["yes"],
    "on_event": [1],
    "recovery": ["some", None],
    "sidecar": [["linger_s"]],
    "optimizer": ["adam", 3, ["adam"], nn.Linear(2, 2)],
}
TERMS: list[tuple[dict[str, Any], str]] = [
    ({}, "share of samples that may be lost"),
    ({"pls_target": 0.1}, "share of samples that may be lost"),
    ({"pls_target": 0.0, "planned_steps": 10}, "a share above 0"),
    ({"pls_target": 2, "planned_steps": 10}, "a share above 0"),
    ({"pls_target": math.nan, "planned_steps": 10}, "a share above 0"),
    ({"pls_target": 0.1, "planned_steps": 0}, "a whole number, 1 or more"),
    ({"pls_target": 0.1, "planned_steps": 9, "grace_s": None}, "needs a SIGTERM handler"),
    ({"recovery": "full", "pls_target": 0.1}, "has no effect without partial recovery"),
    ({"recovery": "full", "planned_steps": 0}, "a whole number, 1 or more"),
]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        *(({name: each}, f"{name}= takes ") for name, values in INVALID_ARGUMENTS.items() for each in values),
        *(({"recovery": "partial"} | given, what) for given, what in TERMS),
    ],
)
def test_invalid_arguments_are_refused_by_name(tmp_path: Path, given: dict[str, Any], what: str) -> None:
    options: dict[str, Any] = {"model": model(), "url": tmp_path / "store", "run": "run", **given}
    with pytest.raises(UserError, match=what) as caught:
        deltashard.Checkpointer(options.pop("model"), options.pop("optimizer", ()), **options)
    assert caught.value.remedy
    assert not (tmp_path / "store").exists()


def test_meta_model_and_missing_store_are_refused() -> None:
    """A model on the meta device has no data to save or to restore into."""
    with torch.device("meta"):
        empty = model()
    with pytest.raises(UserError, match=r"0\.weight is on the meta device") as caught:
        deltashard.Checkpointer(empty, url="file:///nowhere", run="r")
    assert "to_empty" in caught.value.remedy
    with pytest.raises(UserError, match="url"):
        deltashard.Checkpointer(model(), run="r")


def test_optimizers_argument_accepts_every_form_and_names_refused_ones() -> None:
    net = model()
    adam, sgd = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.1)

    class StepWrapper:
        def __init__(self) -> None:
            self.inner = adam

        def step(self) -> None:
            self.inner.step()

    wrapper = StepWrapper()
    assert optimizers_of(None, net) == optimizers_of((), net) == []
    for given in ([adam, sgd], {"a": adam, "b": sgd}, (o for o in (adam, sgd))):
        assert optimizers_of(given, net) == [adam, sgd]
    assert optimizers_of(wrapper, net) == [wrapper]
    partly = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(()))], lr=0.1)
    assert optimizers_of(partly, net) == [partly]
    for refused, what in (
        (torch.optim.lr_scheduler.ConstantLR(adam), "schedulers belong in state="),
        ([adam, sgd, adam], "the Adam at position 2 was given before"),
        (torch.optim.Adam(model().parameters()), "none of the 4 parameters of Adam belongs to the model"),
    ):
        with pytest.raises(UserError, match=what):
            optimizers_of(refused, net)


def test_config_fields_match_checkpointer_arguments() -> None:
    arguments = {
        each.name: dataclasses.MISSING if each.default is inspect.Parameter.empty else each.default
        for each in inspect.signature(deltashard.Checkpointer).parameters.values()
    }
    assert arguments == {each.name: each.default for each in dataclasses.fields(CheckpointConfig)}


@pytest.mark.parametrize(
    "metadata",
    [
        {"": "x"},
        {" auc": "x"},
        {"a\nb": "x"},
        {"n" * 201: "x"},
        {"surrogate": "\ud800"},
        {"\ud800": "x"},
        {"long": "x" * (MAX_METADATA + 1)},
        {str(i): "x" * 1000 for i in range(100)},
        [("auc", 1)],
        {"deltashard/directive": "{}"},  # reserved: the sidecar records directives under this prefix
    ],
)
def test_invalid_metadata_is_refused_at_save(metadata: Any) -> None:
    """The caller gets the error. A later refusal would fail every save or commit."""
    assert stored_metadata({"auc": 0.8, "deltashard": "fine"}) == {"auc": "0.8", "deltashard": "fine"}
    assert stored_metadata(None) == {}
    with pytest.raises(UserError, match="metadata"):
        stored_metadata(metadata)


@pytest.mark.parametrize("pin", ["", " best", "best ", "a\tb", "\ud800", "p" * 201, 7])
def test_invalid_pins_are_refused_at_save(pin: object) -> None:
    check_pin(None)
    check_pin("epoch 3/best-auc: 0.8, größte")
    with pytest.raises(UserError, match="pin= takes 1 to 200 printable characters"):
        check_pin(pin)
