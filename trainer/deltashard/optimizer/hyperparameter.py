"""Hyperparameters set by this script, and those set by the script that saved.

A restore applies the checkpoint's learning rates, weight decay, schedule length and so on, whatever this script sets.
Most differences come from training: a scheduler has lowered the rate. Changes made by a person are found by comparing
what both scripts *set* before training changed it, which a checkpoint records as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_MISSING = object()


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values among `values` by name: numbers, text, and lists, tuples and dicts of them."""
    found = {name: _plain(value) for name, value in values.items() if name != "params"}
    return {name: value for name, value in found.items() if value is not _MISSING}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (value set by the script that saved, value set by this one)} where both exist and differ."""
    return {
        name: (value, now[name]) for name, value in was.items() if name in now and not _same(value, now[name])
    }


def note(where: str, found: Mapping[str, tuple[Any, Any]], *, script: bool) -> list[str]:
    """Return a sentence about the differences, except names with "_"; `script`: this script's values are in force."""
    changes = ", ".join(f"{name} {was!r} -> {now!r}" for name, (was, now) in found.items() if name[:1] != "_")
    if not changes:
        return []
    fate = (
        "this script's values are in force"
        if script
        else "the checkpoint's values are in force; restore(hyperparameters=\"script\") takes this script's"
    )
    return [f"{where}: the script that saved set other hyperparameters than this one ({changes}): {fate}"]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else _MISSING
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        members = [_plain(each) for each in value]
        return _MISSING if any(each is _MISSING for each in members) else type(value)(members)
    if isinstance(value, dict):
        return given(value)
    return _MISSING


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124 - both are NaN
