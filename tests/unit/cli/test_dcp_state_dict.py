"""Assignment of state-dict values to the model or the optimizer, by position or by request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltashard_checkpoint.errors import UserError
from deltashard_cli.dcp.reader import Contents, StoredObject, StoredTensor, TensorPlace
from deltashard_cli.dcp.state_dict import classify

T = object()
"""Represents a tensor."""
MODEL = {"emb.weight": T, "top.bias": T}
OPTIM = {
    "state": {"emb.weight": {"sum": T, "step": T}},
    "param_groups": [{"lr": 0.1, "params": ["emb.weight"]}],
}


def contents(tree: Any) -> Contents:
    """Flatten a state dict as DCP does; a list of plain values is one value."""
    values: dict[Any, StoredTensor | StoredObject] = {}

    def visit(path: tuple[str | int, ...], value: Any) -> None:
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value)):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                visit((*path, key), each)
        elif value is T:
            values[path] = StoredTensor(name=".".join(map(str, path)), dtype="float32", shape=(1,), chunks=())
        else:
            place = TensorPlace(file=Path("x"), offset=0, length=1)
            values[path] = StoredObject(name=".".join(map(str, path)), place=place)

    visit((), tree)
    return values


@pytest.mark.parametrize(
    ("tree", "model", "left_out"),
    [
        (MODEL, None, ()),
        ({"model": MODEL}, None, ()),
        ({"model": MODEL, "ema": MODEL, "seen": T}, None, ("ema.emb.weight", "ema.top.bias", "seen")),
        ({"app": {"model": MODEL, "optim": OPTIM}, "epoch": 3}, None, ("epoch",)),
        ({"net": MODEL, "optim": OPTIM}, None, ()),
        (MODEL | {"optimizer": OPTIM}, None, ()),
        (MODEL | OPTIM, None, ()),
        (MODEL | {"ema": MODEL}, None, ("ema.emb.weight", "ema.top.bias")),
        (MODEL | {"ema": MODEL}, "ema", ("emb.weight", "top.bias")),
        ({"model": {f"module.{name}": T for name in MODEL}}, "model.module", ()),
        ({"a": {"model": MODEL}, "b": {"model": {"x": T}}}, "a.model", ("b.model.x",)),
        ({f"model.{name}": T for name in MODEL}, "model", ()),
    ],
)
def test_model_tensors_are_found(tree: Any, model: str | None, left_out: tuple[str, ...]) -> None:
    found = classify(contents(tree), model)
    assert found.model.keys() == MODEL.keys()
    assert found.left_out == left_out


@pytest.mark.parametrize("tree", [{"a": MODEL, "b": MODEL}, {"a": {"model": MODEL}, "b": {"model": MODEL}}])
def test_ambiguous_model_location_must_be_specified(tree: Any) -> None:
    with pytest.raises(UserError, match="the model's state dict is ambiguous") as refused:
        classify(contents(tree), None)
    assert "--model with one of: 'a" in refused.value.remedy


@pytest.mark.parametrize(
    ("place", "tree"),
    [
        ("optim", {"model": MODEL, "optim": OPTIM}),
        ("app.optim", {"app": {"model": MODEL, "optim": OPTIM}}),
        ("", MODEL | OPTIM),
    ],
)
def test_optimizer_state_is_recognized_by_param_groups(place: str, tree: Any) -> None:
    (found,) = classify(contents(tree), None).optimizers
    assert (found.where, found.unsupported_reason) == (place, "")
    assert {name: set(entry) for name, entry in found.state.items()} == {"emb.weight": {"sum", "step"}}
    assert {number: set(group) for number, group in found.groups.items()} == {0: {"lr", "params"}}


@pytest.mark.parametrize(
    ("optim", "unsupported_reason"),
    [
        ({"state.emb.weight.sum": T, "param_groups.emb.weight.lr": 0.1}, "flattened"),
        (OPTIM | {"more": T}, "holds more"),
        (
            OPTIM | {"state": {"emb.weight": {"emb.momentum1": T}}},
            r"holds state\.emb\.weight\.emb\.momentum1",
        ),
        (OPTIM | {"state": {"emb.weight": {"inner": {"sum": T}}}}, r"holds state\.emb\.weight\.inner\.sum"),
    ],
)
def test_malformed_optimizer_state_is_explained(optim: Any, unsupported_reason: str) -> None:
    found = classify(contents({"model": MODEL, "optim": optim}), None)
    (optimizer,) = found.optimizers
    assert unsupported_reason.replace("\\", "") in optimizer.unsupported_reason
    assert found.left_out == ()
