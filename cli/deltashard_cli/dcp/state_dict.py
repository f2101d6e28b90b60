"""What was saved, sorted: the model's tensors by their names in it, the optimizer's state and groups, and the rest.

DCP keeps the path of every value in the nested state dict, and no word on what it is. So the optimizer's part is that
with `param_groups` (every optimizer's `state_dict` has them); the model's is the dict that is called `model` (there may
be others around it); where none is, the tensors of the outermost level, or the only dict of tensors there is. Anything
less certain is asked for.
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
    """What an optimizer's state dict holds; values are not read yet."""

    where: str
    state: dict[str, dict[str, StoredTensor | StoredObject]] = field(default_factory=dict)
    """Of each parameter, by its name in the dict."""
    groups: dict[int, dict[str, StoredTensor | StoredObject]] = field(default_factory=dict)
    unsupported_reason: str = ""
    """What keeps it from being imported; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedContents:
    """All values of a directory."""

    model: Mapping[str, StoredTensor]
    optimizers: tuple[OptimizerDict, ...]
    left_out: tuple[str, ...]
    """Names of what is neither."""


def classify(contents: Contents, model: str | None) -> ClassifiedContents:
    """Whose each value is; `model` is where the model's dict stands, with dots between the keys ("" outermost).

    Raises `UserError` when that is not said and not clear, and when it names nothing.
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
            f"no tensor stands under {prefix.rstrip('.')!r}" if prefix else "it holds no tensors",
            remedy=f"say --model with one of: {_dicts(rest)}",
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
                flat.unsupported_reason = "it was flattened, which does not say which parameters make a group"
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
        ):  # of a fused one it is table.momentum1
            optimizer.state.setdefault(name, {})[key] = value
        case _:
            optimizer.unsupported_reason = (
                optimizer.unsupported_reason or f"it holds {_dotted(inner)}, which no optimizer of torch does"
            )


def _under(path: ValuePath, place: ValuePath) -> bool:
    """Whether a path leads into the optimizer's dict at `place`: on the outermost level only its own keys do."""
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
        "which of these is the model's state dict?" if above else "it holds no tensors of a model",
        remedy=f"say --model with one of: {_dicts(rest)}",
    )


def _dicts(rest: Mapping[ValuePath, Any]) -> str:
    above = dict.fromkeys(
        _dotted(path[:-1]) for path, value in rest.items() if isinstance(value, StoredTensor)
    )
    return ", ".join(repr(place) for place in list(above)[:12]) or "none, there are no tensors"


def _dotted(path: ValuePath) -> str:
    return ".".join(map(str, path))
