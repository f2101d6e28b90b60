"""Classification of saved values: model tensors, optimizer state and groups, and the rest.

DCP stores the path of every value in the nested state dict, but not its meaning. The optimizer's dict is the one with
`param_groups`. The model's dict is the one with the key `model`, at any depth; otherwise the tensors of the top level,
or the only dict of tensors. Any other case is an error that asks the user for the path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltashard_checkpoint.errors import UserError

from deltashard_cli.dcp.reader import Contents, StoredObject, StoredTensor, ValuePath

_GROUPS, _STATE, _MODEL = "param_groups", "state", "model"


@dataclass(slots=True, kw_only=True)
class OptimizerDict:
    """Content of an optimizer's state dict; values are not read yet."""

    where: str
    state: dict[str, dict[str, StoredTensor | StoredObject]] = field(default_factory=dict)
    groups: dict[int, dict[str, StoredTensor | StoredObject]] = field(default_factory=dict)
    unsupported_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedContents:
    """All values of a directory."""

    model: Mapping[str, StoredTensor]
    optimizers: tuple[OptimizerDict, ...]
    left_out: tuple[str, ...]


def classify(contents: Contents, model: str | None) -> ClassifiedContents:
    """Classify each value; `model` is the dotted path of the model's dict ("" is the top level, None infers it).

    Raises `UserError` if the path cannot be inferred or contains no tensors.
    """
    optimizers = _optimizers(contents)
    rest = {
        path: value
        for path, value in contents.items()
        if not any(_under(path, place) for place in optimizers)
    }
    prefix = _prefix_of(rest) if model is None else f"{model}." if model else ""
    found = {
        name[len(prefix) :]: value
        for path, value in rest.items()
        if isinstance(value, StoredTensor)
        and (name := _dotted(path)).startswith(prefix)
        and (prefix or len(path) == 1)
    }
    if not found:
        raise UserError(
            f"no tensors under {prefix.rstrip('.')!r}" if prefix else "no tensors at the top level",
            remedy=f"use --model with one of: {_dicts(rest)}",
        )
    taken = {prefix + name for name in found}
    return ClassifiedContents(
        model=found,
        optimizers=tuple(optimizers.values()),
        left_out=tuple(name for path in rest if (name := _dotted(path)) not in taken),
    )


def _optimizers(contents: Contents) -> dict[ValuePath, OptimizerDict]:
    found: dict[ValuePath, OptimizerDict] = {}
    for path in contents:
        for at, key in enumerate(path):
            if key == _GROUPS and at + 1 < len(path):
                found.setdefault(path[:at], OptimizerDict(where=_dotted(path[:at])))
            elif isinstance(key, str) and key.startswith(f"{_GROUPS}."):
                flat = found.setdefault(path[:at], OptimizerDict(where=_dotted(path[:at])))
                flat.unsupported_reason = "it was flattened, which loses the parameters of each group"
    for path, value in contents.items():
        for place, optimizer in found.items():
            if _under(path, place):
                _add(optimizer, path[len(place) :], value)
    return found


def _add(optimizer: OptimizerDict, inner: ValuePath, value: StoredTensor | StoredObject) -> None:
    match inner:
        case ("param_groups", int() as number, str() as key):
            optimizer.groups.setdefault(number, {})[key] = value
        case ("state", str() as name, str() as key) if (
            key.isidentifier()
        ):  # fused optimizers have table.momentum1
            optimizer.state.setdefault(name, {})[key] = value
        case _:
            optimizer.unsupported_reason = (
                optimizer.unsupported_reason or f"it holds {_dotted(inner)}, unlike any torch optimizer"
            )


def _under(path: ValuePath, place: ValuePath) -> bool:
    """Whether `path` is inside the optimizer's dict at `place`; at the top level only for an optimizer's keys."""
    if path[: len(place)] != place or len(path) <= len(place):
        return False
    key = str(path[len(place)])
    return bool(place) or key in (_GROUPS, _STATE) or key.startswith((f"{_GROUPS}.", f"{_STATE}."))


def _prefix_of(rest: Mapping[ValuePath, Any]) -> str:
    above = list(dict.fromkeys(path[:-1] for path, value in rest.items() if isinstance(value, StoredTensor)))
    called = [place for place in above if place and place[-1] == _MODEL]
    if len(called) == 1 or (not called and len(above) == 1 and above != [()]):
        return f"{_dotted((called or above)[0])}."
    if not called and () in above:
        return ""
    raise UserError(
        "the model's state dict is ambiguous" if above else "the directory has no tensors of a model",
        remedy=f"use --model with one of: {_dicts(rest)}",
    )


def _dicts(rest: Mapping[ValuePath, Any]) -> str:
    above = dict.fromkeys(
        _dotted(path[:-1]) for path, value in rest.items() if isinstance(value, StoredTensor)
    )
    return ", ".join(repr(place) for place in list(above)[:12]) or "none (no tensors)"


def _dotted(path: ValuePath) -> str:
    return ".".join(map(str, path))
