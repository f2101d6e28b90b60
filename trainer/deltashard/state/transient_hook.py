"""Hooks on modules that a copy or pickle of the model carries along, where they do nothing."""

from __future__ import annotations

from typing import Any, Self


class TransientHook:
    """A callable that can be made without arguments, and does nothing then: what its copies are."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return (type(self), ())
